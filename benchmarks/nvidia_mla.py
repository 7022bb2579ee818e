"""When MLA's keys and values are worth expanding, on an NVIDIA GPU: `python benchmarks/nvidia_mla.py`.

Each row is one layer's step from q before absorption, with DeepSeek-V3's sizes: absorbed, expanded, and what
`attention/mla.py` chooses. Microseconds of `AttentionRuntime.run`, medians, as replays of a captured graph of the plan,
so that only the device counts. The exit code is 1 where a choice takes more than 1.1 times as long as the other way
and 20 us more, or where the two differ in their results, and 2 without an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from mem_cache_report import Timer
from nvidia_measure import captured
from nvidia_report import nvidia_gpu, versions
from rich.console import Console
from rich.table import Table

import anyattn
from anyattn import AttentionSpec
from anyattn.attention.batch import Batch
from anyattn.attention.runtime import Plan

# A file that is called nvidia must not be found where a vendor imports its own package of that name.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent.resolve()]

ROWS = (
    (1, 16, 0), (1, 64, 0), (1, 128, 0), (1, 512, 0), (1, 4096, 0), (8, 32, 0), (4, 512, 0),
    (1, 64, 4096), (1, 128, 4096), (1, 256, 4096), (1, 512, 4096), (1, 2048, 4096), (1, 512, 32768), (4, 256, 16384),
)  # fmt: skip
"""Sequences, new tokens of each, tokens before them."""
WAYS = ("absorbed", "expanded", "chosen")
REPEATS = 15
NOPE, ROPE, RANK, V = 128, 64, 512, 128


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table for each number of heads; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="which GPU, as torch calls it")
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 16], help="of the queries; by default 128 and 16")
    options = parser.parse_args(arguments)
    platform = nvidia_gpu(options.device)
    if platform is None:
        return 2
    console = Console(width=120)
    device = torch.device(platform.torch_device)
    torch.cuda.set_device(device)
    console.print(f"{platform}, {', '.join(f'{name} {version}' for name, version in versions().items())}")
    timer = Timer(device, REPEATS)
    missed = 0
    for heads in options.heads:
        table = Table("batch", "new", "before", *WAYS, "", title=f"MLA before absorption, {heads} heads")
        for batch, new, before in ROWS:
            with torch.inference_mode():
                times, worst = measure(heads, batch, new, before, platform, timer)
            best = min(times["absorbed"], times["expanded"])
            differs = not worst <= 0.05  # NaN does
            wrong = differs or times["chosen"] > max(1.1 * best, best + 20)
            missed += wrong
            row = [str(batch), str(new), str(before), *(f"{times[way]:.0f}" for way in WAYS)]
            table.add_row(*row, f"[red]{worst:.3f} apart[/]" if differs else "[red]missed[/]" if wrong else "")
        console.print(table)
    return int(missed > 0)


def measure(
    heads: int, batch: int, new: int, before: int, platform: anyattn.Platform, timer: Timer
) -> tuple[dict[str, float], float]:
    """By way the median time, and the largest difference of the results, in parts of the largest of them."""
    spec = AttentionSpec.mla(
        num_qo_heads=heads, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=V,
        sm_scale=(NOPE + ROPE) ** -0.5,
    )  # fmt: skip
    num_pages = batch * -(-(new + before) // 64)
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=num_pages, page_size=64, device=platform)
    tensors: dict[str, Any] = {"dtype": torch.bfloat16, "device": rt.device}
    rt.bind_mla(0, torch.randn(heads, NOPE, RANK, **tensors) / 23, torch.randn(heads, RANK, V, **tensors) / 23)
    rt.pools[0].layers[0].k[1:].normal_()
    seqs, tokens = rt.new_sequences(batch), batch * new
    if before:
        rt.extend(seqs, [before] * batch)
    step = rt.extend(seqs, [new] * batch)
    q, latents = torch.randn(tokens, heads, NOPE + ROPE, **tensors), torch.randn(tokens, RANK + ROPE, **tensors)
    (path,) = (each for each in rt._mla_paths if each is not None)
    ways: dict[str, Callable[[], object]] = {}
    calls = []  # kept, as a graph reads the tensors of a plan and does not keep them
    results: dict[str, torch.Tensor] = {}
    choose = path._worth_expanding
    forced = {"absorbed": np.zeros(0, dtype=np.int64), "expanded": np.arange(batch), "chosen": choose(step)}
    for way, sequences in forced.items():
        path._worth_expanding = functools.partial(_always, sequences)  # type: ignore[method-assign]
        plan = rt.plan(step)

        def run(plan: Plan = plan) -> torch.Tensor:
            result: torch.Tensor = rt.run(0, q, latents, None, plan)
            return result

        calls.append(run)
        ways[way], results[way] = captured(run)
    times = {way: statistics.median(found) for way, found in timer(ways).items()}
    right = results["absorbed"].float()
    apart = torch.stack([results[way].float() - right for way in ("expanded", "chosen")]).abs().max()
    return times, float(apart / right.abs().max())


def _always(sequences: npt.NDArray[np.int64], _: Batch) -> npt.NDArray[np.int64]:
    return sequences


if __name__ == "__main__":
    sys.exit(main())

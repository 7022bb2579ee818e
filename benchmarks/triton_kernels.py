"""Where the time of the `triton` backend goes: `python benchmarks/triton_kernels.py [--device cuda]`.

For some of triton_backend.py's rows, at pages of 64, each kernel's time as torch's profiler reads it from the device, a
median of steps between which the cache is flushed: the division of the work, done once a step for all layers, the
attention, and the merge. A merge starts before the attention ends, and waits, so that its time has the wait in it.
Beside them whether work was divided: programs that have some, and the most parts that a sequence is in. The exit code
is 2 without an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from nvidia_report import nvidia_gpu
from nvidia_rows import Group, Row
from nvidia_runtimes import Inputs, layer_kv, open_step, planned
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from triton_measure import Backends

from anyattn import AttentionSpec, Platform

# A file that is called nvidia must not be found where a vendor imports its own package of that name.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).parent.resolve()]

STEPS = 7
FLUSHED_BYTES = 256 << 20
DECODES = tuple(Row(batch=batch, length=length) for batch, length in ((1, 8192), (8, 4096), (32, 8192), (128, 8192)))


def groups() -> list[Group]:
    """MLA of 16, 32 and 128 heads, and GQA."""
    gqa = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    prefill = (Row(batch=1, length=4096, num_new=4096), Row(batch=4, length=16384, num_new=512))
    specs = {
        f"MLA, {heads} heads": AttentionSpec.mla(
            num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=192**-0.5
        )
        for heads in (16, 32, 128)
    }
    found = [Group(name=name, spec=spec, page_size=64, rows=DECODES, kernels={}) for name, spec in specs.items()]
    return [*found, Group(name="GQA", spec=gqa, page_size=64, rows=(*DECODES[:3], *prefill), kernels={})]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="which GPU, as torch calls it")
    options = parser.parse_args(arguments)
    platform = nvidia_gpu(options.device)
    if platform is None:
        return 2
    table = Table("layers", "row", "kernels, us", "programs", "most parts", title=f"{platform}")
    with torch.inference_mode():
        for group in groups():
            backends = Backends(group, group.rows, platform)
            for row in group.rows:
                table.add_row(group.name, str(row), *_profiled(group, row, backends, platform))
    Console(width=160).print(table)
    return 0


def _profiled(group: Group, row: Row, backends: Backends, platform: Platform) -> tuple[str, str, str]:
    device = torch.device(platform.torch_device)
    inputs = Inputs.random(group, row, device)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    with open_step(backends.runtime, row) as plan:
        step, kv, out = planned(plan), layer_kv(backends.runtime), inputs.new_out(group)
        step.run(inputs.q, kv, out)  # compiles
        torch.cuda.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(STEPS):
                flushed.zero_()
                step.backend.refresh_graph(step.plan, plan.batch)  # divides the work again
                step.run(inputs.q, kv, out)
            torch.cuda.synchronize(device)
        divisions = step.plan.divisions
        busy = [int((division.records[:, 0] >= 0).sum()) for division in divisions]
        parts = [int(division.merges[:, 0].max()) if division.num_merges else 0 for division in divisions]
    times: dict[str, list[float]] = {}
    for event in found.events():
        if event.name.endswith("_kernel"):
            times.setdefault(event.name.removesuffix("_kernel"), []).append(event.device_time)
    shown = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in times.items())
    return shown, " + ".join(map(str, busy)), " + ".join(map(str, parts))


if __name__ == "__main__":
    sys.exit(main())

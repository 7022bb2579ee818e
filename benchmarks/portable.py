"""The backends that are valid on this device against each other: `python benchmarks/portable.py [--device cuda]`.

A step is everything that a step costs: the batch's tables, the plan, and storing and attending in every layer. Compiled
backends compile in the first step of a kind, which is shown apart. The limit is what reading the keys and values of all
layers once would take at the bandwidth that a copy within the device reaches, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

import anyattn
from anyattn import AttentionSpec, Platform
from anyattn.discovery import usable_device

STEPS = {
    "prefill 8 x 1000": ([1000] * 8, [0] * 8),
    "decode 8 at 1000": ([1] * 8, [1000] * 8),
    "decode 32 at 4096": ([1] * 32, [4096] * 32),
}
"""By name: the new tokens of each sequence, and those before them."""


def main() -> None:
    """Prints one row a backend and kind of step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help="a device kind or torch device; by default the first usable one")
    parser.add_argument("--backends", nargs="+", help="by default all that are valid but the reference")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, choices=range(1, 100), metavar="N")
    options = parser.parse_args()
    spec = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
    platform = usable_device(options.device)
    backends = options.backends or [name for name in platform.backends(spec) if name != "reference"]
    table = Table("step", "backend", "first step, ms", "median, ms", "spread, ms", "limit, ms", "of the limit")
    for name, (new, before) in STEPS.items():
        for backend in backends:
            device, times = measured(spec, backend, new, before, platform, options)
            tokens = sum(new) + sum(before)
            kv_bytes = spec.cache_spec(num_layers=options.layers, page_size=1, layout="NHD").bytes_per_token * tokens
            limit = 1e3 * kv_bytes / bandwidth(device)
            median = statistics.median(times[1:])
            spread = f"{min(times[1:]):.2f} to {max(times[1:]):.2f}"
            figures = (f"{times[0]:.0f}", f"{median:.2f}", spread, f"{limit:.3f}", f"{limit / median:.1%}")
            table.add_row(name, backend, *figures)
    Console(width=140).print(f"{platform}, torch {torch.__version__}, {options.layers} layers of [{spec}]", table)


def measured(
    spec: AttentionSpec,
    backend: str,
    new: Sequence[int],
    before: Sequence[int],
    platform: Platform,
    options: argparse.Namespace,
) -> tuple[torch.device, list[float]]:
    """Milliseconds of each step, the first one included."""
    pages = sum(-(-(n + b + options.repeats) // 16) + 1 for n, b in zip(new, before, strict=True))
    rt = anyattn.create_runtime(
        spec, num_layers=options.layers, num_pages=pages, device=platform, backend=backend, page_size=16
    )
    tokens = sum(new)
    decodes = max(new) == 1
    q = torch.randn(tokens, spec.num_qo_heads, spec.head_dim, dtype=torch.bfloat16, device=rt.device)
    k, v = (
        torch.randn(tokens, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16, device=rt.device) for _ in range(2)
    )
    times = []
    for repeat in range(options.repeats + 1):
        seqs = rt.new_sequences(len(new))
        rt.extend(seqs, [n + repeat * decodes for n in before])  # no two steps of an engine have the same lengths
        synchronize(rt.device)
        start = time.perf_counter()
        plan = rt.plan(rt.extend(seqs, new))
        for layer in range(options.layers):
            rt.run(layer, q, k, v, plan)
        synchronize(rt.device)
        times.append(1e3 * (time.perf_counter() - start))
        rt.free(seqs)
    return rt.device, times


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes together."""
    source = torch.zeros((1 << 28) if device.type == "cpu" else (1 << 31), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(4):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.numel() / best


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


if __name__ == "__main__":
    main()

"""Attention on this CPU beside what its memory and torch's own attention do: `python benchmarks/cpu.py [--json FILE]`.

Decode is measured as the share of the read bandwidth that it reaches: the bytes of the keys and values that a layer
reads, by the time that storing and attending take, over what a warm `torch.sum` over 1 GiB reads in the calls before
and after. Prefill is measured against `scaled_dot_product_attention` on contiguous tensors. All of a row are timed in
turn, and the median is of the ratios within each round, as a machine that others use changes its speed.

Pages lie in random order in pools far larger than the caches. Of each call the most memory beside the pool is told:
the growth of the process's peak over what it held before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

import anyattn
from anyattn import AttentionSpec
from anyattn.attention.runtime import AttentionRuntime
from anyattn.discovery import usable_device
from anyattn.errors import NoBackendError

Timed = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Row:
    """new, before: tokens of each of `num_seqs` sequences. share: the least that is asked for, of its peer or limit."""

    name: str
    spec: AttentionSpec
    num_seqs: int
    new: int
    before: int
    share: float | None = None

    @property
    def read_bytes(self) -> int:
        """Of the keys and values that one layer reads."""
        seen = self.before + self.new
        if self.spec.sliding_window is not None:
            seen = min(seen, self.spec.sliding_window + self.new - 1)
        cache = self.spec.cache_spec(num_layers=1, page_size=1, layout="NHD")
        return self.num_seqs * seen * cache.bytes_per_token


@dataclass(kw_only=True)
class Result:
    """ms: the median time of a layer. ratio: the median of what the row is measured by. peak_bytes: beside the pool."""

    row: str
    who: str
    ms: float
    ratio: float
    spread: tuple[float, float]
    peak_bytes: int | None
    met: bool | None = None
    times: list[float] = field(repr=False, default_factory=list)


def specs(**changes: Any) -> AttentionSpec:
    """Llama 3 8B's layers, changed."""
    return AttentionSpec(**{"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, **changes})


def rows(scale: int) -> list[Row]:
    """scale: what the tokens are divided by."""
    mla = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
    mla_128 = AttentionSpec.mla(num_qo_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)
    length = 4096 // scale
    decode = {
        "bfloat16": (specs(), 0.55),
        "float16": (specs(dtype="float16"), None),
        "float32": (specs(dtype="float32"), None),
        "fp8 cache": (specs(kv_dtype="float8_e4m3fn"), None),
        "8 heads, no groups": (specs(num_qo_heads=8), None),
        "1 KV head of 16": (specs(num_qo_heads=16, num_kv_heads=1), None),
        "heads of 64": (specs(num_qo_heads=9, num_kv_heads=3, head_dim=64), None),
        "window 1024, cap, sinks": (specs(sliding_window=1024, logits_soft_cap=30.0, sinks=True), None),
        "MLA, 16 heads": (mla, None),
        "MLA, 128 heads": (mla_128, None),
    }
    found = [
        Row(name=f"decode 16 x {length}, {name}", spec=spec, num_seqs=16, new=1, before=length - 1, share=share)
        for name, (spec, share) in decode.items()
    ]
    long = 8 * length
    found.append(Row(name=f"decode 1 x {long}", spec=specs(), num_seqs=1, new=1, before=long - 1, share=0.45))
    half = length // 2
    return [
        *found,
        Row(name=f"verify 4 x {length}, 4 new", spec=specs(), num_seqs=4, new=4, before=length - 4),
        Row(name=f"prefill {half}", spec=specs(), num_seqs=1, new=half, before=0, share=1 / 1.1),
        Row(name=f"prefill {half} on {half}", spec=specs(), num_seqs=1, new=half, before=half, share=1 / 1.1),
    ]


class Bench:
    """One row's runtime and inputs for one backend; a call attends in the next layer."""

    def __init__(self, row: Row, backend: str, pool_bytes: int) -> None:
        spec, total = row.spec, row.num_seqs * row.new
        pages = row.num_seqs * (-(-(row.before + row.new) // 16))
        page_bytes = spec.cache_spec(num_layers=1, page_size=16, layout="NHD").bytes_per_page
        layers = max(pool_bytes // (pages * page_bytes), 2)
        self.rt: AttentionRuntime = anyattn.create_runtime(
            spec, num_layers=layers, num_pages=pages, page_size=16, backend=backend, device="cpu"
        )
        fill(self.rt)
        shuffle_pages(self.rt, pages)
        seqs = self.rt.new_sequences(row.num_seqs)
        if row.before:
            self.rt.extend(seqs, [row.before] * row.num_seqs)
        self.plan = self.rt.plan(self.rt.extend(seqs, [row.new] * row.num_seqs))
        dtype = getattr(torch, spec.dtype)
        self.q = torch.randn(total, spec.num_qo_heads, spec.head_dim).to(dtype)
        if spec.is_mla:
            self.k, self.v = torch.randn(total, spec.head_dim).to(dtype), None
        else:
            self.k, self.v = (torch.randn(total, spec.num_kv_heads, spec.head_dim).to(dtype) for _ in range(2))
        self.named = {"sinks": torch.randn(spec.num_qo_heads)} if spec.sinks else {}
        self.layer, self.layers = 0, layers

    def __call__(self) -> object:
        self.layer = (self.layer + 1) % self.layers
        return self.rt.run(self.layer, self.q, self.k, self.v, self.plan, **self.named)


def fill(rt: AttentionRuntime) -> None:
    """Random keys and values, the same every few megabytes, as drawing all of them would take minutes."""
    block = torch.randn((1 << 20) + 77)
    for kv in rt.pools[0].layers:
        for part in (kv.k,) if kv.v_in_k else (kv.k, kv.v):
            flat = part.view(-1)
            piece = block.to(part.dtype)
            for start in range(0, flat.numel(), piece.numel()):
                flat[start : start + piece.numel()] = piece[: flat.numel() - start]


def shuffle_pages(rt: AttentionRuntime, pages: int) -> None:
    """Lets the allocator hand out pages in random order from now on."""
    taken = rt.new_sequences(pages)
    rt.extend(taken, [1] * pages)
    order = list(range(pages))
    random.shuffle(order)
    for index in order:
        rt.free([taken[index]])


def contiguous_sdpa(row: Row) -> Timed:
    """torch's attention with all keys and values behind one another; the mask is made once."""
    spec, seen = row.spec, row.before + row.new
    dtype = getattr(torch, spec.dtype)
    q = torch.randn(1, spec.num_qo_heads, row.new, spec.head_dim).to(dtype)
    k, v = (torch.randn(1, spec.num_kv_heads, seen, spec.head_dim).to(dtype) for _ in range(2))
    k, v = (part.repeat_interleave(spec.group_size, dim=1) for part in (k, v))
    if not row.before:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
    mask = torch.ones(row.new, seen, dtype=torch.bool).tril(row.before)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)


_READ = torch.ones(1 << 28)


def seconds(call: Timed) -> float:
    """Of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def read_bandwidth() -> float:
    """Bytes a second that a sum over 1 GiB reads, with as many threads as torch has."""
    return _READ.numel() * 4 / seconds(_READ.sum)


def peak_of(call: Timed) -> int | None:
    """How far a call raises the memory that this process holds, in bytes; None where Linux does not tell."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        clear.write_text("5", encoding="ascii")
    except OSError:
        return None

    def held(name: str) -> int:
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith(name))
        return 1024 * int(line.split()[1])

    before = held("VmRSS")
    call()
    return max(held("VmHWM") - before, 0)


def measure(row: Row, backends: Sequence[str], rounds: int, pool_bytes: int) -> list[Result]:
    """One result for each backend that is valid, and for prefill one for the peer."""
    calls: dict[str, Timed] = {}
    for name in backends:
        try:
            calls[name] = Bench(row, name, pool_bytes)
        except NoBackendError:
            continue
    is_prefill = row.new > 16
    peaks: dict[str, int | None] = {}
    for name, call in calls.items():
        peaks[name] = peak_of(call)  # the first call, which makes the buffers that later ones use again
        for _ in range(2):
            call()
    if is_prefill:
        calls["sdpa, contiguous"] = contiguous_sdpa(row)
        calls["sdpa, contiguous"]()
    times: dict[str, list[float]] = {name: [] for name in calls}
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            before = 0.0 if is_prefill else read_bandwidth()
            times[name].append(seconds(call))
            if not is_prefill:
                reached = row.read_bytes / times[name][-1]
                ratios[name].append(2 * reached / (before + read_bandwidth()))
        if is_prefill:
            for name in calls:
                ratios[name].append(times["sdpa, contiguous"][-1] / times[name][-1])
    results = []
    for name in calls:
        ratio = statistics.median(ratios[name])
        asked = row.share if name == "intel_cpu" else None
        results.append(
            Result(
                row=row.name,
                who=name,
                ms=1e3 * statistics.median(times[name]),
                ratio=ratio,
                spread=(min(ratios[name]), max(ratios[name])),
                peak_bytes=peaks.get(name),
                met=None if asked is None else ratio >= asked,
                times=times[name],
            )
        )
    return results


def smollm2(path: str, rounds: int, new_tokens: int) -> list[Result]:
    """Greedy decode of SmolLM2-135M, bfloat16: tokens a second of ours over those of transformers with `sdpa`."""
    from anyattn.integrations.transformers import PagedGenerator, register
    from anyattn.integrations.transformers.loading import find_default_model, load_model

    register()
    model, _ = load_model(path or find_default_model(), dtype="bfloat16", device="cpu")
    results = []
    for num_seqs in (1, 16):
        prompts = [[1 + (7 * i + j) % 4000 for j in range(64)] for i in range(num_seqs)]
        ids = torch.tensor(prompts)

        def theirs(count: int, ids: torch.Tensor = ids) -> float:
            model.set_attn_implementation("sdpa")
            named = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
            return seconds(lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **named))

        def ours(count: int, prompts: list[list[int]] = prompts) -> float:
            model.set_attn_implementation("anyattn")
            generator = PagedGenerator(model, num_pages=16 * len(prompts))
            return seconds(lambda: generator.generate(prompts, max_new_tokens=count))

        calls = {"anyattn": ours, "transformers sdpa": theirs}
        rates: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds + 1):  # the first compiles, and is left out
            for name, call in calls.items():
                first = call(1)  # the prefill
                rates[name].append(num_seqs * (new_tokens - 1) / (call(new_tokens) - first))
        pairs = list(zip(rates["anyattn"][1:], rates["transformers sdpa"][1:], strict=True))
        for name in calls:
            ratios = [mine / other for mine, other in pairs] if name == "anyattn" else [1.0]
            rate = statistics.median(rates[name][1:])
            results.append(
                Result(
                    row=f"SmolLM2-135M, batch {num_seqs}, {rate:.1f} tokens/s",
                    who=name,
                    ms=1e3 * num_seqs / rate,
                    ratio=statistics.median(ratios),
                    spread=(min(ratios), max(ratios)),
                    peak_bytes=None,
                    met=statistics.median(ratios) >= 1.0 if name == "anyattn" else None,
                )
            )
    return results


def show(results: Sequence[Result]) -> None:
    """A table: for decode the share of the read bandwidth, for prefill and the model the peer's time over ours."""
    table = Table("row", "who", "ms", "ratio", "spread", "peak beside the pool, MiB", "target")
    for result in results:
        low, high = result.spread
        peak = "" if result.peak_bytes is None else f"{result.peak_bytes / 2**20:.1f}"
        met = {None: "", True: "met", False: "missed"}[result.met]
        spread = f"{low:.2f} to {high:.2f}"
        table.add_row(result.row, result.who, f"{result.ms:.2f}", f"{result.ratio:.2f}", spread, peak, met)
    Console(width=160).print(table)


def main() -> int:
    """Returns 1 where a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, help="by default torch's")
    parser.add_argument("--scale", type=int, default=1, help="divides all lengths")
    parser.add_argument("--pool-gib", type=float, default=1.9)
    parser.add_argument("--backends", nargs="+", default=["intel_cpu", "torch_native"])
    parser.add_argument("--rows", default="", help="only rows whose names have this")
    parser.add_argument("--model", nargs="?", const="", metavar="GGUF", help="SmolLM2's decode too; it takes minutes")
    parser.add_argument("--json", type=Path, help="writes all figures there")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = usable_device("cpu")
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}", flush=True)
    results: list[Result] = []
    with torch.inference_mode():
        read_bandwidth()
        print(f"read bandwidth {read_bandwidth() / 1e9:.1f} GB/s", flush=True)
        for row in rows(options.scale):
            if options.rows in row.name:
                results += measure(row, options.backends, options.rounds, int(options.pool_gib * 2**30))
        if options.model is not None:
            results += smollm2(options.model, max(options.rounds // 3, 1), 64)
    show(results)
    if options.json:
        figures = [asdict(each) for each in results]
        document = {"device": device.to_json(), "torch": torch.__version__, "results": figures}
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return int(any(result.met is False for result in results))


if __name__ == "__main__":
    sys.exit(main())

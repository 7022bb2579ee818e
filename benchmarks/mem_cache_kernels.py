"""The sections indices and store of mem_cache.py: kernels against a plain copy and the peer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mem_cache_peers as peers
import torch
from mem_cache_report import COPY, OURS, Report, Timer, loaded, require

from anyattn.mem_cache.spec import CacheSpec


def indices_section(report: Report, timer: Timer, device: torch.device, quick: bool) -> None:
    """CSR and dense tables of page ids at page size 1, rows of the page table in random order."""
    shrink = 64 if quick else 1
    shapes = {
        "8 x 131072": ([131072 // shrink] * 8, {COPY: 1.5}),
        "64 x 8192": ([8192 // shrink] * 64, {COPY: 1.5}),
        "131072, and 255 x 512": ([131072 // shrink, *[512 // shrink] * 255], {}),
    }
    for name, (lengths, targets) in shapes.items():
        name = f"{name} tokens" + (f" / {shrink}" if quick else "")
        with report.case("indices", name):
            measure_indices(report, timer, device, name, lengths, targets)


def measure_indices(
    report: Report,
    timer: Timer,
    device: torch.device,
    name: str,
    lengths: Sequence[int],
    targets: Mapping[str, float],
) -> None:
    """Ours, a copy and the peer, for one batch."""
    from anyattn.mem_cache.kernels.indices import step_indices

    num_seqs, total, longest = len(lengths), sum(lengths), max(lengths)
    page_table = torch.randint(1, total + 1, (num_seqs + 8, longest), dtype=torch.int32, device=device)
    rows = torch.randperm(num_seqs + 8, device=device)[:num_seqs].int()
    kv_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    qo_indptr = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    kv_indptr = torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
    kv_indptr[1:] = kv_lens.cumsum(0)
    batch = (page_table, rows, kv_lens, kv_lens - 1, qo_indptr, kv_indptr)

    ours, theirs, copied = (torch.full((total,), -1, dtype=torch.int32, device=device) for _ in range(3))
    ways: dict[str, Callable[[], object]] = {
        OURS: lambda: step_indices(*batch, 1, kv_indices=ours),
        COPY: lambda: copied.copy_(theirs),
        "peer: one program a request": lambda: peers.kv_indices(page_table, rows, kv_lens, kv_indptr, theirs),
    }
    expected = torch.cat([page_table[row, :length] for row, length in zip(rows.tolist(), lengths, strict=True)])
    for way in ways.values():
        way()
    require(torch.equal(ours, expected), "kv_indices are not the rows' page ids")
    require(torch.equal(theirs, expected), "the peer's kv_indices are not the rows' page ids")
    report.add_times(
        "indices", f"kv_indices: {name}", timer(ways), num_bytes=8 * total, targets=targets, notes=timer.launches(ways)
    )

    table, copied_table = (torch.full((num_seqs, longest), -1, dtype=torch.int32, device=device) for _ in range(2))
    ways = {
        OURS: lambda: step_indices(*batch, 1, block_table=table),
        COPY: lambda: copied_table.copy_(table),
        "peer: gather of rows": lambda: peers.block_table(page_table, rows, longest),
    }
    ways[OURS]()
    inside = torch.arange(longest, device=device) < kv_lens[:, None]
    require(torch.equal(table, torch.where(inside, page_table[rows], 0)), "block_table is not the rows, padded with 0")
    num_bytes = 4 * (total + table.numel())
    report.add_times("indices", f"block_table: {name}", timer(ways), num_bytes=num_bytes, notes=timer.launches(ways))


@dataclass(frozen=True, kw_only=True)
class Stored:
    """What is stored where. qkv: whether k and v are views of a fused projection's output."""

    pool: str = "anyattn.mem_cache.pool:MHAPool"
    kind: str = "mha"
    page_size: int = 16
    layout: str = "NHD"
    kv_dtype: str = "bfloat16"
    qkv: bool = False
    scale: float = 1.0
    num_layers: int = 1
    """Where several, joined in one storage."""
    targets: Mapping[str, float] = field(default_factory=dict)

    def cache(self) -> CacheSpec:
        """Heads of 128, eight of them, or what the kind prescribes."""
        sizes = {"mha": (8, 128, 128), "mla": (1, 576, 512), "dsa": (1, 576, 512), "index": (1, 128, 0)}[self.kind]
        return CacheSpec(
            num_layers=self.num_layers,
            num_kv_heads=sizes[0],
            head_dim=sizes[1],
            v_head_dim=sizes[2],
            kv_dtype=self.kv_dtype,
            page_size=self.page_size,
            layout=self.layout,  # type: ignore[arg-type]
            kind=self.kind,  # type: ignore[arg-type]
            joined_layers=self.num_layers > 1,
        )


STORES = {
    "page 16": Stored(targets={COPY: 1.25}),
    "page 64": Stored(page_size=64, targets={COPY: 1.25}),
    "page 1": Stored(page_size=1),
    "page 16, views of a fused qkv": Stored(qkv=True),
    "page 16, HND": Stored(layout="HND"),
    "page 16, NZ": Stored(layout="NZ"),
    "page 16, 5D": Stored(layout="5D"),
    "page 16, fp8 with scales": Stored(kv_dtype="float8_e4m3fn", scale=0.5),
    "page 64, MLA of 576": Stored(pool="anyattn.mem_cache.pool:MLAPool", kind="mla", page_size=64),
    "page 64, MLA of 576, fp8 with a scale": Stored(
        pool="anyattn.mem_cache.pool:MLAPool", kind="mla", page_size=64, kv_dtype="float8_e4m3fn", scale=0.5
    ),
    "page 64, DSA rows of 656 bytes": Stored(
        pool="anyattn.mem_cache.sparse_pools:DSAPool", kind="dsa", page_size=64, kv_dtype="float8_e4m3fn"
    ),
    "page 64, keys of an indexer": Stored(
        pool="anyattn.mem_cache.sparse_pools:IndexKPool", kind="index", page_size=64, kv_dtype="float8_e4m3fn"
    ),
}


def store_section(report: Report, timer: Timer, device: torch.device, quick: bool) -> None:
    """8192 tokens of 8 x 128, keys and values, into whole pages in random order."""
    num_tokens = 128 if quick else 8192
    for name, stored in STORES.items():
        name = f"{num_tokens} tokens, {name}"
        with report.case("store", name):
            measure_store(report, timer, device, name, stored, num_tokens)


def read_back(pool: Any, pages: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Stored keys and values of whole pages, not yet multiplied with a scale, float32; None for what is not stored."""
    k, v = pool.layers[0].gather(pages)
    if pool.cache.kind == "mha":
        return k.float(), v.float()
    if pool.cache.kind == "mla":
        return k.float(), None
    from anyattn.mem_cache.sparse_pools import dsa_rows, index_keys

    return (dsa_rows(k) if pool.cache.kind == "dsa" else index_keys(k)), None


def measure_store(
    report: Report, timer: Timer, device: torch.device, name: str, stored: Stored, num_tokens: int
) -> None:
    """Ours, a copy and, where pages have a plain view, `index_put`."""
    cache, page_size = stored.cache(), stored.page_size
    num_pages = 4 * num_tokens // page_size
    ours, theirs = (loaded(stored.pool)(cache, num_pages, device) for _ in range(2))
    if stored.scale != 1.0:
        ours.set_scales(0, stored.scale, stored.scale)
    pages = 1 + torch.randperm(num_pages, device=device)[: num_tokens // page_size]
    slots = (pages[:, None] * page_size + torch.arange(page_size, device=device)).flatten()
    shape = (num_tokens, cache.num_kv_heads, cache.head_dim) if stored.kind == "mha" else (num_tokens, cache.head_dim)
    qkv = torch.randn(num_tokens, 48, 128, dtype=torch.bfloat16, device=device)
    k, v = (
        (qkv[:, 32:40], qkv[:, 40:])
        if stored.qkv
        else (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    )
    sources = (k, v) if stored.kind == "mha" else (k, None)
    read_bytes = sum(source.numel() * source.element_size() for source in sources if source is not None)
    num_bytes = read_bytes + num_tokens * cache.bytes_per_token
    plain = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    copied = torch.empty_like(plain)
    ways: dict[str, Callable[[], object]] = {
        OURS: lambda: ours.store(0, *sources, slots),
        COPY: lambda: copied.copy_(plain),
    }
    if stored.layout in ("NHD", "HND") and stored.kind in ("mha", "mla"):
        parts = theirs.layers[0].nhd()
        inputs = [source if source.ndim == 3 else source[:, None] for source in sources if source is not None]
        targets = list(zip(parts, inputs, strict=False))  # MLA's values lie in its keys
        put = "peer: index_put" if len(inputs) == 1 else "peer: two index_put"
        ways[put] = lambda: peers.store(targets, slots, stored.scale)
    for way in ways.values():
        way()
    for pool in (ours, theirs) if len(ways) == 3 else (ours,):
        for found, source in zip(read_back(pool, pages), sources, strict=True):
            if found is not None and source is not None:
                tolerance = 0.0 if stored.kv_dtype == "bfloat16" else 2.0**-3  # a rounding step of fp8
                wanted = source.float() / stored.scale
                close = torch.allclose(found.view(shape), wanted, rtol=tolerance, atol=tolerance / 64)
                require(close, f"what {'we' if pool is ours else 'the peer'} stored is not what was given")
    report.add_times(
        "store", name, timer(ways), num_bytes=num_bytes, targets=stored.targets, notes=timer.launches(ways)
    )

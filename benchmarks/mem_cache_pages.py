"""The sections tier and big of mem_cache.py: pages that move, and pools of more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mem_cache_kernels import Stored
from mem_cache_report import COPY, OURS, Report, Timer, loaded, require, wall_us

from anyattn.mem_cache.spec import CacheSpec


def tier_section(report: Report, timer: Timer, device: torch.device, quick: bool) -> None:
    """Pages of all layers: within the device, and to pinned host memory and back."""
    from anyattn.mem_cache.pool import MHAPool

    num_layers, num_moved = (2, 8) if quick else (16, 128)
    cache = CacheSpec(
        num_layers=num_layers, num_kv_heads=8, head_dim=128, v_head_dim=128, kv_dtype="bfloat16", page_size=64
    )
    name = f"{num_moved} pages of {cache.bytes_per_page / 2**20:.1f} MiB in {num_layers} layers"
    with report.case("tier", name):
        pool = MHAPool(cache, 2 * num_moved, device)
        for layer in pool.layers:
            layer.k.normal_()
            layer.v.normal_()
        order = 1 + torch.randperm(2 * num_moved, device=device).int()
        source, target = order[:num_moved].contiguous(), order[num_moved:].contiguous()
        records = pool.read_pages(source)
        copied = torch.empty_like(records)
        copy = {COPY: lambda: copied.copy_(records)}
        moves: dict[str, Callable[[], object]] = {
            "copy_pages": lambda: pool.copy_pages(source, target),
            "read_pages": lambda: pool.read_pages(source, out=copied),
            "write_pages": lambda: pool.write_pages(target, records),
        }
        for move, call in moves.items():
            with report.case("tier", f"{move}: {name}"):
                pool.write_pages(target, torch.zeros_like(records))
                copied.zero_()
                call()
                moved = copied if move == "read_pages" else pool.read_pages(target)
                require(torch.equal(moved, records), f"{move} changed the pages")
                measured = timer({OURS: call, **copy})
                num_bytes = 2 * records.numel()
                report.add_times(
                    "tier", f"{move}: {name}", measured, num_bytes=num_bytes, notes=timer.launches({OURS: call})
                )
        measure_host_tier(report, device, name, pool, source.cpu().numpy(), records, 2 if quick else 20)


def measure_host_tier(
    report: Report,
    device: torch.device,
    name: str,
    pool: Any,
    pages: np.ndarray,
    records: torch.Tensor,
    repeats: int,
) -> None:
    """Wall time with a synchronise, and a plain copy of the same bytes between pinned memory and the device."""
    from anyattn.mem_cache.host_tier import HostTier

    tier = HostTier(pool, pages.size)
    pinned = torch.empty(records.shape, dtype=torch.uint8, pin_memory=device.type != "cpu")
    times: dict[str, dict[str, list[float]]] = {op: {OURS: [], COPY: []} for op in ("save", "load")}

    def save() -> None:
        nonlocal host_pages
        host_pages = tier.save(pages)
        tier.synchronize()

    host_pages = np.zeros(0, dtype=np.int32)
    for repeat in range(2 + repeats):
        save_us = wall_us(device, save), wall_us(device, lambda: pinned.copy_(records, non_blocking=True))
        pool.write_pages(pages, torch.zeros_like(records))
        load_us = (
            wall_us(device, lambda: tier.load(host_pages, pages)),
            wall_us(device, lambda: records.copy_(pinned, non_blocking=True)),
        )
        tier.free(host_pages)
        if repeat < 2:
            require(torch.equal(pool.read_pages(pages), records), "pages came back changed")
            continue
        for op, measured in (("save", save_us), ("load", load_us)):
            times[op][OURS].append(measured[0])
            times[op][COPY].append(measured[1])
    for op, of_op in times.items():
        report.add_times("tier", f"{op}: {name}", of_op, num_bytes=records.numel(), in_device=False)


def big_section(report: Report, device: torch.device) -> None:
    """Pools of more than 2^31 elements in a tensor: what is written at both ends, and around 2^31, is read back."""
    for name, stored in {
        "NHD": Stored(),
        "HND": Stored(layout="HND"),
        "MLA": Stored(pool="anyattn.mem_cache.pool:MLAPool", kind="mla", page_size=64),
        "NHD, four layers joined": Stored(num_layers=4),
    }.items():
        cache = stored.cache()
        page_elements = cache.page_size * cache.num_kv_heads * cache.head_dim
        if stored.num_layers > 1:
            page_elements = cache.bytes_per_page // 2
        boundary = 2**31 // page_elements  # the page in which element 2^31 of a tensor lies
        num_pages = boundary + 1000
        case = (
            f"{name}: {num_pages + 1} pages, {(num_pages + 1) * page_elements / 2**31:.3f} x 2^31 elements in a tensor"
        )
        with report.case("big", case, strict=True):
            check_big(loaded(stored.pool)(cache, num_pages, device), boundary, device)
            report.add("big", case, OURS, note="right")


def check_big(pool: Any, boundary: int, device: torch.device) -> None:
    """Stores at random slots, moves pages, and compares with what was given. Raises WrongResult."""
    cache, num_pages = pool.cache, pool.num_pages
    ends = np.array([1, 2, 3, boundary // 2, boundary - 1, boundary, boundary + 1, num_pages - 1, num_pages])
    pages = torch.from_numpy(np.random.default_rng().permutation(ends)).to(device)
    slots = (pages[:, None] * cache.page_size + torch.arange(cache.page_size, device=device)).flatten()
    shape = (slots.numel(), cache.num_kv_heads, cache.head_dim)
    k, v = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))
    shuffled = torch.randperm(slots.numel(), device=device)
    mla = cache.kind == "mla"
    layer = cache.num_layers - 1
    new = (k.squeeze(1)[shuffled], None) if mla else (k[shuffled], v[shuffled])
    pool.store(layer, *new, slots[shuffled])
    for part, (stored, given) in enumerate(
        zip(pool.layers[layer].gather(pages), (k, k[..., : cache.v_head_dim] if mla else v), strict=True)
    ):
        require(torch.equal(stored.flatten(0, 1), given), f"stored tokens are not read back (part {part})")
    records = pool.read_pages(pages)
    free = torch.tensor([page + 10 for page in ends.tolist() if page + 10 < num_pages - 1], device=device)
    require(not bool(pool.read_pages(free).any()), "pages that nobody wrote to are not zero")
    pool.copy_pages(pages[: free.numel()], free)
    require(torch.equal(pool.read_pages(free), records[: free.numel()]), "copied pages differ")
    pool.write_pages(pages, records.flip(0))
    require(torch.equal(pool.read_pages(pages), records.flip(0)), "written pages differ")

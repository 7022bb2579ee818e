"""The section allocator of mem_cache.py: ways of keeping pages, which do the same work in turns."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Protocol

import mem_cache_peers as peers
import numpy as np
import torch
from mem_cache_report import Report, require, sync_debug_mode, wall_us

DECODES = 8
"""Steps of one token each between extend and free."""
BURST = 5
"""Turns of one way before it is the next one's turn."""


class Way(Protocol):
    """One way of keeping pages. `turns` prepares, out of the clock, and yields the calls to be timed."""

    slots: list[torch.Tensor]
    """Of all tokens, in the order of their making, after `turns` is through."""

    def turns(self, prefix_lens: np.ndarray, num_new: int) -> Iterator[tuple[str, Callable[[], object]]]: ...

    def num_free_pages(self) -> int: ...


class HostEngine:
    """Page table and allocator on the host; new page ids, or with `just_pages` False slots too, on the device."""

    just_pages = True

    def __init__(self, num_pages: int, page_size: int, device: torch.device, rng: np.random.Generator) -> None:
        from anyattn.mem_cache.allocator import PagedAllocator
        from anyattn.mem_cache.page_table import PageTable

        self.allocator = PagedAllocator(num_pages, page_size)
        pages = self.allocator.alloc(num_pages)
        rng.shuffle(pages)
        self.allocator.free(pages)
        self.table = PageTable(self.allocator, page_size, device=device)
        self.slots: list[torch.Tensor] = []

    def turns(self, prefix_lens: np.ndarray, num_new: int) -> Iterator[tuple[str, Callable[[], object]]]:
        seqs = np.array(self.table.new_sequences(prefix_lens.size))
        self.slots = [self.table.extend(seqs, prefix_lens).out_slots()]
        for name, counts in (("extend", num_new), *[("decode", 1)] * DECODES):
            yield name, functools.partial(self._extend, seqs, counts)
            self.slots.append(self._view.out_slots())
        yield "free", lambda: self.table.free(seqs)

    def _extend(self, seqs: np.ndarray, counts: int) -> None:
        self._view = self.table.extend(seqs, counts)
        if self.just_pages:
            self.table.send([])
        else:
            self._view.out_slots()

    def num_free_pages(self) -> int:
        return self.allocator.num_free_pages


class HostSlots(HostEngine):
    """The same with the slots under the clock."""

    just_pages = False


class DeviceEngine:
    """Lengths, page table and allocator on the device; what the host knows is by how many tokens a step grows."""

    just_pages = False
    """Whether the clock sees the allocator alone, and not the page table and the slots, which are made after it."""

    def __init__(self, num_pages: int, page_size: int, device: torch.device, rng: np.random.Generator) -> None:
        from anyattn.mem_cache.device_allocator import DeviceAllocator

        self.page_size, self.device = page_size, device
        self.allocator = DeviceAllocator(num_pages, page_size, device)
        pages = self.allocator.alloc(num_pages)
        self.allocator.free(pages[torch.from_numpy(rng.permutation(num_pages)).to(device)])
        self.slots: list[torch.Tensor] = []

    def turns(self, prefix_lens: np.ndarray, num_new: int) -> Iterator[tuple[str, Callable[[], object]]]:
        num_seqs = prefix_lens.size
        columns = -(-(int(prefix_lens.max()) + num_new + DECODES) // self.page_size)
        self.table = torch.zeros(num_seqs, columns, dtype=torch.int32, device=self.device)
        self.rows = torch.arange(num_seqs, dtype=torch.int32, device=self.device)
        self.prefix_lens = torch.zeros(num_seqs, dtype=torch.int32, device=self.device)
        self.lengths = torch.from_numpy(prefix_lens.astype(np.int32)).to(self.device)
        self.last_slots = torch.zeros(num_seqs, dtype=torch.int64, device=self.device)
        self.slots = []
        for name, num_tokens in (
            ("begin", int(prefix_lens.sum())),
            ("extend", num_new * num_seqs),
            *[("decode", num_seqs)] * DECODES,
        ):
            take = self._decode if name == "decode" else functools.partial(self._extend, num_tokens)
            place = functools.partial(self._place, num_tokens)
            if name == "begin":
                take()
                place()
            elif self.just_pages:
                yield name, take
                place()
            else:
                yield name, functools.partial(_one_after_the_other, take, place)
            ends = torch.cumsum(self.lengths - self.prefix_lens, 0) - 1
            self.last_slots = torch.where(self.lengths > 0, self.slots[-1][ends.clamp(min=0)], 0)
            self.prefix_lens = self.lengths
            self.lengths = self.lengths + (num_new if name == "begin" else 1)
        yield "free", lambda: self.allocator.free(self.table.index_select(0, self.rows).view(-1))

    def _extend(self, num_tokens: int) -> None:
        self._extension = self.allocator.extend(
            self.prefix_lens, self.lengths, self.last_slots, most_new_tokens=num_tokens
        )

    def _decode(self) -> None:
        self._extension = self.allocator.decode(self.lengths, self.last_slots)

    def _place(self, num_tokens: int) -> None:
        """The new pages' places in the table, then the tokens' slots."""
        from anyattn.mem_cache.kernels.indices import step_indices, step_lengths, write_new_pages

        first_columns = (self.prefix_lens + (self.page_size - 1)) // self.page_size
        write_new_pages(self.table, self.rows, first_columns, self._extension.indptr, self._extension.pages)
        num_seqs = self.lengths.numel()
        buffer = torch.empty(4 * num_seqs + 2, dtype=torch.int32, device=self.device)
        kv_lens, last_page_len, qo_indptr, kv_indptr = buffer.split([num_seqs, num_seqs, num_seqs + 1, num_seqs + 1])
        step_lengths(
            self.prefix_lens, self.lengths, num_seqs, self.page_size,
            kv_lens=kv_lens, qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_last_page_len=last_page_len,
        )  # fmt: skip
        slots = torch.empty(num_tokens, dtype=torch.int64, device=self.device)
        step_indices(
            self.table, self.rows, kv_lens, self.prefix_lens, qo_indptr, kv_indptr, self.page_size, out_slots=slots
        )
        self.slots.append(slots)

    def num_free_pages(self) -> int:
        return self.allocator.num_free_pages


class DevicePages(DeviceEngine):
    """The same with the allocator alone under the clock."""

    just_pages = True


def _one_after_the_other(*calls: Callable[[], object]) -> None:
    for call in calls:
        call()


class PeerEngine:
    """The peer's allocator. What an engine has at hand is made before the clock starts: lengths, last slots, slots."""

    def __init__(self, num_pages: int, page_size: int, device: torch.device, rng: np.random.Generator) -> None:
        free_pages = torch.from_numpy(1 + rng.permutation(num_pages)).to(device)
        self.allocator = peers.TensorAllocator(num_pages, page_size, device, free_pages)
        self.slots: list[torch.Tensor] = []

    def turns(self, prefix_lens: np.ndarray, num_new: int) -> Iterator[tuple[str, Callable[[], object]]]:
        allocator = self.allocator
        before = torch.from_numpy(prefix_lens)
        nothing, after = torch.zeros_like(before), before + num_new
        zeros, prefix, lengths = (lens.to(allocator.device) for lens in (nothing, before, after))
        self.slots = [allocator.extend(zeros, prefix, zeros, nothing, before)]
        ends = torch.cumsum(prefix, 0) - 1
        last = self.slots[0][ends.clamp(min=0)]
        yield "extend", lambda: self.slots.append(allocator.extend(prefix, lengths, last, before, after))
        last = self.slots[1][num_new - 1 :: num_new].contiguous()
        for step in range(1, DECODES + 1):
            decoded, host_lengths = lengths + step, after + step
            yield "decode", lambda: self.slots.append(allocator.decode(decoded, last, host_lengths))  # noqa: B023
            last = self.slots[-1]
        slots = torch.cat(self.slots)
        yield "free", lambda: allocator.free(slots)

    def num_free_pages(self) -> int:
        return self.allocator.free_pages.numel()


class Floor:
    """What no way can be faster than: one launch and the wait for it."""

    def __init__(self, num_pages: int, page_size: int, device: torch.device, rng: np.random.Generator) -> None:
        self._word = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_pages = num_pages
        self.slots: list[torch.Tensor] = []

    def turns(self, prefix_lens: np.ndarray, num_new: int) -> Iterator[tuple[str, Callable[[], object]]]:
        for name in ("extend", *["decode"] * DECODES, "free"):
            yield name, self._word.zero_

    def num_free_pages(self) -> int:
        return self._num_pages


def allocator_section(report: Report, device: torch.device, quick: bool) -> None:
    """256 sequences, each with a prefix of up to 63 tokens: extend by 1000, decode some steps, free."""
    for page_size in (64, 16, 1):
        case = f"{16 if quick else 256} sequences, page {page_size}"
        with report.case("allocator", case):
            if quick:
                measure(report, device, case, page_size, num_seqs=16, num_new=100, pool_tokens=1 << 14, repeats=3)
            else:
                measure(report, device, case, page_size, num_seqs=256, num_new=1000, pool_tokens=1 << 20, repeats=200)


def measure(
    report: Report,
    device: torch.device,
    case: str,
    page_size: int,
    *,
    num_seqs: int,
    num_new: int,
    pool_tokens: int,
    repeats: int,
) -> None:
    """All ways at one page size. pool_tokens: what the pool has room for."""
    peer = "peer: slices" if page_size == 1 else "peer: one program a request"
    engines: dict[str, Callable[..., Way]] = {
        "ours: host engine, slots": HostSlots,  # first: the others are compared with it, and do the same
        peer: PeerEngine,
        "ours: host engine, page ids": HostEngine,
        "ours: device allocator, slots": DeviceEngine,
        "ours: device allocator, page ids": DevicePages,
        "just one launch": Floor,
    }
    rng = np.random.default_rng(page_size)
    num_pages = pool_tokens // page_size
    prefix_lens = rng.integers(0, 64, num_seqs)
    ways: dict[str, Way] = {}
    syncs: dict[str, dict[str, str]] = {}
    order = None
    for name, engine in engines.items():
        with report.case("allocator", case, name):
            way = engine(num_pages, page_size, device, rng)
            for _, call in way.turns(prefix_lens, num_new):
                call()
            require(way.num_free_pages() == num_pages, f"{name} has lost pages")
            if way.slots:
                found = in_order_of_use(torch.cat(way.slots), page_size)
                order = found if order is None else order
                require(torch.equal(found, order), f"the slots of {name} are not those of the others")
            syncs[name] = sync_counts(device, way, prefix_lens, num_new)
            ways[name] = way
    times: dict[str, dict[str, list[float]]] = {op: {name: [] for name in ways} for op in ("extend", "decode", "free")}
    for _ in range(-(-repeats // BURST)):
        for name, way in ways.items():
            for turn in range(1 + BURST):
                for op, call in way.turns(rng.integers(0, 64, num_seqs), num_new):
                    elapsed = wall_us(device, call)
                    if turn:  # the first of a burst finds the others' code and data in the caches
                        times[op][name].append(elapsed)
    both = {name: [sum(pair) for pair in zip(times["extend"][name], times["free"][name], strict=True)] for name in ways}
    for title, op, measured, num_bytes, target in (
        (f"extend by {num_new}", "extend", times["extend"], 8 * num_seqs * num_new, None),
        ("free", "free", times["free"], None, None),
        (f"extend by {num_new}, then free", "", both, None, 1 / 2),
        ("decode", "decode", times["decode"], 8 * num_seqs, 1 / 3),
    ):
        report.add_times(
            "allocator",
            f"{title}: {case}",
            measured,
            num_bytes=num_bytes,  # of the slots
            targets={peer: target} if target and page_size == 64 else {},
            notes={name: syncs[name].get(op, "") for name in ways},
        )


def in_order_of_use(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """The same slots with pages numbered in the order in which they appear, as what a page is called is no matter."""
    _, first, inverse = np.unique(slots.cpu().numpy() // page_size, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first)] = np.arange(first.size)
    return torch.from_numpy(rank[inverse] * page_size) + slots.cpu() % page_size


def sync_counts(device: torch.device, way: Way, prefix_lens: np.ndarray, num_new: int) -> dict[str, str]:
    """By call, how often it waits for the device, as torch's sync debug mode warns; empty where there is no such mode.

    What never waits is called once more with the mode at error, which raises where it does.
    """
    found = {}
    for op, call in way.turns(prefix_lens, num_new):
        with sync_debug_mode(device, "warn") as works, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        if works:
            found[op] = sum("synchroniz" in str(warning.message) for warning in caught)
    for op, call in way.turns(prefix_lens, num_new):
        with sync_debug_mode(device, "error" if found.get(op) == 0 else "default"):
            call()
    return {op: f"host syncs: {count}" for op, count in found.items()}

"""Checks of how a pool moves whole pages: read as records, written from them, copied, the same joined or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from anyattn.errors import ContractError
from anyattn.mem_cache.base import KVPool, LayerKV
from anyattn.mem_cache.layouts import Part, as_bytes, tokens_view
from anyattn.mem_cache.spec import CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError
from anyattn.testing.pools.bench import NUM_PAGES, Bench
from anyattn.testing.pools.shapes import PoolCheck


def _filled(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> Bench:
    bench = Bench(tested, device, cache, seed)
    bench.fill()
    return bench


def _records(bench: Bench) -> torch.Tensor:
    """All pages as records, put together from what the layers show: [num_pages + 1, bytes_per_page]."""
    shown = [part for kv in bench.pool.layers for part in kv.stored]
    return torch.cat([part.contiguous().view(torch.uint8).flatten(1).cpu() for part in shown], dim=1)


def _ids(bench: Bench, pages: Sequence[int]) -> dict[str, Any]:
    """Page ids in every form that is allowed."""
    return {
        "an int32 array": np.array(pages, dtype=np.int32),
        "an int64 array": np.array(pages, dtype=np.int64),
        "an int32 tensor": torch.tensor(pages, dtype=torch.int32, device=bench.device),
        "an int64 tensor": torch.tensor(pages, dtype=torch.int64, device=bench.device),
    }


def _must_hold(bench: Bench, wanted: torch.Tensor, after: str) -> None:
    got = _records(bench)
    for page in range(len(wanted)):
        if not torch.equal(got[page], wanted[page]):
            places = (got[page] != wanted[page]).nonzero().flatten()
            layer = int(places[0]) * bench.cache.num_layers // bench.cache.bytes_per_page
            whose = "the null page" if page == 0 else f"page {page}"
            raise CheckFailedError(
                f"after {after} {whose} differs in {len(places)} of {wanted.shape[1]} bytes, the first of them layer "
                f"{layer}'s."
            )


def _read(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = _filled(tested, device, cache, seed)
    wanted = _records(bench)
    pages = [3, 1, 0, NUM_PAGES, 3]
    for form, ids in _ids(bench, pages).items():
        got = bench.pool.read_pages(ids)
        shape = (len(pages), cache.bytes_per_page)
        if got.shape != shape or got.dtype != torch.uint8 or got.device != bench.device:
            raise CheckFailedError(
                f"read_pages returned {list(got.shape)} {got.dtype} on {got.device}; records of {len(pages)} pages are "
                f"{list(shape)} uint8 on {bench.device}."
            )
        for page, record in zip(pages, got.cpu(), strict=True):
            if not torch.equal(record, wanted[page]):
                raise CheckFailedError(
                    f"read_pages({pages}), ids as {form}: the record of page {page} is not its bytes in every layer, "
                    "layer by layer, keys before values."
                )
    if bench.pool.read_pages(np.zeros(0, dtype=np.int64)).shape != (0, cache.bytes_per_page):
        raise CheckFailedError("read_pages of no pages must return records of none.")
    _must_hold(bench, wanted, "read_pages")


def _read_into(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = _filled(tested, device, cache, seed)
    buffer = torch.full((3, cache.bytes_per_page + 5), 7, dtype=torch.uint8, device=bench.device)
    out = buffer[:, 2:-3]
    pages = [2, NUM_PAGES, 1]
    if bench.pool.read_pages(np.array(pages), out=out) is not out:
        raise CheckFailedError("read_pages(pages, out) must return out.")
    if not torch.equal(out.cpu(), _records(bench)[pages]):
        raise CheckFailedError(f"read_pages({pages}, out) did not write the records to out, whose rows are apart.")
    if bool((buffer[:, :2] != 7).any()) or bool((buffer[:, -3:] != 7).any()):
        raise CheckFailedError("read_pages wrote outside of out.")


def _written(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = _filled(tested, device, cache, seed)
    model = _records(bench)
    for form, ids in _ids(bench, [0, 4, NUM_PAGES, 0, 2]).items():
        # Bytes that are records of this kind of cache, in another order: any others might not be numbers.
        data = model[bench.order(NUM_PAGES) + 1]
        bench.pool.write_pages(ids, data.to(bench.device))
        for page, record in zip((4, NUM_PAGES, 2), data[[1, 2, 4]], strict=True):
            model[page] = record
        _must_hold(bench, model, f"write_pages([0, 4, {NUM_PAGES}, 0, 2]), ids as {form},")
    bench.pool.write_pages(np.zeros(0, dtype=np.int64), data[:0].to(bench.device))
    _must_hold(bench, model, "write_pages of no pages")


def _copied(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = _filled(tested, device, cache, seed)
    model = _records(bench)
    for src, dst in (([3], [NUM_PAGES]), ([1, 1, 3, 2], [2 + 2, NUM_PAGES, 0, 0]), ([0], [2]), ([], [])):
        for form in _ids(bench, [1]):
            sources, targets = _ids(bench, src)[form], _ids(bench, dst)[form]
            bench.pool.copy_pages(sources, targets)
            for source, target in zip(src, dst, strict=True):
                if target:
                    model[target] = model[source]
            _must_hold(bench, model, f"copy_pages({src}, {dst}), ids as {form},")


def _out_of_range(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = _filled(tested, device, cache, seed)
    model = _records(bench)
    record = model[1:2].to(bench.device)
    for page in (NUM_PAGES + 1, -1):
        ids, one = np.array([page]), np.array([1])
        for what, call in (
            ("read_pages", lambda ids=ids: bench.pool.read_pages(ids)),
            ("write_pages", lambda ids=ids: bench.pool.write_pages(ids, record)),
            ("copy_pages", lambda ids=ids, one=one: bench.pool.copy_pages(ids, one)),
            ("copy_pages", lambda ids=ids, one=one: bench.pool.copy_pages(one, ids)),
        ):
            try:
                call()
            except ContractError:
                continue
            raise CheckFailedError(
                f"{what} took page {page} of an array on the host, and there are 0 to {NUM_PAGES}: the contract wants "
                "ContractError."
            )
    _must_hold(bench, model, "refusals")


def _same_tensors(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = Bench(tested, device, cache, seed)

    def places() -> list[tuple[Any, ...]]:
        shown = [part for kv in bench.pool.layers for part in (*kv.stored, kv.v)]
        return [(part.data_ptr(), part.shape, part.stride()) for part in (*bench.pool.parts(), *shown)]

    before = places()
    bench.fill()
    bench.pool.copy_pages(np.array([1]), np.array([2]))
    bench.pool.write_pages(np.array([3]), bench.pool.read_pages(np.array([4])))
    if places() != before:
        raise CheckFailedError(
            "parts() or the layers' tensors moved: what kernels and graphs read must stay where it is."
        )
    marked = [part.view(torch.uint8) if part.dtype != torch.uint8 else part for part in bench.pool.parts()]
    for part in marked:
        part[1] = 0x55
    if not bool((_records(bench)[1] == 0x55).all()):
        raise CheckFailedError("what is written to parts() does not show in all of the layers: parts() is the storage.")


def _joined(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    pools = [
        _filled(tested, device, dataclasses.replace(cache, joined_layers=joined), seed) for joined in (False, True)
    ]
    pages = np.array([3, 1, NUM_PAGES])
    apart, joined = (bench.pool.read_pages(pages) for bench in pools)
    if not torch.equal(apart.cpu(), joined.cpu()):
        raise CheckFailedError("the same tokens are other records where layers are joined.")
    targets, other = np.array([4, 2, 5]), Bench(tested, device, pools[1].cache, seed)
    other.pool.write_pages(targets, apart)
    of_source, of_target = (torch.from_numpy(ids).to(other.device) for ids in (pages, targets))
    for layer in range(cache.num_layers):
        for was, now in zip(pools[0].rows(layer, of_source), other.rows(layer, of_target), strict=True):
            if not torch.equal(was, now):
                raise CheckFailedError(f"records written to a pool of joined layers read otherwise in layer {layer}.")


def _tails(tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int) -> None:
    bench = _filled(tested, device, cache, seed)
    pages, used = np.array([3, 1]), np.array([cache.page_size - 1 or 1, 1])
    refused = [(np.array([NUM_PAGES + 1]), np.array([1])), (np.array([1]), np.array([cache.page_size + 1]))]
    has_tails = cache.kind != "index"
    for wrong_pages, wrong_used in refused if has_tails else [(pages, used)]:
        model = _records(bench)
        try:
            bench.pool.zero_tails(wrong_pages, wrong_used)
        except ContractError:
            _must_hold(bench, model, f"a refused zero_tails({wrong_pages.tolist()}, {wrong_used.tolist()})")
        else:
            raise CheckFailedError(
                f"zero_tails({wrong_pages.tolist()}, {wrong_used.tolist()}) must raise ContractError: there is no such "
                "page or token, or a page's last tokens do not lie together."
            )
    if not has_tails:
        return
    bench.pool.zero_tails(pages, used)
    got = [[part.clone() for part in _seen(kv)] for kv in bench.pool.layers]
    other = _filled(tested, device, cache, seed)
    for number, (parts, kv) in enumerate(zip(got, other.pool.layers, strict=True)):
        for part, wanted in zip(parts, _seen(kv), strict=True):
            for page, count in zip(pages.tolist(), used.tolist(), strict=True):
                wanted[page, count:] = 0
            if not torch.equal(part, wanted):
                page, token = (part != wanted).flatten(2).any(-1).nonzero()[0].tolist()
                raise CheckFailedError(
                    f"zero_tails({pages.tolist()}, {used.tolist()}) leaves token {token} of page {page} in layer "
                    f"{number} other than it must be: zero behind those that stay, and everything else as it was."
                )


def _seen(kv: LayerKV) -> list[torch.Tensor]:
    """A layer's bytes by page and token, those of MLA once."""
    kinds: tuple[Part, ...] = ("k", "k" if kv.v_in_k else "v")
    by_token = [tokens_view(as_bytes(part), kv.layout, kind) for part, kind in zip(kv.stored, kinds, strict=False)]
    return [part.flatten(1, 2).contiguous().view(torch.uint8) for part in by_token]


RECORD_CHECKS: dict[str, PoolCheck] = {
    "read_pages gives the bytes of all layers": _read,
    "read_pages writes to a buffer with rows apart": _read_into,
    "write_pages writes all layers, and never the null page": _written,
    "copy_pages copies all layers, and never to the null page": _copied,
    "zero_tails zeroes what lies behind the first tokens of pages": _tails,
    "pages beyond the pool are refused": _out_of_range,
    "parts are the storage, and stay where they are": _same_tensors,
}
"""By name; for the thorough cases."""

JOINED_CHECKS: dict[str, PoolCheck] = {"records are the same with and without": _joined}
"""By name; for the thorough cases of joined layers."""

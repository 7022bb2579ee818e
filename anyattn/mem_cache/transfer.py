"""One sequence as bytes, for another process with the same cache: prefill there, decode here. All of it is checked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import export_format
from anyattn.mem_cache.layouts import tokens_view
from anyattn.types import DTYPE_BYTES

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.base import KVPool
    from anyattn.mem_cache.indices import Int32s
    from anyattn.mem_cache.page_table import PageTable
    from anyattn.mem_cache.spec import CacheSpec

    Pools = Sequence[KVPool | Sequence[KVPool]]
else:
    np, torch = lazy_import("numpy"), lazy_import("torch")

_CHUNK_BYTES = 64 << 20
_PLACE = frozenset({"joined_layers"})  # fields of a cache spec that records do not depend on


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Source:
    """A pool's share of a sequence. first_page: the first of the sequence's pages that it has, 0 but for windows."""

    pool: KVPool
    window: int | None
    first_page: int
    window_index: int | None


def export_sequence(table: PageTable, pools: Pools, seq: int) -> bytes:
    """All that a sequence has in the pools, as bytes for `import_sequence`. Waits for the device.

    pools: first that of `table`'s full pages, then one for each of `table.windows`. Where several pools have their
        pages in common, as the latents and the indexer's keys of sparse attention, a tuple of them stands for one.

    What its last page holds beyond its length is replaced by zeros: it may be left from other sequences.
    """
    return b"".join(export_chunks(table, pools, seq))


def export_chunks(table: PageTable, pools: Pools, seq: int) -> Iterator[bytes | memoryview]:
    """The bytes of `export_sequence` in pieces of at most 64 MiB or one page, so that they need not fit into memory.

    The sequence must stay as it is until the last piece was taken.
    """
    (num_tokens,) = table.lengths([seq])
    pages = table.pages(seq)
    sources = _sources(table, pools, num_tokens)
    header = {"num_tokens": num_tokens, "pools": [_described(source, pages.size) for source in sources]}
    num_bytes = sum((pages.size - s.first_page) * s.pool.cache.bytes_per_page for s in sources)
    return _chunks(table, sources, pages, num_tokens, export_format.start(header, num_bytes))


def import_sequence(table: PageTable, pools: Pools, data: bytes | bytearray | memoryview) -> int:
    """A new sequence with what another one had when it was exported. Returns its handle.

    pools: as for `export_sequence`. Whether layers are joined may differ, and so do page ids; all else is the same.

    Raises StorageError when the bytes are not an export, or one that is damaged, cut off or extended; ContractError
    when it is of another version or comes from pools that differ (the field, theirs and ours are named);
    OutOfPagesError when pages are short. Table and pools are then as before; should a device error come up while
    records are written, the pages go back too.
    """
    header, records = export_format.opened(data)
    try:
        num_tokens, theirs = header["num_tokens"], header["pools"]
        if type(num_tokens) is not int or not 0 <= num_tokens < 1 << 62 or not isinstance(theirs, list):
            raise ContractError("the export's header is not one of this format: num_tokens or pools cannot be.")
    except (TypeError, KeyError) as error:
        raise ContractError(f"the export's header is not one of this format: {error!r}.") from error
    num_pages = -(-num_tokens // table.page_size)
    sources = _sources(table, pools, num_tokens)
    export_format.refuse_differences(theirs, [_described(source, num_pages) for source in sources])
    num_bytes = sum((num_pages - s.first_page) * s.pool.cache.bytes_per_page for s in sources)
    if num_bytes != len(records):
        raise ContractError(f"the export has {len(records)} bytes of records; {num_tokens} tokens take {num_bytes}.")
    columns = np.arange(num_pages)
    in_windows = {s.window_index: columns >= s.first_page for s in sources if s.window_index is not None}
    pages = table.take(num_pages, [in_windows[i] for i in range(len(table.windows))])
    try:
        begin = 0
        for source in sources:
            for ids in _parts(source, _own_pages(table, source, pages)):
                end = begin + ids.size * source.pool.cache.bytes_per_page
                # Copied, as torch wants memory that it could write to.
                part = torch.from_numpy(np.frombuffer(records[begin:end], dtype=np.uint8).copy())
                source.pool.write_pages(ids, part.view(ids.size, -1).to(source.pool.device))
                begin = end
        return table.restore_sequence(pages, num_tokens)
    except BaseException:
        table.release(pages)
        raise


def _sources(table: PageTable, pools: Pools, num_tokens: int) -> list[_Source]:
    if len(pools) != 1 + len(table.windows):
        raise ContractError(
            f"pools must hold one for full pages and one for each of {len(table.windows)} windows; {len(pools)} given."
        )
    sources = []
    for group, entry in enumerate(pools):
        window = table.windows[group - 1] if group else None
        for pool in entry if isinstance(entry, Sequence) else (entry,):
            if pool.cache.page_size != table.page_size:
                raise ContractError(f"a pool has page_size {pool.cache.page_size}, and the table {table.page_size}.")
            sources.append(
                _Source(
                    pool=pool,
                    window=None if window is None else window.window,
                    first_page=0 if window is None else int(window.first_column(np.array(num_tokens))),
                    window_index=None if window is None else group - 1,
                )
            )
    return sources


def _described(source: _Source, num_pages: int) -> dict[str, Any]:
    """What both sides must agree on, and which pages of the sequence are there."""
    cache = {name: value for name, value in asdict(source.pool.cache).items() if name not in _PLACE}
    scales = {
        f"{part}_scale of layer {layer}": _scale(getattr(kv, f"{part}_scale"))
        for layer, kv in enumerate(source.pool.layers)
        for part in ("k", "v")
    }
    return {"window": source.window, **cache, **scales, "first_page": source.first_page, "num_pages": num_pages}


def _scale(scale: float | torch.Tensor) -> list[float]:
    """As what kernels multiply with, float32; one element where all heads have the same."""
    values = torch.as_tensor(scale, dtype=torch.float32).reshape(-1).tolist()
    return values[:1] if len(set(values)) == 1 else values


def _chunks(
    table: PageTable, sources: list[_Source], pages: Int32s, num_tokens: int, start: bytes
) -> Iterator[bytes | memoryview]:
    checksum = export_format.checksum(start)
    yield start
    for source in sources:
        left = pages.size - source.first_page
        for ids in _parts(source, _own_pages(table, source, pages)):
            records = source.pool.read_pages(ids).cpu()
            left -= ids.size
            used = num_tokens % table.page_size
            if left == 0 and used:
                zero_tokens(records[-1], source.pool.cache, used)
            chunk = records.numpy().reshape(-1).data
            checksum.update(chunk)
            yield chunk
    yield checksum.digest()


def _own_pages(table: PageTable, source: _Source, pages: Int32s) -> Int32s:
    """The pool's own ids of the sequence's pages that it has."""
    pages = pages[source.first_page :]
    return pages if source.window_index is None else table.windows[source.window_index].page_of[pages]


def _parts(source: _Source, pages: Int32s) -> Iterator[Int32s]:
    """The pages in pieces; none where they hold no bytes, as those of a pool without layers do."""
    record_bytes = source.pool.cache.bytes_per_page
    if not record_bytes:
        return iter(())
    step = max(_CHUNK_BYTES // record_bytes, 1)
    return (pages[i : i + step] for i in range(0, pages.size, step))


def zero_tokens(record: torch.Tensor, cache: CacheSpec, first: int) -> None:
    """Zeroes all tokens of one page from an offset on, in every layer.

    record: [bytes_per_page], uint8, on the host, beginning at a multiple of 8 bytes.
    """
    parts: tuple[Literal["k", "v"], ...] = ("k", "v")
    itemsize = 1 if cache.kind in ("dsa", "index") else DTYPE_BYTES[cache.kv_dtype]
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[itemsize]
    begin = 0
    for _ in range(cache.num_layers):
        for part, shape in zip(parts, cache.page_shapes(), strict=False):
            end = begin + prod(shape) * itemsize
            page = record[begin:end]
            begin = end
            if cache.kind == "index":  # the keys of all tokens, and their scales behind them
                keys = cache.page_size * cache.head_dim
                page[:keys].view(cache.page_size, -1)[first:] = 0
                page[keys:].view(cache.page_size, -1)[first:] = 0
                continue
            view = tokens_view(page.view(integers).view(1, *shape), cache.layout, part)
            high, low = divmod(first, view.shape[2])
            view[:, high, low:] = 0
            view[:, high + 1 :] = 0

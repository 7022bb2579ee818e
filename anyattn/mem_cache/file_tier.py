"""Pages kept in a file: written by a thread of its own behind the copy to host memory, verified when they return."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from anyattn.errors import ContractError, StorageError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.host_tier import STAGING_BYTES, PageTier
from anyattn.mem_cache.record_file import RecordFile
from anyattn.mem_cache.staging import PageStaging

if TYPE_CHECKING:
    import os
    from types import TracebackType

    import numpy as np
    import torch

    from anyattn.mem_cache.base import KVPool
    from anyattn.mem_cache.indices import Int32s, Int64s
else:
    np = lazy_import("numpy")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Write:
    """Pages on their way to the file. number: of the save, which also stands in their records."""

    number: int
    num_bytes: int
    future: Future[None]


class FileTier(PageTier):
    """Pages in a file, for which `load` has to wait and `save`, as long as host memory for it is left, has not.

    The file holds no list of what is in it: it lives as long as the tier, and is not opened again.

    An error of the disk is raised as StorageError by the next `save`, `load` or `synchronize`, which then does nothing
    else, or by `close`; pages that were not written cannot be loaded. Damage that the disk does not report is found by
    `load`, as every record has a checksum over its bytes, its page id and the number of its save. Whatever `load`
    raises, the pool is as before.

    path: created with its full size; a file that is there already is refused, unless `overwrite`.
    buffer_bytes: host memory for what waits to be written; a save that needs more waits for the disk.
    staging_bytes: as for `HostTier`.
    """

    def __init__(
        self,
        pool: KVPool,
        num_pages: int,
        path: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        buffer_bytes: int = 512 << 20,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__(pool, num_pages)
        self.path = Path(path)
        self._staging = PageStaging(pool, staging_bytes)
        self._buffer_bytes = buffer_bytes
        self._page_bytes = pool.cache.bytes_per_page
        self._number_of: Int64s = np.zeros(num_pages + 1, dtype=np.int64)  # the save that each page is from
        self._last_number = 0
        self._writes: deque[_Write] = deque()
        self._waiting_bytes = 0
        self._failures: dict[int, str] = {}  # by the number of the save
        self._unreported: set[int] = set()
        self._closed = False
        self._file = RecordFile(self.path, pool.cache, num_pages, overwrite=overwrite)
        # One thread, so that what is asked for is done in that order: a page that is loaded, or freed and saved to
        # again, was written before. Only that thread touches the file after this.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="anyattn-file-tier")

    def save(self, pages: Int32s) -> Int32s:
        """See `PageTier.save`. Raises StorageError, and keeps nothing, when an earlier write proves to have failed."""
        self._refuse_failures()
        return super().save(pages)

    def load(self, host_pages: Int32s, pages: Int32s) -> None:
        """See `PageTier.load`. Waits on the host until the records are read and verified; they take host memory then.

        Raises StorageError, and writes nothing, when a record was not written, cannot be read or is damaged, and when
        an earlier write proves to have failed.
        """
        self._refuse_failures()
        super().load(host_pages, pages)

    def synchronize(self) -> None:
        self._require_open()
        wait([write.future for write in self._writes])
        self._staging.synchronize()
        self._refuse_failures()

    def close(self, *, delete: bool = True) -> None:
        """Waits until everything is written, and closes the file; the tier cannot be used any more. Once is enough.

        delete: whether the file goes too. Raises StorageError after that, when writing failed and nobody heard of it.
        """
        if self._closed:
            return
        self._closed = True
        self._worker.shutdown(wait=True)
        self._file.close()
        if delete:
            self.path.unlink(missing_ok=True)
        self._collect()
        self._report()

    def __enter__(self) -> FileTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StorageError:
            if error is None:  # otherwise the error that ended the block is the one to see
                raise

    def _save(self, pages: Int32s, host_pages: Int32s) -> None:
        for part in self._staging.chunks(pages.size):
            ids = host_pages[part]
            num_bytes = ids.size * self._page_bytes
            while self._writes and self._waiting_bytes + num_bytes > self._buffer_bytes:
                wait([self._writes[0].future])
                self._collect()
            memory = self._staging.empty(ids.size)
            copied = self._staging.save(pages[part], [memory])
            self._last_number += 1
            self._number_of[ids] = self._last_number
            future = self._worker.submit(self._write, ids, self._last_number, memory, copied)
            self._writes.append(_Write(number=self._last_number, num_bytes=num_bytes, future=future))
            self._waiting_bytes += num_bytes

    def _load(self, host_pages: Int32s, pages: Int32s) -> None:
        numbers = self._number_of[host_pages]
        parts = [(part, self._staging.empty(pages[part].size)) for part in self._staging.chunks(pages.size)]
        reading = self._worker.submit(self._read, [(host_pages[part], numbers[part], m) for part, m in parts])
        error = reading.exception()
        self._collect()  # the worker has come to the end of all writes of these pages
        failed = sorted(self._failures.keys() & set(numbers.tolist()))
        if failed:
            self._unreported -= set(failed)
            page = host_pages[np.isin(numbers, failed)][0]
            raise StorageError(
                f"page {page} of {self.path} was not written and cannot be loaded: {self._failures[failed[0]]}. "
                "Free it, and compute its tokens again."
            )
        if error is not None:
            raise StorageError(f"{self.path}: {_text(error)}. The pool is as before.") from error
        for part, memory in parts:
            self._staging.load(pages[part], [memory])

    def _write(self, host_pages: Int32s, number: int, memory: torch.Tensor, copied: torch.Event | None) -> None:
        """In the worker. memory: [n, bytes_per_page], uint8, complete once `copied` has happened."""
        if copied is not None:
            copied.synchronize()
        for page, record in zip(host_pages.tolist(), memory.numpy(), strict=True):
            self._file.write(page, number, record.data)

    def _read(self, parts: list[tuple[Int32s, Int64s, torch.Tensor]]) -> None:
        """In the worker. Fills the last of each: host pages, numbers of their saves, [n, bytes_per_page], uint8."""
        for host_pages, numbers, memory in parts:
            for page, number, record in zip(host_pages.tolist(), numbers.tolist(), memory.numpy(), strict=True):
                self._file.read(page, number, record.data)

    def _collect(self) -> None:
        """Takes note of the writes that are done."""
        while self._writes and self._writes[0].future.done():
            write = self._writes.popleft()
            self._waiting_bytes -= write.num_bytes
            error = write.future.exception()
            if error is not None:
                current = self._unreported | set(np.unique(self._number_of).tolist())
                self._failures = {number: text for number, text in self._failures.items() if number in current}
                self._failures[write.number] = _text(error)
                self._unreported.add(write.number)

    def _report(self) -> None:
        if self._unreported:
            texts = sorted({self._failures[number] for number in self._unreported})
            pages = np.flatnonzero(np.isin(self._number_of, list(self._unreported)))
            self._unreported.clear()
            raise StorageError(
                f"writing to {self.path} failed: {'; '.join(texts)}. Pages {pages.tolist()} were not written and "
                "cannot be loaded: free them. Nothing else was done by this call."
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ContractError(f"the tier of {self.path} is closed.")

    def _refuse_failures(self) -> None:
        self._require_open()
        self._collect()
        self._report()


def _text(error: BaseException) -> str:
    """Without the error itself, whose traceback would keep buffers alive."""
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"

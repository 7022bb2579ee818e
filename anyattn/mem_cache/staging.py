"""Pages' records on their way between a pool and host memory: device buffers of bounded size and a stream beside."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.base import KVPool
    from anyattn.mem_cache.indices import Int32s
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Buffer:
    """Device memory that two streams share.

    owner: the stream that it was allocated on. done: recorded on the other stream, behind its last use of the memory.
    """

    memory: torch.Tensor
    owner: torch.Stream
    done: torch.Event


class PageStaging:
    """Copies records of pages to host memory and back without the host waiting for either.

    A save gathers on the current stream, so that the pages may be written again at once, and copies on the side stream;
    a load copies on the side stream and scatters on the current one. As there is one side stream, everything that
    touches host memory happens in the order of the calls: a load finds what saves before it wrote, and host memory
    that was saved from or loaded is free to be reused by later calls. A pool in host memory is copied from and to
    directly.

    staging_bytes: device memory that the buffers take at most; one record, if that is larger.
    """

    def __init__(self, pool: KVPool, staging_bytes: int) -> None:
        self._pool = pool
        self._device = pool.device
        self._record_bytes = pool.cache.bytes_per_page
        self._limit_bytes = staging_bytes
        # Two buffers at a time: while one is copied over the bus, the other is gathered or scattered.
        self._chunk_pages = max(staging_bytes // 2 // max(self._record_bytes, 1), 1)
        self._held: deque[_Buffer] = deque()
        self._held_bytes = 0
        self._side: torch.Stream | None = None
        if self._device.type != "cpu" and self._record_bytes:  # the records of a pool without layers have no bytes
            accelerator = torch.accelerator.current_accelerator(check_available=True)
            if accelerator is None or accelerator.type != self._device.type:
                raise ContractError(
                    f"the pool is on {self._device}, and torch has streams and pinned memory here for "
                    f"{'no device' if accelerator is None else accelerator.type}; keep its pages on the device."
                )
            self._side = torch.Stream(self._device)

    def chunks(self, num_pages: int) -> Iterator[slice]:
        """Which parts of so many pages `save` and `load` take in one call."""
        return (slice(i, min(i + self._chunk_pages, num_pages)) for i in range(0, num_pages, self._chunk_pages))

    def empty(self, num_pages: int) -> torch.Tensor:
        """[num_pages, bytes_per_page], uint8, host memory that the device can copy from and to on its own."""
        shape = (num_pages, self._record_bytes)
        with torch.inference_mode(False):  # it may be made in inference mode and be written outside of it
            if self._side is None:
                return torch.empty(shape, dtype=torch.uint8)
            try:
                memory = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
                pinned = memory.is_pinned()
            except RuntimeError as error:
                size = f"{num_pages * self._record_bytes / 2**30:.2f} GiB"
                raise ContractError(
                    f"{size} of host memory cannot be pinned for {self._device}: {error}. Ask for fewer pages, or "
                    "raise the limit of locked memory (`ulimit -l`)."
                ) from error
        if not pinned:
            raise ContractError(f"torch does not pin host memory for {self._device}; its pages cannot be kept there.")
        return memory

    def save(self, pages: Int32s, host: Sequence[torch.Tensor]) -> torch.Event | None:
        """Copies pages, one chunk of them, to host memory.

        host: pieces [num_records, bytes_per_page] that the records go to in order.
        Returns what tells that they are there; None where they already are.
        """
        if self._side is None:
            _copy(self._pool.read_pages(pages), host, out=True)
            return None
        self._make_room(pages.size)
        current = torch.accelerator.current_stream(self._device)
        memory = self._pool.read_pages(pages)
        self._side.wait_event(current.record_event())
        try:
            with self._side:
                _copy(memory, host, out=True)
        finally:
            done = self._side.record_event()
            self._hold(_Buffer(memory=memory, owner=current, done=done))
        return done

    def load(self, pages: Int32s, host: Sequence[torch.Tensor]) -> None:
        """Copies records, one chunk of them, from pieces of host memory into pages."""
        if self._side is None:
            self._pool.write_pages(pages, host[0] if len(host) == 1 else torch.cat(list(host)))
            return
        self._make_room(pages.size)
        current = torch.accelerator.current_stream(self._device)
        with self._side:  # allocated there too, so that the copy does not wait for what the current stream still does
            memory = torch.empty((pages.size, self._record_bytes), dtype=torch.uint8, device=self._device)
            _copy(memory, host, out=False)
        current.wait_event(self._side.record_event())
        try:
            self._pool.write_pages(pages, memory)
        finally:
            self._hold(_Buffer(memory=memory, owner=self._side, done=current.record_event()))

    def synchronize(self) -> None:
        """Waits on the host until all saves have reached host memory, and gives the buffers back."""
        if self._side is not None:
            self._side.synchronize()
            self._make_room(0, keep_bytes=0)

    def _hold(self, buffer: _Buffer) -> None:
        self._held.append(buffer)
        self._held_bytes += buffer.memory.nbytes

    def _make_room(self, num_pages: int, keep_bytes: int | None = None) -> None:
        """Drops buffers that are done, and the oldest beyond the limit.

        torch hands a dropped buffer out again in the order of the stream that owns it. So that stream has to wait for
        the other one first; the host does not. (`Tensor.record_stream` would keep the memory from being handed out
        until the host sees that the event has passed, and as the host runs ahead, would not bound how much is held.)
        """
        more_bytes = num_pages * self._record_bytes
        keep_bytes = self._limit_bytes if keep_bytes is None else keep_bytes
        while self._held:
            buffer = self._held[0]
            if not buffer.done.query():
                if self._held_bytes + more_bytes <= keep_bytes:
                    break
                buffer.owner.wait_event(buffer.done)
            self._held.popleft()
            self._held_bytes -= buffer.memory.nbytes


def _copy(memory: torch.Tensor, host: Sequence[torch.Tensor], *, out: bool) -> None:
    """Between device records and the pieces of host memory that make up the same number of records."""
    begin = 0
    for piece in host:
        part = memory[begin : begin + len(piece)]
        begin += len(piece)
        if out:
            piece.copy_(part, non_blocking=True)
        else:
            part.copy_(piece, non_blocking=True)

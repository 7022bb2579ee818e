"""The page table as kernels read it: its copy on the device, brought up to date in the one copy that a step makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from anyattn.mem_cache.indices import Int32s
    from anyattn.mem_cache.windows import WindowPages

    Words = npt.NDArray[np.int32] | npt.NDArray[np.int64]
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

_ALIGNED = 4  # int32 elements: kernels load 16 bytes at once


class DeviceTable:
    """Follows the host's table. On the CPU it is the host's own memory, and nothing is copied."""

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self._follows = self.device.type != "cpu"
        self._pages: torch.Tensor | None = None
        self._mappings: list[torch.Tensor] = []
        self._pending: list[tuple[npt.NDArray[np.intp], Int32s]] = []
        self._num_pending = 0

    def note(self, places: npt.NDArray[np.intp], pages: Int32s) -> None:
        """Remembers what was written into the host's table: page ids, and where in the flat table."""
        if self._follows and self._pages is not None:
            self._num_pending = self._num_pending + places.size if self._pending else places.size
            self._pending.append((places, pages))
            if self._num_pending > self._pages.numel():  # then all of the table is less
                self.forget()

    def forget(self) -> None:
        """The next `send` copies all of the host's table, as when it has another shape."""
        self._pages = None
        self._pending.clear()

    def send(
        self, pages: Int32s, windows: Sequence[WindowPages], arrays: Sequence[Words]
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Brings the copy up to date, and takes the step's own arrays along.

        pages: the host's table, [max_rows, max_columns]. arrays: integers, which become int32.
        Returns the table, each window's mapping and the arrays, all on the device, without a sync.
        """
        if not self._follows:
            mappings = []
            for window in windows:
                mappings.append(torch.from_numpy(window.page_of))
                window.changed.clear()
            return torch.from_numpy(pages), mappings, to_device(arrays, self.device)
        with torch.inference_mode(False):  # what stays is written in whatever mode later steps are made
            if self._pages is None:
                (flat,) = to_device([pages.reshape(-1)], self.device)
                self._pages = flat.view(pages.shape)
            if len(self._mappings) != len(windows):
                self._mappings = to_device([window.page_of for window in windows], self.device)
                for window in windows:
                    window.changed.clear()
        targets, values, places = [], [], []
        if self._pending:
            where, ids = _joined(self._pending)
            self._pending = []
            targets, values, places = [self._pages.view(-1)], [ids], [where]
        for window, mapping in zip(windows, self._mappings, strict=True):
            if window.changed:
                changed = np.concatenate(window.changed).astype(np.int64)
                window.changed.clear()
                targets.append(mapping)
                values.append(window.page_of[changed])
                places.append(changed)
        moved = to_device([*arrays, *values, *places], self.device, wide=len(places))
        written = zip(targets, moved[len(arrays) :], moved[len(arrays) + len(values) :], strict=False)
        for target, ids_there, where_there in written:
            target.scatter_(0, where_there, ids_there)
        return self._pages, self._mappings, moved[: len(arrays)]


def _joined(pending: Sequence[tuple[npt.NDArray[np.intp], Int32s]]) -> tuple[npt.NDArray[np.intp], Int32s]:
    """Writes one after the other; of a place that was written twice only the last, as a scatter has no order."""
    if len(pending) == 1:
        return pending[0]
    if not pending:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32)
    places, pages = (np.concatenate(parts) for parts in zip(*pending, strict=True))
    places, last = np.unique(places[::-1], return_index=True)
    return places, pages[::-1][last]


def to_device(arrays: Sequence[Words], device: torch.device, *, wide: int = 0) -> list[torch.Tensor]:
    """Tensors with the arrays' contents, [size] each: views of one buffer that travels in one asynchronous copy.

    arrays: integers, contiguous, one dimension each; they become int32, but for the last `wide`, which are int64.
    """
    if device.type == "cpu":
        narrow = len(arrays) - wide
        return [torch.from_numpy(a.astype(np.int32, copy=False) if i < narrow else a) for i, a in enumerate(arrays)]
    if len(arrays) == 1:  # a decode step's slots: nothing to divide
        pinned = torch.empty(arrays[0].size, dtype=torch.int64 if wide else torch.int32, pin_memory=True)
        pinned.numpy()[:] = arrays[0]
        return [pinned.to(device, non_blocking=True)]
    words = [*arrays[: len(arrays) - wide], *(array.view(np.int32) for array in arrays[len(arrays) - wide :])]
    sizes = [size for array in words for size in (array.size, -array.size % _ALIGNED)]
    staging = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=True)
    buffer, start = staging.numpy(), 0
    for array, size, padding in zip(words, sizes[::2], sizes[1::2], strict=True):
        buffer[start : start + size] = array
        start += size + padding
    parts = list(staging.to(device, non_blocking=True).split_with_sizes(sizes)[::2])
    for i in range(len(parts) - wide, len(parts)):
        parts[i] = parts[i].view(torch.int64)
    return parts

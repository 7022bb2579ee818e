"""Which of several backends serves which batch, where the best one depends on how big the batch is."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from anyattn.types import Load


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTable:
    """Which of several decode backends serves which batch: a grid over sequences and their mean length.

    names: [len(NUM_SEQS)][len(KV_LENS)]; a batch belongs to the last point that it reaches in both directions.
    """

    NUM_SEQS: ClassVar[tuple[int, ...]] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    KV_LENS: ClassVar[tuple[int, ...]] = (1, 256, 1024, 4096, 16384, 65536)

    names: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, pick: Callable[[Load], str]) -> LoadTable:
        """The table of what `pick` says at every point."""
        return cls(names=tuple(tuple(pick(Load(num_seqs=n, kv_len=k)) for k in cls.KV_LENS) for n in cls.NUM_SEQS))

    def pick(self, load: Load) -> str:
        """The backend for a batch."""
        row = max(bisect_right(self.NUM_SEQS, load.num_seqs) - 1, 0)
        return self.names[row][max(bisect_right(self.KV_LENS, load.kv_len) - 1, 0)]

    def backends(self) -> tuple[str, ...]:
        """Every backend that serves some batch, by name."""
        return tuple(sorted({name for row in self.names for name in row}))

    def regions(self, name: str) -> Iterator[str]:
        """The batches that a backend serves, in words: rectangles of the grid."""
        start = 0
        for row in range(1, len(self.names) + 1):
            spans = _spans(self.names[start], name)
            if row < len(self.names) and _spans(self.names[row], name) == spans:
                continue
            seqs = _between(self.NUM_SEQS, start, row)
            for first, end in spans:
                tokens = "" if (first, end) == (0, len(self.KV_LENS)) else f" of {_between(self.KV_LENS, first, end)}"
                yield f"{seqs} sequence{'' if seqs == '1' else 's'}{tokens}{' tokens' if tokens else ''}"
            start = row


def _spans(row: Sequence[str], name: str) -> list[tuple[int, int]]:
    """Where a row holds the name: [first, end) of each stretch."""
    edges = [i for i in range(len(row) + 1) if (i < len(row) and row[i] == name) != (i > 0 and row[i - 1] == name)]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _between(points: Sequence[int], first: int, end: int) -> str:
    if end == len(points):
        return f"{points[first]} or more" if first else "any number of"
    last = points[end] - 1
    return str(last) if last == points[first] else f"{points[first]} to {last}"

"""A padded batch's real tokens as sequences of a paged runtime, and the way back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from anyattn.errors import SpecError

if TYPE_CHECKING:
    import numpy.typing as npt

    Bools = npt.NDArray[np.bool_]
    Indices = npt.NDArray[np.intp]


class Tokens:
    """Some tokens of padded rows, in the order in which a runtime wants them: sequence by sequence."""

    def __init__(self, rows: Indices, columns: Indices) -> None:
        self.count = rows.size
        self._columns: slice | None = None
        self._indices = (torch.from_numpy(rows), torch.from_numpy(columns))

    @classmethod
    def of_all_rows(cls, num_rows: int, columns: slice) -> Tokens:
        """The same consecutive columns of every row, which need no gather."""
        tokens = cls(np.zeros(0, dtype=np.intp), np.zeros(0, dtype=np.intp))
        tokens.count = num_rows * (columns.stop - columns.start)
        tokens._columns = columns
        return tokens

    def take(self, padded: torch.Tensor) -> torch.Tensor:
        """[batch_size, heads, length, dim] -> [num_tokens, heads, dim]; a view where no gather is needed."""
        by_token = padded.transpose(1, 2)
        if self._columns is not None:
            return by_token[:, self._columns].flatten(0, 1)
        return by_token[self._on(padded.device)]

    def put(self, tokens: torch.Tensor, batch_size: int, length: int) -> torch.Tensor:
        """[num_tokens, heads, dim] -> [batch_size, length, heads, dim], zero where there is no token."""
        if self._columns is not None:
            return tokens.view(batch_size, length, *tokens.shape[1:])
        padded = tokens.new_zeros(batch_size, length, *tokens.shape[1:])
        padded[self._on(tokens.device)] = tokens
        return padded

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = (index.to(device, non_blocking=True) for index in self._indices)
        self._indices = (rows, columns)  # all layers of the step want them there
        return self._indices


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packing:
    """A step in which keys and values come whole.

    prefix_lens, new_lens: for each sequence, keys before the step's queries, and queries.
    prefix, new: where those keys are. queries: where the queries are, as many as `new`.
    """

    prefix_lens: Sequence[int]
    new_lens: Sequence[int]
    prefix: Tokens
    new: Tokens
    queries: Tokens


def pack_causal(
    batch_size: int, q_length: int, num_keys: int, padding: Bools | None, *, has_window: bool
) -> Packing:
    """Every row is a sequence whose last tokens are the queries. Rows and queries that are padding are left out.

    padding: [batch_size, at least num_keys], False for padding.

    Raises SpecError when padding lies between the tokens of a row and there is a window: taking it out would move
    tokens into the window. Without one only the order of the tokens matters, and padding may lie anywhere.
    """
    before = num_keys - q_length
    real = None if padding is None else padding[:, :num_keys]
    if real is None or bool(real.all()):
        return Packing(
            prefix_lens=[before] * batch_size,
            new_lens=[q_length] * batch_size,
            prefix=Tokens.of_all_rows(batch_size, slice(0, before)),
            new=Tokens.of_all_rows(batch_size, slice(before, num_keys)),
            queries=Tokens.of_all_rows(batch_size, slice(0, q_length)),
        )
    if has_window and has_holes(real):
        raise SpecError(
            "attention_mask has padding between the tokens of a row, and a layer has a sliding window, which counts "
            "positions: pad on one side only."
        )
    prefix, new = real[:, :before], real[:, before:]
    rows: Bools = np.asarray(new.any(axis=1))
    prefix = prefix & rows[:, None]
    new_rows, columns = np.nonzero(new)
    return Packing(
        prefix_lens=prefix.sum(axis=1)[rows].tolist(),
        new_lens=new.sum(axis=1)[rows].tolist(),
        prefix=Tokens(*np.nonzero(prefix)),
        new=Tokens(new_rows, columns + before),
        queries=Tokens(new_rows, columns),
    )


def pack_bidirectional(batch_size: int, q_length: int, num_keys: int, padding: Bools | None) -> Packing:
    """Every query sees every real key of its row, be it one of them or, as in cross-attention, none.

    A runtime takes no more queries than a sequence has keys, so a row with more of them becomes several sequences
    with the same keys: together they hold fewer than q_length + num_keys tokens.
    """
    prefix_lens: list[int] = []
    new_lens: list[int] = []
    parts: dict[str, list[tuple[int, Indices]]] = {"prefix": [], "new": [], "queries": []}
    for row in range(batch_size):
        keys = np.arange(num_keys) if padding is None else np.flatnonzero(padding[row])
        if keys.size == 0:
            continue  # sees nothing: the output stays 0
        for start in range(0, q_length, keys.size):
            queries = np.arange(start, min(start + keys.size, q_length))
            before = keys.size - queries.size
            prefix_lens.append(before)
            new_lens.append(queries.size)
            parts["prefix"].append((row, keys[:before]))
            parts["new"].append((row, keys[before:]))
            parts["queries"].append((row, queries))
    return Packing(
        prefix_lens=prefix_lens,
        new_lens=new_lens,
        prefix=_joined(parts["prefix"]),
        new=_joined(parts["new"]),
        queries=_joined(parts["queries"]),
    )


def has_holes(real: Bools) -> bool:
    """Whether padding lies between two real tokens of a row. real: [batch_size, length]."""
    first_tokens = real & ~np.pad(real, ((0, 0), (1, 0)))[:, :-1]  # real tokens after padding or a row's start
    return bool((first_tokens.sum(axis=1) > 1).any())


def _joined(parts: list[tuple[int, Indices]]) -> Tokens:
    empty = np.zeros(0, dtype=np.intp)
    rows = np.concatenate([empty, *(np.full(columns.size, row, dtype=np.intp) for row, columns in parts)])
    return Tokens(rows, np.concatenate([empty, *(columns for _, columns in parts)]))

"""A step in tensors that stay where they are, so that a device graph captured once finds every later step in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anyattn.attention.batch import Batch
from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.index_buffers import IndexBuffers
from anyattn.mem_cache.step_view import StepView
from anyattn.types import GraphLevel

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.indices import Int32s, Int64s
    from anyattn.mem_cache.page_table import PageTable
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

_SENT = ("rows", "prefix_lens", "kv_lens", "qo_indptr", "kv_indptr", "kv_last_page_len")
"""What travels from the host; all else is made of it on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSizes:
    """The largest step that a graph serves. Smaller ones are padded.

    level: which steps it serves at all. max_kv_len: tokens of a sequence, the new ones included.
    tree_mask: whether the new tokens may be those of trees.
    """

    level: GraphLevel
    num_seqs: int
    num_tokens: int
    max_kv_len: int
    tree_mask: bool = False

    def __post_init__(self) -> None:
        for name in ("num_seqs", "num_tokens", "max_kv_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ContractError(f"{name} of a graph must be a positive integer, not {value!r}.")
        if self.level == GraphLevel.NEVER:
            raise ContractError("the spec asks for no graph: make the runtime with AttentionSpec(graph='decode').")
        if self.level == GraphLevel.DECODE and self.num_tokens != self.num_seqs:
            raise ContractError(
                f"a graph of level decode has one token for each sequence, not {self.num_tokens} for {self.num_seqs}: "
                "ask for AttentionSpec(graph='uniform')."
            )
        if self.level == GraphLevel.UNIFORM and self.num_tokens % self.num_seqs:
            raise ContractError(
                f"a graph of level uniform has as many tokens for each sequence, and {self.num_tokens} cannot be "
                f"divided among {self.num_seqs}: pass a multiple of num_seqs, or ask for AttentionSpec(graph='always')."
            )
        if self.tree_mask and self.level == GraphLevel.ALWAYS:
            raise ContractError(
                "a graph with tree masks has as many tokens for each sequence: ask for AttentionSpec(graph='uniform')."
            )
        if self.level != GraphLevel.ALWAYS and self.max_qo_len > self.max_kv_len:
            raise ContractError(
                f"max_kv_len counts the new tokens too: {self.max_kv_len} do not hold the {self.max_qo_len} of each "
                "sequence."
            )

    @property
    def max_qo_len(self) -> int:
        """Most new tokens of one sequence; below level always, what each of them has."""
        if self.level == GraphLevel.ALWAYS:
            return min(self.num_tokens, self.max_kv_len)
        return self.num_tokens // self.num_seqs

    def require(self, batch: Batch) -> None:
        """Raises ContractError for a step that the graph does not serve."""
        lens, most = batch.host.qo_lens, self.max_qo_len
        if batch.num_seqs > self.num_seqs or batch.num_tokens > self.num_tokens:
            raise ContractError(
                f"the graph serves up to {self.num_seqs} sequences with {self.num_tokens} new tokens, and the batch "
                f"has {batch.num_seqs} with {batch.num_tokens}: capture a larger one, or run this step without it."
            )
        if batch.max_kv_len > self.max_kv_len:
            raise ContractError(
                f"the graph serves sequences of up to {self.max_kv_len} tokens, and one has {batch.max_kv_len}: "
                "capture one with a larger max_kv_len, or run this step without it."
            )
        if self.level != GraphLevel.ALWAYS and (lens != most).any():
            other = int(lens[lens != most][0])
            raise ContractError(
                f"the graph serves {most} new token{'s' * (most > 1)} for each sequence, and one has {other}: capture "
                "one for that, or run this step without it."
            )
        if batch.tree_masks is not None and not self.tree_mask:
            raise ContractError(
                "the graph has no tree masks, and the batch brings some: capture one with several new tokens for each "
                "sequence, or run this step without it."
            )


class GraphBatch:
    """The tensors of a graph's steps, and the batch that names them.

    batch: padded to `sizes`; its tensors are never replaced. Its `host` is that of the step without any sequence with
        which it begins. host: of the step that the tensors hold.
    """

    def __init__(self, table: PageTable, sizes: GraphSizes) -> None:
        self.sizes = sizes
        self._table = table
        num_seqs, device = sizes.num_seqs, table.device_table.device
        columns = -(-sizes.max_kv_len // table.page_size)
        buffers = IndexBuffers.empty(
            device,
            max_seqs=num_seqs,
            max_tokens=sizes.num_tokens,
            max_pages=num_seqs * columns,
            max_pages_per_seq=columns,
        )
        lengths = [getattr(buffers, name).numel() for name in _SENT]
        with torch.inference_mode(False):
            self._sent, parts = _joined_zeros(lengths, device)
            first = replace(buffers, **dict(zip(_SENT, parts, strict=True)))
            others = [
                replace(first, **{n: torch.zeros_like(getattr(first, n)) for n in _PAGE_FIELDS}) for _ in table.windows
            ]
            self._masks = None
            if sizes.tree_mask:
                causal = torch.ones(sizes.max_qo_len, sizes.max_qo_len, dtype=torch.bool, device=device).tril()
                self._causal = causal
                self._masks = causal.repeat(num_seqs, 1, 1)
            tree_masks = None if self._masks is None else self._masks.unbind()
        self._buffers = [first, *others]
        none = np.zeros(0, dtype=np.int64)
        empty = StepView(
            table=table, version=table.version, seqs=none, rows=none, prefix_lens=none, kv_lens=none, num_pages=none,
            last_slots=none, one_each=False,
        )  # fmt: skip
        decode = sizes.level != GraphLevel.ALWAYS and sizes.max_qo_len == 1
        full = Batch(
            page_size=table.page_size,
            num_seqs=num_seqs,
            num_tokens=sizes.num_tokens,
            max_qo_len=sizes.max_qo_len,
            max_kv_len=sizes.max_kv_len,
            phase="verify" if sizes.tree_mask else "decode" if decode else "mixed",
            qo_indptr=first.qo_indptr,
            kv_lens=first.kv_lens,
            kv_indptr=first.kv_indptr,
            kv_last_page_len=first.kv_last_page_len,
            positions=first.positions,
            tree_masks=tree_masks,
            host=_padded(empty, num_seqs),
            **_pages_of(first),
        )
        self.batch = replace(full, windows=tuple(replace(full, **_pages_of(each)) for each in others))
        self.host = self.batch.host

    def refresh(self, batch: Batch) -> Batch:
        """Writes a step into the tensors; returns `self.batch` with the step's host view, padded likewise.

        Raises ContractError, before anything is written, for a step that does not fit or is not the table's last.
        """
        self.sizes.require(batch)
        if batch.host.version != self._table.version:
            raise ContractError(
                "sequences were extended, freed or otherwise changed since this step was made: refresh a graph right "
                "after the step's extend."
            )
        view = _padded(batch.host, self.sizes.num_seqs)
        page_table, mappings, (sent,) = self._table.send([_joined([getattr(view, name) for name in _SENT])])
        self._sent.copy_(sent)
        for buffers, mapping in zip(self._buffers, [None, *mappings], strict=True):
            buffers.fill(page_table, self._table.page_size, mapping)
        if self._masks is not None and batch.num_seqs:
            given = batch.tree_masks or [None] * batch.num_seqs
            self._masks[: batch.num_seqs].copy_(torch.stack([self._causal if m is None else m for m in given]))
        self.host = view
        now = replace(self.batch, host=view)
        return replace(now, windows=tuple(replace(each, host=view) for each in self.batch.windows))


_PAGE_FIELDS = ("kv_indices", "block_table", "out_slots")
"""What differs from pool to pool."""

_ALIGNED = 4  # int32 elements: kernels load 16 bytes at once


def _pages_of(buffers: IndexBuffers) -> dict[str, Any]:
    return {name: getattr(buffers, name) for name in _PAGE_FIELDS}


def _joined_zeros(lengths: list[int], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One int32 tensor, and its parts of these lengths."""
    sizes = [size for length in lengths for size in (length, -length % _ALIGNED)]
    whole = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    return whole, list(whole.split_with_sizes(sizes)[::2])


def _joined(arrays: list[Int32s | Int64s]) -> Int32s:
    """The arrays one behind the other, as `_joined_zeros` divides them."""
    whole = np.zeros(sum(array.size + -array.size % _ALIGNED for array in arrays), dtype=np.int32)
    start = 0
    for array in arrays:
        whole[start : start + array.size] = array
        start += array.size + -array.size % _ALIGNED
    return whole


def _padded(view: StepView, num_seqs: int) -> StepView:
    """The step with sequences without tokens and pages behind its own; `seqs` has its own alone."""
    if view.rows.size == num_seqs:
        return view
    names = ("rows", "prefix_lens", "kv_lens", "num_pages", "last_slots")
    padded: Any = np.zeros((len(names), num_seqs), dtype=np.int64)  # one allocation: this is done for every step
    for row, name in zip(padded, names, strict=True):
        row[: view.rows.size] = getattr(view, name)
    return replace(view, one_each=False, **dict(zip(names, padded, strict=True)))

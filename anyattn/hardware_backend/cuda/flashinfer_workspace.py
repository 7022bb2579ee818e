"""What the FlashInfer backends share: wrappers for live plans, memory for partial outputs, steps as planners want them.

FlashInfer's planners are host code. They are given host tensors, so that none of them reads anything back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.attention.window import csr_within_window
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import last_page_len, token_positions

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.mem_cache.indices import Int32s, Int64s
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

RECOMMENDED_BYTES = 128 << 20
"""What FlashInfer's documentation says of the workspace for partial outputs."""

_WORD_BITS = 32


@dataclass(eq=False)
class WrapperPlan:
    """A wrapper that holds one step's plan.

    planned: recorded behind the copies of the wrapper's last plan, which come from a pinned buffer that the next plan
        fills.
    words, starts: of a graph with tree masks, what `packed_tree_masks` writes, in place.
    """

    wrapper: Any
    planned: torch.cuda.Event
    device: str
    words: torch.Tensor | None = None
    starts: torch.Tensor | None = None

    def plan(self, *args: Any, **options: Any) -> None:
        """The wrapper's own, once its pinned buffer is free again."""
        self.planned.synchronize()
        self.wrapper.plan(*args, **options)
        self.planned.record(torch.cuda.current_stream(self.device))


class Wrappers:
    """Wrappers by kind: one for each live plan, as a plan is state of its wrapper.

    They share one workspace, which is safe as their kernels run on one stream. What is larger than it gets a larger
    one; those that have the former keep it.
    """

    def __init__(self, device: str, num_bytes: int) -> None:
        """num_bytes: for the partial outputs of any plan without graph."""
        self._device = device
        self._idle: dict[str, list[tuple[Any, torch.cuda.Event]]] = {}
        self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def workspace(self, num_bytes: int = 0) -> torch.Tensor:
        """[num_bytes or more], uint8."""
        if self._workspace.numel() < num_bytes:
            self._workspace = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._workspace

    def take(self, kind: str, make: Callable[[], Any]) -> WrapperPlan:
        """A wrapper that no live plan uses; it is free again when the plan is gone."""
        idle = self._idle.setdefault(kind, [])
        if not idle:
            with torch.inference_mode(False):  # a wrapper writes to buffers of its own, in whatever mode it is used
                idle.append((make(), torch.cuda.Event()))  # type: ignore[no-untyped-call]
        wrapper, planned = idle.pop()
        plan = WrapperPlan(wrapper, planned, self._device)
        weakref.finalize(plan, idle.append, (wrapper, planned)).atexit = False
        return plan

    def graph_plan(self) -> WrapperPlan:
        """One whose wrapper is still to be set, and serves no other plan."""
        return WrapperPlan(None, torch.cuda.Event(), self._device)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannerStep:
    """A step as planners want it: int32, on the host but for kv_indices.

    qo_indptr, kv_indptr: [num_seqs + 1]. kv_lens, last_page_len: [num_seqs]. kv_indices: pages in the order of
    kv_indptr, on the device; more may follow, and where padding is the last of a graph's step, its may be missing.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_lens: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, window: int | None = None) -> PlannerStep:
        """A step without graph, without the pages that lie behind every query's window."""
        kv_indptr, kv_indices, kv_lens = csr_within_window(batch, window)
        return cls._made(batch.host.qo_indptr, kv_indptr, kv_indices, kv_lens, batch.page_size)

    @classmethod
    def of_graph(cls, batch: Batch, window: int | None = None) -> PlannerStep:
        """A step of a graph, in which every sequence has `max_qo_len` new tokens, padding too.

        Kernels and grids are chosen by the number of query rows, which must not change from step to step. Padding
        consists of its new tokens alone, on whatever pages are in its place of the graph's kv_indices.
        """
        kv_indptr, kv_indices, kv_lens = csr_within_window(batch, window)
        num_seqs, qo_len, real = batch.num_seqs, batch.max_qo_len, batch.host.seqs.size
        padding = np.arange(1, num_seqs - real + 1, dtype=np.int32) * -(-qo_len // batch.page_size)
        kv_indptr = np.concatenate([kv_indptr[: real + 1], kv_indptr[real] + padding])
        kv_lens = np.where(np.arange(num_seqs) < real, kv_lens, qo_len)
        qo_indptr = np.arange(num_seqs + 1, dtype=np.int32) * qo_len
        return cls._made(qo_indptr, kv_indptr, kv_indices[: int(kv_indptr[-1])], kv_lens, batch.page_size)

    @classmethod
    def _made(
        cls, qo_indptr: Int32s, kv_indptr: Int32s, kv_indices: torch.Tensor, kv_lens: Int64s, page_size: int
    ) -> PlannerStep:
        return cls(
            qo_indptr=torch.from_numpy(qo_indptr),
            kv_indptr=torch.from_numpy(kv_indptr),
            kv_indices=kv_indices,
            kv_lens=torch.from_numpy(kv_lens.astype(np.int32)),
            last_page_len=torch.from_numpy(last_page_len(kv_lens, page_size)),
        )


def most_mask_words(num_seqs: int, qo_len: int, max_kv_len: int) -> int:
    """Words that `packed_tree_masks` needs at most for so many sequences."""
    return num_seqs * -(-qo_len * max_kv_len // _WORD_BITS)


def packed_tree_masks(
    step: PlannerStep,
    tree_masks: Sequence[torch.Tensor | None],
    device: torch.device,
    words: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which keys each new token sees, as the kernels with custom masks read it, made on the device without a sync.

    Of each sequence one bit for each new token and key, [qo_len, kv_len], the lowest bit first; every new token sees
    what is before the step. tree_masks: as in `Batch`. words: where to write, otherwise new memory.
    Returns the words, int32, in which each sequence begins a new one, and where each begins, in bytes: [num_seqs + 1],
    int32, on the device.
    """
    qo_lens, kv_lens = np.diff(step.qo_indptr.numpy()).astype(np.int64), step.kv_lens.numpy().astype(np.int64)
    starts = np.zeros(qo_lens.size + 1, dtype=np.int64)
    np.cumsum(-(-qo_lens * kv_lens // _WORD_BITS), out=starts[1:])
    owner, row = token_positions(np.zeros_like(qo_lens), qo_lens)
    token, column = token_positions(np.zeros_like(owner), qo_lens[owner])
    owner, row = owner[token], row[token]
    bit = row * kv_lens[owner] + kv_lens[owner] - qo_lens[owner] + column
    taken = (-(np.int64(1) << (bit % _WORD_BITS))).astype(np.int32)  # from a word of ones, this clears the bit
    there, changes, begins = to_device([starts[owner] + bit // _WORD_BITS, taken, starts * (_WORD_BITS // 8)], device)
    if words is None:
        words = torch.empty(int(starts[-1]), dtype=torch.int32, device=device)
    words[: int(starts[-1])].fill_(-1)
    if bit.size:
        seen = _new_tokens_seen(qo_lens.tolist(), tree_masks, device)
        words.index_add_(0, there, torch.where(seen, 0, changes))
    return words, begins


def _new_tokens_seen(
    qo_lens: Sequence[int], tree_masks: Sequence[torch.Tensor | None], device: torch.device
) -> torch.Tensor:
    """[sum of qo_len * qo_len], bool: the masks one after the other, causal ones where there is None."""
    causal = torch.empty(0, 0, dtype=torch.bool, device=device)
    if most := max((n for n, mask in zip(qo_lens, tree_masks, strict=True) if mask is None), default=0):
        causal = torch.ones(most, most, dtype=torch.bool, device=device).tril()
    return torch.cat(
        [(causal[:n, :n] if mask is None else mask).flatten() for n, mask in zip(qo_lens, tree_masks, strict=True)]
    )

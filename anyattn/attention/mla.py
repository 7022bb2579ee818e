"""MLA from the heads before absorption: absorbed into the latent, or with keys and values expanded from it, by length.

With the up-projections W_UK and W_UV of a head (DeepSeek-V2, arXiv:2405.04434, section 2.1), a score is
q_nope·(W_UK c) + q_rope·k_rope for a token's latent c, and its value is W_UV c. Either q_nope is multiplied with W_UK,
attends to the latents themselves, and W_UV is applied to what comes out: every score then takes rank + rope products
and every value rank. Or each latent becomes a key and a value of every head first, which takes as many products for a
token as absorbing one query does, and scores and values are small. Decode reads each latent for one query: absorbed.
Prompts read it for many: expanded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.attention.batch import Batch
from anyattn.attention.hybrid import PlannedStep
from anyattn.attention.merge import merge_states
from anyattn.lazy import lazy_import
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.base import LayerKV
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import indptr, last_page_len, pages_for, ranges
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import dequantize
from anyattn.mem_cache.step_view import StepView
from anyattn.types import DTYPE_BYTES

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.backend import AttentionBackend
    from anyattn.attention.hybrid import HybridBackend
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.indices import Int64s
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")

_SCRATCH_BYTES = 512 << 20
"""Expanded keys and values at a time, unless the new tokens alone take more."""
_LEAST_PAIRS = 6000
"""Fewer pairs of a new token and a key than these are not worth the launches that expansion takes beside absorption."""
_MOVED, _MERGED = 200, 9000
"""Products that take as long as to write and read an element that either way makes, and as to merge an element of two
pieces' outputs. Fitted to measurements on a device of 790 TFLOP/s and 4.4 TB/s (docs/nvidia.md); all have the same."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpProjections:
    """One layer's.

    w_uk: [num_qo_heads, qk_nope_head_dim, kv_lora_rank]. w_uv: [num_qo_heads, kv_lora_rank, v_head_dim].
    """

    w_uk: torch.Tensor
    w_uv: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pass:
    """One piece of the keys of some sequences.

    step: its backend serves heads of keys and values, causal where the piece ends with the new tokens.
    pages, offsets: [num_scratch_tokens], int64, where in the pool each scratch token's latent lies.
    page_size, num_pages: of the scratch, the null page included.
    rows: of q, those whose sequences have such a piece; None for all.
    """

    step: PlannedStep
    pages: torch.Tensor
    offsets: torch.Tensor
    page_size: int
    num_pages: int
    rows: torch.Tensor | None

    @property
    def wants_contiguous_q(self) -> bool:
        return self.step.backend.capabilities.contiguous_q

    def run(
        self, q: torch.Tensor, kv: LayerKV, bound: UpProjections, out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = self.step.run(q, self._expand(kv, bound), out)
        assert lse is not None  # `expanded_specs` ask for it
        return out, lse

    def _expand(self, kv: LayerKV, bound: UpProjections) -> LayerKV:
        """The piece's keys and values, [num_pages, page_size, num_qo_heads, dim]; those of the null page are any."""
        tokens, (heads, nope, rank), v_dim = self.pages.shape[0], bound.w_uk.shape, bound.w_uv.shape[-1]
        stored = kv.nhd()[0]
        words = stored.view(torch.uint8) if stored.dtype.itemsize == 1 else stored  # torch has no gather for fp8
        latents = words[self.pages, self.offsets].view(stored.dtype)
        latents = dequantize(latents, kv.k_scale, bound.w_uk.dtype)[:, 0]
        k = latents.new_empty(self.num_pages * self.page_size, heads, nope + latents.shape[-1] - rank)
        v = latents.new_empty(self.num_pages * self.page_size, heads, v_dim)
        new_k, new_v = k[self.page_size :], v[self.page_size :]
        latent = latents[:, :rank].expand(heads, tokens, rank)
        torch.bmm(latent, bound.w_uk.transpose(1, 2), out=new_k[..., :nope].transpose(0, 1))
        torch.bmm(latent, bound.w_uv, out=new_v.transpose(0, 1))
        new_k[..., nope:] = latents[:, None, rank:]
        paged = (self.num_pages, self.page_size, heads)
        return LayerKV(k=k.view(*paged, -1), v=v.view(*paged, v_dim), layout="NHD")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MLAStep:
    """A step's sequences, divided: rows are those of q, None for all of them.

    absorbed: planned for those that are absorbed; None where there are none. passes: of those that are expanded, the
    piece with the new tokens first.
    """

    absorbed: PlannedStep | None
    absorbed_rows: torch.Tensor | None = None
    passes: tuple[_Pass, ...] = ()
    expanded_rows: torch.Tensor | None = None

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        bound: UpProjections,
        out: torch.Tensor | None = None,
        **more: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """q: [num_tokens, num_qo_heads, nope + rope]. out: [num_tokens, num_qo_heads, v_head_dim], or a new tensor.

        more: what else the absorbing backend's `run` takes, for each head, or for sparse attention, of which nothing is
        ever expanded, for each token.

        Returns the output and the LSE, where the spec wants it or where there happens to be one.
        """
        if self.absorbed is None:
            return _run_expanded(q, kv, self.passes, bound, out)
        if not self.passes:
            return _run_absorbed(q, kv, self.absorbed, bound, out, **more)
        if out is None:
            out = q.new_empty((*q.shape[:2], bound.w_uv.shape[-1]))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for rows, of_passes in ((self.absorbed_rows, False), (self.expanded_rows, True)):
            part = q[rows]
            part_lse: torch.Tensor | None
            if of_passes:
                attended, part_lse = _run_expanded(part, kv, self.passes, bound)
            else:
                attended, part_lse = _run_absorbed(part, kv, self.absorbed, bound, **more)
            out[rows] = attended
            if part_lse is not None:
                lse[rows] = part_lse
        return out, lse


def _run_absorbed(
    q: torch.Tensor,
    kv: LayerKV,
    step: PlannedStep,
    bound: UpProjections,
    out: torch.Tensor | None = None,
    **more: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    tokens, heads, _ = q.shape
    nope, rank = bound.w_uk.shape[1:]
    absorbed = q.new_empty(tokens, heads, rank + q.shape[-1] - nope)
    torch.bmm(q[..., :nope].transpose(0, 1), bound.w_uk, out=absorbed[..., :rank].transpose(0, 1))
    absorbed[..., rank:] = q[..., nope:]
    attended, lse = step.run(absorbed, kv, **more)
    if out is None:
        out = q.new_empty(tokens, heads, bound.w_uv.shape[-1])
    torch.bmm(attended.transpose(0, 1), bound.w_uv, out=out.transpose(0, 1))
    return out, lse


def _run_expanded(
    q: torch.Tensor, kv: LayerKV, passes: tuple[_Pass, ...], bound: UpProjections, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if not q.is_contiguous() and any(each.wants_contiguous_q or q.stride(-1) != 1 for each in passes):
        q = q.contiguous()  # once for all of them
    last, *before = passes
    out, lse = last.run(q, kv, bound, out)
    for each in before:
        rows = slice(None) if each.rows is None else each.rows
        attended, part_lse = each.run(q[rows], kv, bound)
        out[rows], lse[rows] = merge_states([out[rows], attended], [lse[rows], part_lse])
    return out, lse


@dataclass(frozen=True, slots=True, kw_only=True)
class Expansion:
    """Backends for keys and values that were expanded: of `expanded_specs`.

    causal: for the piece that ends with the new tokens. whole: for those before, which every new token sees.
    names: what the two are offered as.
    """

    causal: AttentionBackend
    whole: AttentionBackend
    page_size: int
    names: tuple[str, str]


def expanded_specs(spec: AttentionSpec) -> tuple[AttentionSpec, AttentionSpec] | None:
    """What attends after expansion, with a causal mask and without; None where absorption is the only way."""
    plain = spec.causal and not (
        spec.sliding_window or spec.logits_soft_cap or spec.sinks or spec.alibi or spec.tree_mask or spec.deterministic
        or spec.topk
    )  # fmt: skip
    if not plain or spec.qk_nope_head_dim is None or spec.qk_rope_head_dim is None or spec.v_head_dim is None:
        return None
    from anyattn.attention.spec import AttentionSpec  # which this module's types need only

    causal = AttentionSpec(
        num_qo_heads=spec.num_qo_heads,
        num_kv_heads=spec.num_qo_heads,
        head_dim=spec.qk_nope_head_dim + spec.qk_rope_head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=spec.dtype,
        sm_scale=spec.scale,
        return_lse=True,
    )
    return causal, causal.replace(causal=False)


class MLAPath:
    """Plans the steps of one MLA spec's layers that have up-projections."""

    def __init__(self, spec: AttentionSpec, absorbed: HybridBackend, expansion: Expansion | None, device: Any) -> None:
        self._spec = spec
        self._absorbed = absorbed
        self._expansion = expansion
        if expansion is not None:  # of which scratch batches are said to be; their pages are those of no pool
            self._table = PageTable(PagedAllocator(1, expansion.page_size), expansion.page_size, device=device)

    def plan(self, batch: Batch) -> MLAStep:
        """Divides the batch's sequences by what each costs either way, and plans both parts."""
        expanded = self._worth_expanding(batch)
        if not expanded.size:
            return MLAStep(absorbed=self._absorbed.plan(batch))
        return self._divided(batch, expanded, self._most_keys(batch.host.qo_lens[expanded], expanded.size))

    def plan_expanded(self, batch: Batch) -> MLAStep | None:
        """Expands all sequences with several new tokens, whether it is worth it or not, in two pieces where they fit.

        None where that is never done.
        """
        new, keys = batch.host.qo_lens, batch.host.kv_lens
        expanded = np.flatnonzero(new > 1)
        if self._expansion is None or batch.tree_masks is not None or not expanded.size:
            return None
        return self._divided(batch, expanded, np.maximum(2 * new, -(-keys // 2))[expanded])

    def _divided(self, batch: Batch, expanded: Int64s, most_keys: Int64s) -> MLAStep:
        """expanded: which sequences are; the others are absorbed. most_keys: of a piece of each."""
        if expanded.size == batch.num_seqs:
            return MLAStep(absorbed=None, passes=tuple(self._passes(batch, expanded, most_keys)))
        others = np.setdiff1d(np.arange(batch.num_seqs), expanded)
        rest, rows = batch.of_sequences(others)
        absorbed = self._absorbed.plan(rest) if rest.num_tokens else None
        (of_expanded,) = to_device(
            [ranges(batch.host.qo_indptr[expanded], batch.host.qo_lens[expanded])], batch.kv_lens.device, wide=1
        )
        passes = tuple(self._passes(batch, expanded, most_keys))
        return MLAStep(absorbed=absorbed, absorbed_rows=rows, passes=passes, expanded_rows=of_expanded)

    def _worth_expanding(self, batch: Batch) -> Int64s:
        """Which sequences are cheaper with keys and values expanded, in products a head."""
        none: Int64s = np.zeros(0, dtype=np.int64)
        if self._expansion is None or batch.max_qo_len < 2 or batch.tree_masks is not None:
            return none
        spec, host = self._spec, batch.host
        nope, rope, v_dim, rank = (
            spec.qk_nope_head_dim or 0, spec.qk_rope_head_dim or 0, spec.v_head_dim or 0, spec.kv_lora_rank or 0
        )  # fmt: skip
        new, keys = host.qo_lens, host.kv_lens
        pairs = new * (keys - new) + new * (new + 1) // 2
        merges = (keys - 1) // self._most_keys(new, int(np.count_nonzero(new > 1)))
        saved = pairs * (2 * rank + rope - (nope + rope + v_dim)) - (keys - new) * rank * (nope + v_dim)
        moved = keys * (nope + rope + v_dim) - new * (2 * rank + rope)  # keys and values, or queries and their outputs
        saved -= moved * _MOVED + merges * new * v_dim * _MERGED
        worth: Int64s = np.flatnonzero((saved > 0) & (new > 1))
        return worth if pairs[worth].sum() >= _LEAST_PAIRS else none

    def _most_keys(self, new: Int64s, num_sequences: int) -> Int64s:
        """Keys of a piece, for each of so many sequences that are expanded together."""
        assert self._expansion is not None
        causal = self._expansion.causal.spec
        token_bytes = (causal.head_dim + causal.vo_head_dim) * causal.num_kv_heads * DTYPE_BYTES[causal.dtype]
        most: Int64s = np.maximum(2 * new, _SCRATCH_BYTES // token_bytes // num_sequences)
        return most

    def _passes(self, batch: Batch, sequences: Int64s, most_keys: Int64s) -> Iterator[_Pass]:
        """Pieces from the sequences' ends to their beginnings, each as many tokens as it has new ones or more.

        most_keys: of a piece of each sequence, twice its new tokens or more.
        """
        host, expansion = batch.host, self._expansion
        assert expansion is not None
        device = batch.kv_lens.device
        new, keys = host.qo_lens[sequences], host.kv_lens[sequences]
        num_pieces = -(-keys // most_keys)
        for piece in range(int(num_pieces.max())):
            chosen = np.flatnonzero(num_pieces > piece)
            n, count, total = new[chosen], num_pieces[chosen], keys[chosen]
            # Of `count` pieces that are as long as each other but for one token, that which is the `piece`-th last.
            ends = total * (count - piece) // count
            starts = total * (count - piece - 1) // count
            scratch = _scratch_batch(self._table, n, ends - starts, device)
            owner = np.repeat(np.arange(chosen.size), scratch.host.num_pages * expansion.page_size)
            first = np.cumsum(scratch.host.num_pages) - scratch.host.num_pages
            position = np.arange(owner.size) - first[owner] * expansion.page_size + starts[owner]
            position = np.minimum(position, ends[owner] - 1)  # of padding, any token
            column, offset = np.divmod(position, batch.page_size)
            row_index = None if chosen.size == sequences.size else ranges((np.cumsum(new) - new)[chosen], n)
            sent = [sequences[chosen][owner], column, offset, *([] if row_index is None else [row_index])]
            rows, columns, offsets, *row_tensor = to_device(sent, device, wide=len(sent))
            backend = expansion.whole if piece else expansion.causal
            yield _Pass(
                step=PlannedStep(backend, backend.plan(scratch)),
                pages=batch.block_table[rows, columns].long(),
                offsets=offsets,
                page_size=expansion.page_size,
                num_pages=1 + int(scratch.host.num_pages.sum()),
                rows=row_tensor[0] if row_tensor else None,
            )


def _scratch_batch(table: PageTable, qo_lens: Int64s, kv_lens: Int64s, device: torch.device) -> Batch:
    """A batch of sequences whose pages lie one behind the other, from page 1 on."""
    page_size = table.page_size
    num_pages = pages_for(kv_lens, page_size)
    first = 1 + np.cumsum(num_pages) - num_pages
    host = StepView(
        table=table, version=table.version, seqs=np.arange(qo_lens.size), rows=np.zeros_like(qo_lens),
        prefix_lens=kv_lens - qo_lens, kv_lens=kv_lens, num_pages=num_pages, last_slots=first * page_size + kv_lens - 1,
        one_each=False,
    )  # fmt: skip
    columns = np.arange(int(num_pages.max()))
    block_table = np.where(columns < num_pages[:, None], first[:, None] + columns, 0)
    position = np.arange(int(qo_lens.sum())) - np.repeat(host.qo_indptr[:-1], qo_lens)
    position += np.repeat(host.prefix_lens, qo_lens)
    slots = position + np.repeat(first * page_size, qo_lens)
    kv_indices: Int64s = np.arange(1, 1 + int(num_pages.sum()))
    last_page_lens = last_page_len(kv_lens, page_size)
    sent: list[Any] = [host.qo_indptr, kv_lens, indptr(num_pages), last_page_lens, kv_indices, block_table.reshape(-1)]
    there = to_device([*sent, position, slots], device, wide=2)
    return Batch(
        page_size=page_size,
        num_seqs=qo_lens.size,
        num_tokens=int(qo_lens.sum()),
        max_qo_len=int(qo_lens.max()),
        max_kv_len=int(kv_lens.max()),
        phase="prefill",
        qo_indptr=there[0],
        kv_lens=there[1],
        kv_indptr=there[2],
        kv_last_page_len=there[3],
        kv_indices=there[4],
        block_table=there[5].view(qo_lens.size, -1),
        positions=there[6],
        out_slots=there[7],
        tree_masks=None,
        host=host,
    )

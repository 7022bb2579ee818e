"""Attention through torch's own operators, one sequence at a time: runs on every device that torch runs on.

Each sequence's pages are gathered into a buffer that all layers and steps share, and then attended:

- through `scaled_dot_product_attention` where the spec wants nothing more than a causal mask or a window. For one
  query token the query heads of a group become rows of one matrix, so that each KV head is read once; for several, KV
  heads are expanded with stride 0, so that one mask serves all heads;
- through explicit float32 products where it wants a soft cap, ALiBi, sinks, a tree or the LSE, which SDPA has not or
  gives NaN for, and on accelerators wherever SDPA's flash kernel cannot be used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.lazy import lazy_import
from anyattn.mem_cache.pool import dequantize
from anyattn.types import ANY_INT, FP8_DTYPES, KV_LAYOUTS, PHASES, GraphLevel

if TYPE_CHECKING:
    import torch
    import torch.nn.attention as sdp
    import torch.nn.functional as F

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    torch = lazy_import("torch")
    F = lazy_import("torch.nn.functional")
    sdp = lazy_import("torch.nn.attention")

_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_SDPA_QUERIES = 512  # rows of a masked block: bounds the mask, and lets keys above the diagonal be skipped
_SCORE_ELEMENTS = 1 << 22  # bounds the explicit path's score matrix to 16 MiB of float32
_ACCELERATOR_SCORE_ELEMENTS = 1 << 26  # 256 MiB: larger products keep a larger device busy


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Some of a sequence's queries, and the keys they see between them.

    rows: tokens of q and out. keys: tokens of the gathered keys. distance: [num_queries, num_keys], float32, key
    position - query position, for ALiBi. mask: [num_queries, num_keys], bool; None when every query sees every key,
    or those up to its own where `is_causal`.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor | None
    distance: torch.Tensor | None
    is_causal: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Sequence:
    """pages: [num_pages], int32, those to gather; pages wholly behind the window are left out."""

    pages: torch.Tensor
    blocks: list[_Block]


class TorchNativeBackend(AttentionBackend):
    """Gathers each sequence's pages and attends with torch."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        packages=("torch>=2.9",),
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES | FP8_DTYPES,
        per_head_scales=True,
        any_head_dim_pair=True,
        any_mla_dims=True,
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset(PHASES),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        alibi=True,
        tree_mask=True,
        lse=True,
        graph=GraphLevel.NEVER,
        deterministic=True,
        priority=10,
        run_on=frozenset({"x86_64", "sm90"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        needs_scores = (
            spec.logits_soft_cap is not None or spec.alibi or spec.sinks or spec.tree_mask or spec.return_lse
        )
        # On accelerators only what SDPA gives to its flash kernel goes there, so nothing with a mask. The rest it would
        # give to its memory-efficient kernel, which is wrong, in silence, for more than 65536 keys (pytorch issue
        # 162588) and, with torch 2.11, for 512-element values where a row sees nothing of the first keys.
        capability = platform.compute_capability
        flash = (
            capability is not None
            and capability >= (8, 0)
            and spec.dtype != "float32"
            and spec.head_dim == spec.vo_head_dim <= 256
        )
        self._masks_in_sdpa = platform.kind == "cpu"
        self._explicit = needs_scores or not (self._masks_in_sdpa or flash)
        self._flash_only = flash and not self._explicit
        self._dtype: torch.dtype = torch.float32 if self._explicit else getattr(torch, spec.dtype)
        self._buffers: dict[str, torch.Tensor] = {}

    def plan(self, batch: Batch) -> list[_Sequence]:
        return [self._plan_sequence(batch, i) for i in range(batch.num_seqs) if batch.host.qo_lens[i] > 0]

    def _plan_sequence(self, batch: Batch, i: int) -> _Sequence:
        spec, host = self.spec, batch.host
        num_keys, num_queries = int(host.kv_lens[i]), int(host.qo_lens[i])
        prefix = num_keys - num_queries
        first_row, first_page = int(host.qo_indptr[i]), self._first_key(prefix) // batch.page_size
        gathered = first_page * batch.page_size  # position of the first key in the buffer
        tree_mask = None if batch.tree_masks is None else batch.tree_masks[i]
        whole = spec.causal and prefix == 0 and spec.sliding_window is None and not self._explicit
        step = num_queries if whole else self._queries_per_block(num_keys)
        blocks = []
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            keys = range(self._first_key(prefix + start), prefix + stop if spec.causal else num_keys)
            if tree_mask is not None:
                keys = range(num_keys)
            queries = range(prefix + start, prefix + stop)
            device = batch.kv_indices.device
            distance = mask = None
            if not whole and (spec.alibi or (spec.causal and len(queries) > 1) or tree_mask is not None):
                key = torch.arange(keys.start, keys.stop, device=device)
                query = torch.arange(queries.start, queries.stop, device=device)[:, None]
                mask = self._mask(query, key)
                if tree_mask is not None:
                    mask = torch.cat([mask[:, :prefix], tree_mask[start:stop]], dim=1)
                distance = (key - query).float() if spec.alibi else None
            blocks.append(
                _Block(
                    rows=slice(first_row + start, first_row + stop),
                    keys=slice(keys.start - gathered, keys.stop - gathered),
                    mask=mask,
                    distance=distance,
                    is_causal=whole and num_queries > 1,
                )
            )
        pages = batch.kv_indices[int(host.kv_indptr[i]) + first_page : int(host.kv_indptr[i + 1])]
        return _Sequence(pages=pages, blocks=blocks)

    def _first_key(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        window = self.spec.sliding_window
        return 0 if window is None else max(position + 1 - window, 0)

    def _queries_per_block(self, num_keys: int) -> int:
        if self._masks_in_sdpa and not self._explicit:
            return _SDPA_QUERIES
        elements = _SCORE_ELEMENTS if self.platform.kind == "cpu" else _ACCELERATOR_SCORE_ELEMENTS
        return max(elements // (self.spec.num_qo_heads * num_keys), 1)

    def _mask(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        if not self.spec.causal:
            return torch.ones_like(key <= query)
        seen = key <= query
        if self.spec.sliding_window is not None:
            seen &= key > query - self.spec.sliding_window
        return seen

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        if not self._flash_only:
            return self._run(q, kv, plan, out, sinks, alibi_slopes)
        # Left to itself, torch may take cuDNN, which plans anew for every length; and every decode step has new ones.
        with sdp.sdpa_kernel(sdp.SDPBackend.FLASH_ATTENTION):
            return self._run(q, kv, plan, out, sinks, alibi_slopes)

    def _run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> torch.Tensor | None:
        lse = None
        if self.spec.return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        k_pages, v_pages = kv.nhd()
        sequences: list[_Sequence] = plan
        for sequence in sequences:
            k = self._gather("k", k_pages, sequence.pages, kv.k_scale)
            v = k[..., : self.spec.vo_head_dim]
            if not self.spec.is_mla:
                v = self._gather("v", v_pages, sequence.pages, kv.v_scale)
            for block in sequence.blocks:
                rows, keys = block.rows, block.keys
                if self._explicit or (block.mask is not None and not self._masks_in_sdpa):
                    out[rows], block_lse = self._attend(q[rows], k[keys], v[keys], block, sinks, alibi_slopes)
                    if lse is not None:
                        lse[rows] = block_lse
                else:
                    out[rows] = self._sdpa(q[rows], k[keys], v[keys], block)
        return lse

    def _gather(
        self, name: str, pages: torch.Tensor, indices: torch.Tensor, scale: float | torch.Tensor
    ) -> torch.Tensor:
        """[num_tokens, num_kv_heads, dim] in the computing dtype: the pages of one sequence, one after the other."""
        if pages.dtype.itemsize == 1:  # torch has no gather for fp8; the bytes are what matters
            raw = self._gather_raw(name, pages.view(torch.uint8), indices).view(pages.dtype)
        else:
            raw = self._gather_raw(name, pages, indices)
        return dequantize(raw, scale, self._dtype).flatten(0, 1)

    def _gather_raw(self, name: str, pages: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < indices.numel():
            size = max(indices.numel(), 0 if buffer is None else 2 * buffer.shape[0])
            with torch.inference_mode(False):  # later steps may run outside of inference mode
                buffer = torch.empty((size, *pages.shape[1:]), dtype=pages.dtype, device=pages.device)
            self._buffers[name] = buffer
        return torch.index_select(pages, 0, indices, out=buffer[: indices.numel()])

    def _sdpa(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: _Block) -> torch.Tensor:
        """q: [num_queries, num_qo_heads, dim]. k, v: [num_keys, num_kv_heads, dim]."""
        num_queries, heads, group = q.shape[0], self.spec.num_kv_heads, self.spec.group_size
        if self._flash_only and not _is_aligned(q):  # the kernel takes it all the same, and reads where it must not
            q = q.clone(memory_format=torch.contiguous_format)
        if num_queries == 1:
            folded = q.reshape(1, heads, group, -1)
            k, v = k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0)  # [1, heads, num_keys, dim]
            return F.scaled_dot_product_attention(folded, k, v, scale=self.spec.scale).reshape(1, heads * group, -1)
        grouped = q.reshape(num_queries, heads, group, -1).permute(1, 2, 0, 3)  # [heads, group, num_queries, dim]
        k = k.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        v = v.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
        result = F.scaled_dot_product_attention(
            grouped, k, v, attn_mask=block.mask, is_causal=block.is_causal, scale=self.spec.scale
        )
        return result.permute(2, 0, 1, 3).flatten(1, 2)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block: _Block,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes as for `_sdpa`; returns the output and the LSE [num_queries, num_qo_heads]."""
        spec, num_queries, num_keys = self.spec, q.shape[0], k.shape[0]
        heads, group = spec.num_kv_heads, spec.group_size
        grouped = q.float().reshape(num_queries, heads, group, -1).permute(1, 2, 0, 3)
        folded = grouped.reshape(heads, group * num_queries, -1)
        k, v = k.float(), v.float()
        scores = torch.bmm(folded, k.permute(1, 2, 0)).view(heads, group, num_queries, num_keys) * spec.scale
        if spec.logits_soft_cap is not None:
            scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
        if alibi_slopes is not None and block.distance is not None:
            scores = scores + alibi_slopes.view(heads, group, 1, 1) * block.distance
        if block.mask is not None:
            scores = scores.masked_fill(~block.mask, float("-inf"))
        lse = torch.logsumexp(scores, dim=-1, keepdim=True)
        total = lse if sinks is None else torch.logaddexp(lse, sinks.view(heads, group, 1, 1))
        weights = torch.exp(scores - torch.where(total.isneginf(), 0.0, total))
        result = torch.bmm(weights.view(heads, group * num_queries, num_keys), v.transpose(0, 1))
        result = result.view(heads, group, num_queries, -1).permute(2, 0, 1, 3).flatten(1, 2)
        return result, lse.squeeze(-1).permute(2, 0, 1).flatten(1, 2)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(stride * size % 16 == 0 for stride in x.stride()[:-1])

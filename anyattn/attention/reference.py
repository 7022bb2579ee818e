"""The oracle: attention written for reading, in float64, with every field of the spec, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.lazy import lazy_import
from anyattn.mem_cache.sparse_pools import dsa_rows
from anyattn.types import ALL_LAYOUTS, ANY_INT, DTYPE_BYTES, FP8_DTYPES, PHASES, GraphLevel

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")

_FLOAT64_DEVICES = ("cpu", "cuda")
"""torch's device types where float64 is sure to be there (ROCm's is called cuda too); others compute on the CPU."""

_SCORE_ELEMENTS = 1 << 24  # bounds the score matrix to 128 MiB of float64


class ReferenceBackend(AttentionBackend):
    """One sequence after the other, one score matrix a block of queries. Slow and right."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        packages=("torch>=2.9",),
        dtypes=frozenset(DTYPE_BYTES) - FP8_DTYPES,
        kv_dtypes=frozenset(DTYPE_BYTES),
        per_head_scales=True,
        any_head_dim_pair=True,
        any_mla_dims=True,
        topk=ANY_INT,
        page_sizes=ANY_INT,
        layouts=ALL_LAYOUTS,
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
        priority=0,
        run_on=frozenset({"x86_64", "sm90"}),
    )

    def plan(self, batch: Batch) -> Batch:
        return batch

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        batch: Batch = plan
        device = q.device if q.device.type in _FLOAT64_DEVICES else torch.device("cpu")

        def moved(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(device)

        if indices is not None:
            lse = self._run_sparse(q, kv, indices, out, device, moved(sinks))
            return lse if self.spec.return_lse else None
        lses = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for i in range(batch.num_seqs):
            rows = slice(int(batch.host.qo_indptr[i]), int(batch.host.qo_indptr[i + 1]))
            pages = batch.kv_indices[int(batch.host.kv_indptr[i]) : int(batch.host.kv_indptr[i + 1])]
            k, v = kv.gather(pages)
            length = int(batch.host.kv_lens[i])
            out[rows], lses[rows] = reference_attention(
                self.spec,
                q[rows].to(device),
                _stored(k.flatten(0, 1)[:length], kv.k_scale, device),
                _stored(v.flatten(0, 1)[:length], kv.v_scale, device),
                tree_mask=None if batch.tree_masks is None else moved(batch.tree_masks[i]),
                sinks=moved(sinks),
                alibi_slopes=moved(alibi_slopes),
            )
        return lses if self.spec.return_lse else None

    def _run_sparse(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        slots: torch.Tensor,
        out: torch.Tensor,
        device: torch.device,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Each token against rows of its own; slots: as `run`'s indices. Returns the LSE."""
        lses = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        page_size = kv.k.shape[1]
        step = max(_SCORE_ELEMENTS // (slots.shape[1] * self.spec.head_dim), 1)
        for start in range(0, q.shape[0], step):
            block = slice(start, start + step)
            read = slots[block].clamp(min=0)
            k = dsa_rows(kv.k[read // page_size, read % page_size, 0].to(device))
            seen = (slots[block] >= 0).to(device)
            out[block], lses[block] = sparse_attention(self.spec, q[block].to(device), k, seen, sinks=sinks)
        return lses


def _stored(values: torch.Tensor, scale: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Stored keys or values, [num_tokens, num_kv_heads, dim], as they are meant, in float64."""
    if isinstance(scale, torch.Tensor):
        scale = scale.to(device).view(-1, 1)  # one for each head, or one for all
    return values.to(device).double() * scale


def visible(
    spec: AttentionSpec, num_queries: int, num_keys: int, device: Any, tree_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Which keys each of a sequence's last `num_queries` tokens sees: [num_queries, num_keys], bool."""
    key = torch.arange(num_keys, device=device)
    query = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    seen = torch.ones(num_queries, num_keys, dtype=torch.bool, device=device)
    if spec.causal:
        seen &= key <= query
    if spec.sliding_window is not None:
        seen &= key > query - spec.sliding_window
    if tree_mask is not None:
        seen[:, num_keys - num_queries :] = tree_mask
    return seen


def reference_attention(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tree_mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence's new tokens against all of its tokens, in float64.

    q: [num_queries, num_qo_heads, head_dim], the sequence's last tokens. k: [num_keys, num_kv_heads, head_dim].
    v: [num_keys, num_kv_heads, vo_head_dim]. sinks, alibi_slopes: [num_qo_heads].
    Returns output [num_queries, num_qo_heads, vo_head_dim] and LSE [num_queries, num_qo_heads], both float64.
    """
    seen = visible(spec, q.shape[0], k.shape[0], q.device, tree_mask)
    step = max(_SCORE_ELEMENTS // max(spec.num_qo_heads * k.shape[0], 1), 1)
    outs, lses = [], []
    for start in range(0, max(q.shape[0], 1), step):
        block = slice(start, start + step)
        first = k.shape[0] - q.shape[0] + start
        out, lse = _attend(spec, q[block].double(), k.double(), v.double(), seen[block], first, sinks, alibi_slopes)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def _attend(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    first_position: int,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    # What no query sees may be anything, as behind a window, where pages are let go; and 0 * NaN is NaN.
    k, v = (x.masked_fill(~seen.any(dim=0)[:, None, None], 0.0) for x in (k, v))
    k = k.repeat_interleave(spec.group_size, dim=1)  # head h reads KV head h // group_size
    v = v.repeat_interleave(spec.group_size, dim=1)
    scores = _capped(spec, torch.einsum("qhd,khd->hqk", q, k))
    if alibi_slopes is not None:
        key = torch.arange(k.shape[0], device=q.device)
        query = torch.arange(first_position, first_position + q.shape[0], device=q.device)
        scores = scores + alibi_slopes.double()[:, None, None] * (key - query[:, None])
    weights, lse = _softmax(scores, seen, sinks)
    return torch.einsum("hqk,khd->qhd", weights, v), lse.T


def sparse_attention(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    seen: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens against keys that were chosen for each of them, in float64.

    q: [num_tokens, num_qo_heads, head_dim]. k: [num_tokens, topk, head_dim], whose first `vo_head_dim` elements are the
    values. seen: [num_tokens, topk], bool. Returns as `reference_attention` does.
    """
    k = k.double().masked_fill(~seen[..., None], 0.0)
    scores = _capped(spec, torch.einsum("qhd,qkd->hqk", q.double(), k))
    weights, lse = _softmax(scores, seen, sinks)
    return torch.einsum("hqk,qkd->qhd", weights, k[..., : spec.vo_head_dim]), lse.T


def _capped(spec: AttentionSpec, products: torch.Tensor) -> torch.Tensor:
    scores = products * spec.scale
    return scores if spec.logits_soft_cap is None else spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)


def _softmax(scores: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [num_qo_heads, num_queries, num_keys] and LSE [num_qo_heads, num_queries] of scores of that shape."""
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None])
    return torch.exp(scores - torch.where(total.isneginf(), 0.0, total)[..., None]), lse

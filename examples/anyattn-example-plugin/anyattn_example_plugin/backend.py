"""Attention for the example device: every step's pages gathered at once, with operations that a graph can replay."""

from anyattn import AttentionBackend, Capabilities, GraphLevel
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, IntSet

torch = lazy_import("torch")


class ExampleBackend(AttentionBackend):
    """One row of keys for each token, as long as the longest sequence: simple, and wasteful with memory."""

    capabilities = Capabilities(
        device_kinds=frozenset({"example"}),
        packages=("torch>=2.9",),
        dtypes=frozenset({"float32"}),
        head_dims=IntSet(maximum=256),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        sliding_window=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
        priority=30,
        emulated_on=frozenset({"example"}),
    )

    def plan(self, batch):
        return batch

    def init_graph(self, batch):
        return batch

    def refresh_graph(self, plan, batch):
        """Nothing: `run` reads only the batch's tensors, which hold the new step already."""

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        token = torch.arange(plan.num_tokens, device=q.device)
        seq = torch.searchsorted(plan.qo_indptr[1:], token.int(), right=True).clamp(max=plan.num_seqs - 1)
        k, v = (part[plan.block_table].flatten(1, 2)[seq] for part in (kv.k, kv.v))  # [num_tokens, keys, heads, dim]
        key = torch.arange(k.shape[1], device=q.device)
        position = ((plan.kv_lens - plan.qo_indptr[1:])[seq] + token)[:, None]  # aligned bottom-right
        seen = key <= position
        if self.spec.sliding_window is not None:
            seen &= key > position - self.spec.sliding_window
        v = v.masked_fill(~seen[:, :, None, None], 0.0)  # what is not seen may be NaN, and 0 * NaN is NaN
        grouped = q.unflatten(1, (self.spec.num_kv_heads, self.spec.group_size))
        scores = torch.einsum("thgd,tkhd->thgk", grouped, k) * self.spec.scale
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
        out.copy_(torch.einsum("thgk,tkhd->thgd", weights, v).flatten(1, 2))
        return lse.flatten(1, 2) if self.spec.return_lse else None

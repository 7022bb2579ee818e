"""Attention over paged keys and values with torch's operators, for the CPU and for the plugin's own device."""

# A frozen copy of a plugin as it was written against contract version 1. It is never edited: should it stop working,
# the contract has broken plugins that are out there, and its version has to be raised.

from anyattn import AttentionBackend, Capabilities, GraphLevel
from anyattn.lazy import lazy_import
from anyattn.types import IntSet, ints

torch = lazy_import("torch")


def priority(platform, spec, role, load):
    return 70 if role == "decode" and load.num_seqs < 16 else 60


class FrozenBackend(AttentionBackend):
    capabilities = Capabilities(
        device_kinds=frozenset({"cpu", "frozen"}),
        packages=("torch>=2.9",),
        dtypes=frozenset({"float32", "bfloat16"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        per_head_scales=True,
        head_dims=IntSet(maximum=256, multiple_of=8),
        head_dim_pairs=frozenset({(192, 128)}),
        group_sizes=IntSet(maximum=16),
        page_sizes=ints(8, 16, 32),
        preferred_page_size=16,
        layouts=("HND", "NHD"),
        phases=frozenset({"prefill", "decode", "mixed"}),
        sliding_window=True,
        logits_soft_cap=True,
        lse=True,
        graph=GraphLevel.ALWAYS,
        priority=priority,
        emulated_on=frozenset({"frozen1"}),
    )

    def __init__(self, spec, cache, platform):
        super().__init__(spec, cache, platform)
        self.seq_axis = 1 if cache.layout == "NHD" else 2

    def plan(self, batch):
        assert len(batch.host.kv_lens) == batch.num_seqs
        return batch

    def init_graph(self, batch):
        return batch

    def refresh_graph(self, plan, batch):
        """`run` reads the batch's tensors only, and they hold the new step."""

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        spec = self.spec
        token = torch.arange(plan.num_tokens, device=q.device)
        seq = torch.searchsorted(plan.qo_indptr[1:], token.int(), right=True).clamp(max=plan.num_seqs - 1)
        k = self.gathered(kv.k, kv.k_scale, plan)
        v = self.gathered(kv.v, kv.v_scale, plan)
        key = torch.arange(k.shape[1], device=q.device)
        filled = key < plan.kv_lens[:, None]
        k, v = (part.masked_fill(~filled[:, :, None, None], 0.0)[seq] for part in (k, v))
        position = (plan.kv_lens - plan.qo_indptr[1:])[seq] + token
        seen = key <= position[:, None]
        if spec.sliding_window is not None:
            seen &= key > position[:, None] - spec.sliding_window
            behind = ~seen[:, :, None, None]
            k, v = (part.masked_fill(behind, 0.0) for part in (k, v))
        grouped = q.float().unflatten(1, (spec.num_kv_heads, spec.group_size))
        scores = torch.einsum("thgd,tkhd->thgk", grouped, k) * spec.scale
        if spec.logits_soft_cap is not None:
            scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None])
        out.copy_(torch.einsum("thgk,tkhd->thgd", weights, v).flatten(1, 2))
        return lse.flatten(1, 2) if spec.return_lse else None

    def gathered(self, pages, scale, plan):
        """Every sequence's keys or values: [num_seqs, max_kv_len, num_kv_heads, dim], float32."""
        rows = pages[plan.block_table]
        if self.seq_axis == 2:
            rows = rows.transpose(2, 3)
        if isinstance(scale, torch.Tensor):
            scale = scale.view(-1, 1)
        return rows.flatten(1, 2).float() * scale

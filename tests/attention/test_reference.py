"""The oracle against the definition, element by element in plain Python."""

import math

import pytest
import torch

from anyattn import AttentionSpec
from anyattn.attention.reference import reference_attention

BASE = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 3, "dtype": "float64"}


def by_definition(spec, q, k, v, tree_mask, sinks, slopes):
    """[num_queries, num_qo_heads, vo_head_dim] and [num_queries, num_qo_heads], in Python floats."""
    prefix = len(k) - len(q)
    outs, lses = [], []
    for i, query in enumerate(q.tolist()):
        position = prefix + i
        row_out, row_lse = [], []
        for head, q_head in enumerate(query):
            scores = {}
            for j in range(len(k)):
                if spec.causal and j > position and tree_mask is None:
                    continue
                if spec.sliding_window and j <= position - spec.sliding_window:
                    continue
                if tree_mask is not None and j >= prefix and not tree_mask[i][j - prefix]:
                    continue
                score = spec.scale * sum(a * b for a, b in zip(q_head, k[j][head // 2].tolist(), strict=True))
                if spec.logits_soft_cap:
                    score = spec.logits_soft_cap * math.tanh(score / spec.logits_soft_cap)
                if slopes is not None:
                    score += slopes[head].item() * (j - position)
                scores[j] = score
            total = sum(map(math.exp, scores.values()))
            row_lse.append(math.log(total) if total else -math.inf)
            if sinks is not None:
                total += math.exp(sinks[head].item())
            row_out.append(
                [sum(math.exp(s) / total * v[j][head // 2][d].item() for j, s in scores.items()) for d in range(5)]
            )
        outs.append(row_out)
        lses.append(row_lse)
    return torch.tensor(outs, dtype=torch.float64), torch.tensor(lses, dtype=torch.float64)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": False},
        {"sliding_window": 1},
        {"sliding_window": 3},
        {"logits_soft_cap": 0.7},
        {"sinks": True},
        {"alibi": True},
        {"tree_mask": True},
        {"sinks": True, "alibi": True, "logits_soft_cap": 2.0, "sliding_window": 4, "sm_scale": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 7), (5, 5), (4, 9)])
def test_the_oracle_is_the_definition(fields, num_queries, num_keys):
    spec = AttentionSpec(**BASE, v_head_dim=5, **fields)
    q, k, v = (torch.randn(n, h, d, dtype=torch.float64) for n, h, d in
               [(num_queries, 4, 3), (num_keys, 2, 3), (num_keys, 2, 5)])  # fmt: skip
    mask = torch.rand(num_queries, num_queries) < 0.5 if spec.tree_mask else None
    sinks = torch.randn(4) if spec.sinks else None
    slopes = torch.rand(4) if spec.alibi else None
    out, lse = reference_attention(spec, q, k, v, tree_mask=mask, sinks=sinks, alibi_slopes=slopes)
    wanted = by_definition(spec, q, k, v, mask, sinks, slopes)
    assert torch.allclose(out, wanted[0], atol=1e-12)
    assert torch.allclose(lse, wanted[1], atol=1e-12)


def test_long_batches_of_queries_are_computed_in_blocks_with_the_same_result(monkeypatch):
    spec = AttentionSpec(**BASE, alibi=True)
    q, k, v = torch.randn(9, 4, 3), torch.randn(12, 2, 3), torch.randn(12, 2, 3)
    slopes = torch.rand(4)
    whole = reference_attention(spec, q, k, v, alibi_slopes=slopes)
    monkeypatch.setattr("anyattn.attention.reference._SCORE_ELEMENTS", 4 * 12 * 2)
    blocks = reference_attention(spec, q, k, v, alibi_slopes=slopes)
    assert torch.allclose(whole[0], blocks[0], atol=1e-14)
    assert torch.allclose(whole[1], blocks[1], atol=1e-14)


@pytest.mark.parametrize("num_queries", [1, 4])
def test_keys_and_values_that_no_query_sees_may_be_nan(num_queries, monkeypatch):
    monkeypatch.setattr("anyattn.attention.reference._SCORE_ELEMENTS", 1)  # a block for each query, to see the least
    spec = AttentionSpec(**BASE, sliding_window=3)
    q, k, v = torch.randn(num_queries, 4, 3), torch.randn(12, 2, 3), torch.randn(12, 2, 3)
    wanted = reference_attention(spec, q, k, v)
    unseen = 12 - num_queries + 1 - 3
    k[:unseen], v[:unseen] = float("nan"), float("inf")
    out, lse = reference_attention(spec, q, k, v)
    assert torch.equal(out, wanted[0])
    assert torch.equal(lse, wanted[1])

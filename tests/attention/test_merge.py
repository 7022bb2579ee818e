"""Merging by LSE equals attention over the union."""

import pytest
import torch

from anyattn import AttentionSpec, merge_states
from anyattn.attention.reference import reference_attention

SPEC = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=8, dtype="float64", causal=False)


def test_parts_merge_to_the_whole():
    q, k, v = torch.randn(3, 4, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    whole = reference_attention(SPEC, q, k, v)
    parts = [reference_attention(SPEC, q, k[part], v[part]) for part in (slice(7), slice(7, 8), slice(8, 50))]
    out, lse = merge_states([p[0] for p in parts], [p[1] for p in parts])
    assert torch.allclose(out, whole[0], atol=1e-12)
    assert torch.allclose(lse, whole[1], atol=1e-12)


def test_an_empty_part_changes_nothing_even_if_its_output_is_nan():
    out, lse = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    empty = torch.full_like(out, float("nan")), torch.full_like(lse, float("-inf"))
    for order in ([(out, lse), empty], [empty, (out, lse)]):
        merged, merged_lse = merge_states([p[0] for p in order], [p[1] for p in order])
        assert torch.equal(merged, out)
        assert torch.allclose(merged_lse, lse)


def test_a_row_that_sees_nothing_anywhere_is_zero_and_minus_infinity():
    out, lse = torch.full((2, 4, 8), float("nan")), torch.full((2, 4), float("-inf"))
    merged, merged_lse = merge_states([out, out], [lse, lse])
    assert not merged.any()
    assert merged_lse.isneginf().all()


@pytest.mark.parametrize("shift", [-500.0, 500.0])
def test_large_lse_do_not_overflow(shift):
    out = torch.randn(2, 3, 4, 8)
    lse = torch.randn(2, 3, 4) + shift
    merged, merged_lse = merge_states(list(out), list(lse))
    assert merged.isfinite().all()
    assert torch.allclose(merged_lse, torch.logsumexp(lse, 0))


def test_the_output_keeps_the_parts_dtype():
    out = torch.randn(2, 3, 4, 8).bfloat16()
    assert merge_states(list(out), list(torch.randn(2, 3, 4)))[0].dtype == torch.bfloat16

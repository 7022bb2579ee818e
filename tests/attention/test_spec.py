"""What a spec accepts, fills in and refuses."""

import pytest
import torch

from anyattn import AttentionSpec, GraphLevel, SpecError

GQA = {"num_qo_heads": 8, "num_kv_heads": 2, "head_dim": 64}
MLA = {"num_qo_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "sm_scale": 0.1}


def test_defaults_are_filled_in():
    spec = AttentionSpec(**GQA)
    assert (spec.vo_head_dim, spec.group_size, spec.storage_dtype, spec.scale) == (64, 4, "bfloat16", 0.125)
    assert AttentionSpec(**GQA, v_head_dim=32).vo_head_dim == 32
    assert AttentionSpec(**GQA, sm_scale=0.5).scale == 0.5
    assert AttentionSpec(**GQA, kv_dtype="float8_e5m2").storage_dtype == "float8_e5m2"


def test_torch_dtypes_and_their_names_mean_the_same():
    named = AttentionSpec(**GQA, dtype="float16", kv_dtype="float8_e4m3fn")
    assert AttentionSpec(**GQA, dtype=torch.float16, kv_dtype=torch.float8_e4m3fn) == named


def test_a_kv_dtype_equal_to_the_dtype_is_the_default_so_that_equal_specs_compare_equal():
    assert AttentionSpec(**GQA, kv_dtype="bfloat16") == AttentionSpec(**GQA)


def test_mla_is_one_kv_head_of_rank_plus_rope_whose_values_are_the_latents():
    spec = AttentionSpec.mla(**MLA)
    assert (spec.is_mla, spec.num_kv_heads, spec.head_dim, spec.vo_head_dim) == (True, 1, 576, 512)
    bound = AttentionSpec.mla(**MLA, qk_nope_head_dim=128, v_head_dim=128)
    assert bound.vo_head_dim == 512
    assert bound.cache_spec(num_layers=1, page_size=64, layout="NHD").bytes_per_token == 576 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_qo_heads": 7}, "multiple of num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads must be a positive integer"),
        ({"head_dim": -1}, "head_dim must be a positive integer"),
        ({"head_dim": 64.0}, "head_dim must be a positive integer"),
        ({"v_head_dim": True}, "v_head_dim must be a positive integer"),
        ({"sliding_window": 0}, "sliding_window must be a positive integer"),
        ({"dtype": "float8_e4m3fn"}, "dtype must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"kv_dtype": "int4"}, "kv_dtype must be one of"),
        ({"sm_scale": float("nan")}, "sm_scale must be a number"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap must be a number"),
        ({"causal": False, "sliding_window": 4}, "sliding_window needs causal=True"),
        ({"causal": False, "tree_mask": True}, "tree_mask needs causal=True"),
        ({"tree_mask": True, "sliding_window": 4}, "tree_mask cannot be joined"),
        ({"tree_mask": True, "alibi": True}, "tree_mask cannot be joined"),
        ({"sm_scale": "a"}, "sm_scale must be a number"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap must be a number"),
        ({"sinks": "yes"}, "sinks must be True or False"),
        ({"causal": 0}, "causal must be True or False"),
        ({"sliding_window": 2**31}, "sliding_window must be less than"),
        ({"graph": "sometimes"}, "graph must be one of never"),
        ({"qk_rope_head_dim": 64}, "belong to MLA"),
        ({"kv_lora_rank": 512}, "MLA has one KV head"),
        ({"kv_scale_per_head": True}, "kv_scale_per_head needs a kv_dtype of float8_e4m3fn or float8_e4m3fnuz"),
        ({"kv_scale_per_head": True, "kv_dtype": "float16"}, "kv_scale_per_head needs a kv_dtype"),
        ({"kv_scale_per_head": 1, "kv_dtype": "float8_e5m2"}, "kv_scale_per_head must be True or False"),
        ({"topk": 64, "kv_dtype": "float8_e4m3fn"}, "topk needs MLA"),
        ({"topk": 0}, "topk must be a positive integer"),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        AttentionSpec(**{**GQA, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head_dim": 192}, "head_dim must be kv_lora_rank"),
        ({"qk_nope_head_dim": 128}, "must be given together"),
        ({"v_head_dim": 128}, "must be given together"),
        ({"num_kv_heads": 2, "num_qo_heads": 16}, "MLA has one KV head"),
        ({"kv_dtype": "float8_e4m3fn", "kv_scale_per_head": True}, "not for MLA"),
        ({"topk": 64}, "topk needs kv_dtype='float8_e4m3fn'"),
    ],
)
def test_an_mla_spec_that_contradicts_itself_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        AttentionSpec.mla(**MLA).replace(**fields)


def test_a_spec_prints_what_is_not_default_and_goes_to_json():
    spec = AttentionSpec(**GQA, sliding_window=128, graph=GraphLevel.DECODE)
    assert str(spec) == "8/2 heads of 64, bfloat16, sliding_window=128, graph=decode"
    assert spec.to_json()["graph"] == "decode"
    assert AttentionSpec(**GQA, graph="decode") == AttentionSpec(**GQA, graph=GraphLevel.DECODE)


@pytest.mark.parametrize(
    ("spec", "kind"), [(AttentionSpec(**GQA, v_head_dim=32), "mha"), (AttentionSpec.mla(**MLA), "mla")], ids=str
)
def test_the_cache_of_layers_is_described_as_the_pools_take_it(spec, kind):
    cache = spec.cache_spec(num_layers=3, page_size=16, layout="HND")
    assert (cache.kind, cache.layout, cache.page_size, cache.num_layers) == (kind, "HND", 16, 3)
    assert (cache.head_dim, cache.v_head_dim, cache.joined_layers) == (spec.head_dim, spec.vo_head_dim, False)
    assert spec.cache_spec(num_layers=3, page_size=16, layout="HND", joined_layers=True).joined_layers


def test_a_layout_whose_pieces_do_not_fit_the_layers_is_refused():
    with pytest.raises(SpecError, match="layout NZ"):
        AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=72).cache_spec(num_layers=1, page_size=16, layout="NZ")

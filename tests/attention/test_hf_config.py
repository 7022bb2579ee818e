"""Specs read from a Hugging Face config: what each family's fields mean, what is refused, and what models really do."""

import copy
import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anyattn import AttentionSpec
from anyattn.attention.hf_families import FAMILIES
from anyattn.attention.presets import PRESETS
from anyattn.errors import SpecError

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
BASE = {**SIZES, "num_key_value_heads": 4}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MIXED = ["sliding_attention", "full_attention"] * 2


def read(model_type="llama", tp=1, **fields):
    return AttentionSpec.from_hf_config({"model_type": model_type, **BASE, **fields}, tp)


def windows(*arguments, **fields):
    return [spec.sliding_window for spec in read(*arguments, **fields)]


def refused(match, model_type="llama", tp=1, **fields):
    with pytest.raises(SpecError, match=match):
        read(model_type, tp, **fields)


# --- what the fields mean


def test_there_is_a_spec_for_each_layer_and_equal_layers_share_one():
    specs = read(num_key_value_heads=2)
    assert specs == (AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16),) * 4
    assert len({id(spec) for spec in specs}) == 1


def test_head_dim_follows_from_the_hidden_size_unless_it_is_given():
    assert read()[0].head_dim == read(head_dim=None)[0].head_dim == 16
    assert read(head_dim=128)[0].head_dim == 128
    refused("hidden_size 66 is no multiple of 4 heads", hidden_size=66)


def test_a_mistral_window_is_in_every_layer_and_null_is_none():
    assert windows("mistral", sliding_window=6) == [6] * 4
    assert windows("mistral", sliding_window=None) == [None] * 4
    assert windows("mistral") == [4096] * 4  # the class default
    assert windows("mixtral") == windows("phi3") == [None] * 4
    assert windows("phi3", sliding_window=2047) == [2047] * 4


def test_qwen_windows_need_use_sliding_window_and_start_at_max_window_layers():
    on = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}
    assert windows("qwen2", **on) == windows("qwen3", **on) == [None, None, None, 6]
    assert windows("qwen2_moe", **on) == [6, None, 6, None]
    assert windows("qwen3_moe", **on) == [6] * 4
    for name in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe"):
        assert windows(name, **{**on, "use_sliding_window": False}) == [None] * 4
        assert windows(name, sliding_window=0) == [None] * 4  # as transformers writes it when it is off


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "new"])
def test_layer_types_decide_over_the_family_s_rule(name):
    fields = {"layer_types": MIXED[::-1], "sliding_window": 6, "use_sliding_window": True}
    assert windows(name, **fields) == [None, 6, None, 6]


def test_gemma2_caps_its_scores_scales_by_a_field_and_alternates():
    local, wide, *_ = read("gemma2", num_key_value_heads=2, query_pre_attn_scalar=144, sliding_window=6)
    assert (local.sliding_window, wide.sliding_window) == (6, None)
    assert local.logits_soft_cap == 50.0
    assert local.scale == 1 / 12
    assert local.head_dim == 256  # the class default, not 64 / 4
    assert read("gemma2", attn_logit_softcapping=None)[0].logits_soft_cap is None


def test_every_nth_layer_of_gemma3_is_global():
    assert windows("gemma3_text", num_hidden_layers=7, sliding_window=6) == [6, 6, 6, 6, 6, None, 6]
    assert windows("gemma3_text", sliding_window=6, sliding_window_pattern=2) == [6, None, 6, None]


def test_gpt_oss_has_sinks_and_a_window_of_128_in_every_other_layer():
    specs = read("gpt_oss", num_key_value_heads=2)
    assert [spec.sliding_window for spec in specs] == [128, None, 128, None]
    assert all(spec.sinks for spec in specs)
    assert specs[0].head_dim == 64


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_k2", "some_other_mla"])
def test_mla_layers_hold_latents_and_scale_with_yarn_s_correction(name, key):
    kind = {"rope_scaling": "type", "rope_parameters": "rope_type"}[key]
    yarn = {kind: "yarn", "factor": 40, "mscale_all_dim": 0.707, "mscale": 1.0}
    spec = read(name, num_key_value_heads=4, **LATENT, **{key: yarn})[0]
    assert (spec.num_qo_heads, spec.num_kv_heads, spec.head_dim, spec.vo_head_dim) == (4, 1, 40, 32)
    assert (spec.qk_nope_head_dim, spec.v_head_dim) == (16, 12)
    assert math.isclose(spec.scale, 24**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert read(name, **LATENT)[0].scale == 24**-0.5
    assert read(name, **LATENT, **{key: {**yarn, "mscale_all_dim": 0}})[0].scale == 24**-0.5
    assert read(name, **LATENT, **{key: {**yarn, "factor": 1}})[0].scale == 24**-0.5


def test_deepseek_without_mla_attends_as_others_do():
    nothing = dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 0)
    spec = read("deepseek_v2", use_mla=False, kv_lora_rank=None, num_key_value_heads=2, **nothing)[0]
    assert spec == AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16)


@pytest.mark.parametrize(
    ("fields", "kv_heads"),
    [
        ({}, 1),  # multi_query is the class default
        ({"multi_query": True, "num_kv_heads": 4}, 1),
        ({"multi_query": False}, 4),
        ({"new_decoder_architecture": True, "multi_query": True, "num_kv_heads": 2}, 2),
        ({"new_decoder_architecture": True, "num_kv_heads": None}, 4),
    ],
)
def test_falcon_counts_kv_heads_by_its_architecture(fields, kv_heads):
    assert read("falcon", **fields)[0].num_kv_heads == kv_heads
    assert [read("falcon", alibi=flag)[0].alibi for flag in (True, False, None)] == [True, False, False]


def test_mpt_has_names_of_its_own_and_a_section_for_attention():
    def mpt(**attention):
        config = {"model_type": "mpt", "n_layers": 2, "d_model": 64, "n_heads": 4, "attn_config": attention}
        return AttentionSpec.from_hf_config(config)[0]

    assert mpt(alibi=True) == mpt() == AttentionSpec(num_qo_heads=4, num_kv_heads=4, head_dim=16, alibi=True)
    assert not mpt(alibi=False).alibi
    assert mpt(softmax_scale=0.5).scale == 0.5
    assert mpt(attn_type="multiquery_attention").num_kv_heads == 1
    assert mpt(attn_type="grouped_query_attention", kv_n_heads=2).num_kv_heads == 2
    for wrong in ({"attn_type": "x"}, {"attn_type": "grouped_query_attention"}, {"prefix_lm": True}, {"alibi": 1}):
        with pytest.raises(SpecError, match=rf"attn_config\.({'|'.join([*wrong, 'kv_n_heads'])})"):
            mpt(**wrong)


def test_bloom_has_alibi_though_no_field_says_so():
    config = {"model_type": "bloom", "n_layer": 2, "hidden_size": 64, "n_head": 4}
    assert AttentionSpec.from_hf_config(config)[0].alibi


def test_an_unknown_type_is_read_by_the_usual_fields():
    spec = read("new", num_key_value_heads=2, attn_logit_softcapping=30, query_pre_attn_scalar=25, alibi=True)[0]
    assert spec == AttentionSpec(
        num_qo_heads=4, num_kv_heads=2, head_dim=16, logits_soft_cap=30, sm_scale=0.2, alibi=True
    )
    assert AttentionSpec.from_hf_config({"n_head": 4, "n_embd": 64, "n_layer": 2})[0].head_dim == 16
    assert read("new", attention_multiplier=0.25)[0].scale == 0.25
    assert AttentionSpec.from_hf_config({**SIZES, "multi_query": True})[0].num_kv_heads == 1
    assert AttentionSpec.from_hf_config({**SIZES, "num_key_value_heads": None})[0].num_kv_heads == 4


@pytest.mark.parametrize("section", ["text_config", "llm_config", "language_config"])
def test_the_language_model_of_a_multimodal_config_is_read_with_its_class_defaults(section):
    inner = {"model_type": "gemma3_text", "num_hidden_layers": 12, "hidden_size": 640}
    config = {"model_type": "vlm", "torch_dtype": "float16", section: inner, "vision_config": {"sliding_window": 3}}
    specs = AttentionSpec.from_hf_config(config)
    assert [spec.sliding_window for spec in specs] == ([4096] * 5 + [None]) * 2
    assert specs[0] == AttentionSpec(
        num_qo_heads=8, num_kv_heads=4, head_dim=256, dtype="float16", sm_scale=1 / 16, sliding_window=4096
    )
    nested = AttentionSpec.from_hf_config({"model_type": "omni", "text_config": config})
    assert nested == specs
    assert AttentionSpec.from_hf_config({"model_type": "gemma3", section: {"num_hidden_layers": 12}})[5].scale == 1 / 16


def test_the_dtype_is_the_argument_s_then_the_config_s_then_bfloat16():
    assert read()[0].dtype == "bfloat16"
    assert read(torch_dtype="float16")[0].dtype == read(torch_dtype="torch.float16")[0].dtype == "float16"
    assert read(dtype="float32", torch_dtype="float16")[0].dtype == "float32"
    assert read(torch_dtype=None)[0].dtype == "bfloat16"
    config = {**BASE, "torch_dtype": "float16"}
    spec = AttentionSpec.from_hf_config(config, dtype="bfloat16", kv_dtype="float8_e4m3fn")[0]
    assert (spec.dtype, spec.kv_dtype) == ("bfloat16", "float8_e4m3fn")
    fp8 = {"quant_method": "fp8", "fmt": "e4m3"}
    assert read(torch_dtype="bfloat16", quantization_config=fp8)[0].storage_dtype == "bfloat16"
    refused("dtype must be one of", torch_dtype="int8")
    refused("dtype must be one of", torch_dtype=16)


# --- what is refused


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"num_attention_heads": "4"}, "num_attention_heads must be an integer from 1 to 1048576, not '4'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": True}, "num_attention_heads must be an integer"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_attention_heads": [4, 4, 2, 2]}, "num_attention_heads must be an integer"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be an integer"),
        ({"num_key_value_heads": 3}, "num_qo_heads must be a multiple of num_kv_heads"),
        ({"head_dim": 16.0}, "head_dim must be an integer"),
        ({"sliding_window": 4096}, "nothing says which layers have it"),
        ({"layer_types": MIXED}, "layer 0 has sliding attention, and sliding_window is missing"),
        ({"layer_types": MIXED[:3]}, "layer_types has 3 entries for 4 layers"),
        ({"layer_types": "full_attention"}, "layer_types must be a list of strings"),
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping must be a positive number or null"),
        ({"attn_logit_softcapping": math.nan}, "attn_logit_softcapping must be a positive number"),
        ({"alibi": "yes"}, "alibi must be true or false"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size=8192 may change what attention computes"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ({"is_causal": False}, "is_causal=False"),
        ({"index_topk": 2048}, "index_topk=2048"),
        ({"num_kv_shared_layers": 10}, "num_kv_shared_layers=10"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"text_config": []}, "text_config must be an object"),
        ({"model_type": 3}, "model_type must be a string"),
    ],
)
def test_a_config_that_cannot_be_read_with_certainty_is_refused(fields, match):
    for model_type in ("llama", "new"):
        refused(match, **{"model_type": model_type, **fields})


def test_a_layer_that_keeps_no_kv_cache_is_named_with_its_layers():
    types = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    refused(r"layer type 'linear_attention' \(layers 0, 1, 2\)", "qwen3_next", layer_types=types)
    refused(r"layer type 'chunked_attention' \(layers 3\)", layer_types=["full_attention"] * 3 + ["chunked_attention"])
    refused(r"\(layers 0, 1, 2, 3, 4, 5, 6, 7 and 12 more\)", num_hidden_layers=20, layer_types=["mamba"] * 20)


@pytest.mark.parametrize("name", ["llama4", "llama4_text", "baichuan", "longcat_flash", "diffllama"])
def test_types_whose_attention_is_only_in_their_code_are_refused(name):
    refused("does not say what its attention is", name)


def test_an_encoder_is_refused():
    refused("looks like an encoder", "bert", attention_probs_dropout_prob=0.1)
    refused("looks like an encoder", "new_bert", architectures=["NewBertForMaskedLM"])


@pytest.mark.parametrize("field", ["my_softcap", "attn_window", "local_layers", "swa_num_heads", "mamba_heads"])
def test_a_field_of_an_unknown_type_that_sounds_like_attention_is_refused(field):
    refused(f"{field}=4 may change", "new", **{field: 4})
    assert read("new", **{field: None}) == read("new", **{field: False}) == read("new")
    assert read("new", attention_dropout=0.1, num_local_experts=8, attention_bias=True) == read("new")
    off = {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2}
    assert read("new", **off, attn_implementation="eager", _flash_attn_2_enabled=True) == read("new")
    assert read("llama", _flash_attn_2_enabled=True) == read("llama")


@pytest.mark.parametrize(
    ("model_type", "field"),
    [
        ("qwen2", "dual_chunk_attention_config"),  # Qwen2.5-1M
        ("llama", "sparse_attention_config"),
        ("llama", "attn_window"),
        ("deepseek_v3", "index_topk"),
    ],
)
def test_so_is_one_that_a_known_type_has_beyond_what_is_known_of_it(model_type, field):
    refused(f"{field}={{'size': 4}} may change", model_type, **{field: {"size": 4}})


def test_a_window_that_is_switched_off_and_used_is_refused():
    fields = {"use_sliding_window": False, "sliding_window": 6, "layer_types": MIXED}
    refused(r"sliding_window is missing \(use_sliding_window is false\)", "qwen2", **fields)


def test_what_is_missing_is_named_with_the_model_type_and_only_nested_configs_get_default_sizes():
    with pytest.raises(SpecError, match=r"model_type 'llama': num_attention_heads is missing"):
        AttentionSpec.from_hf_config({"model_type": "llama", "num_hidden_layers": 2})
    with pytest.raises(SpecError, match=r"model_type 'new': num_hidden_layers is missing \(or, as other models"):
        AttentionSpec.from_hf_config({"model_type": "new", "num_attention_heads": 2, "hidden_size": 8})
    nested = {"model_type": "vlm", "text_config": {**SIZES, "model_type": "new"}}
    with pytest.raises(SpecError, match="num_key_value_heads is missing"):  # might be a default of a class not known
        AttentionSpec.from_hf_config(nested)
    nested["text_config"]["num_key_value_heads"] = 2
    assert AttentionSpec.from_hf_config(nested) == read("new", num_key_value_heads=2)
    with pytest.raises(SpecError, match="qk_nope_head_dim is missing"):
        read("new", kv_lora_rank=32)


def test_a_path_is_a_config_json_or_its_folder(tmp_path):
    config = {"model_type": "llama", **BASE}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    expected = AttentionSpec.from_hf_config(config)
    for given_path in (path, tmp_path, str(path), str(tmp_path)):
        assert AttentionSpec.from_hf_config(given_path) == expected
    with pytest.raises(SpecError, match=r"config\.json: tp must be"):
        AttentionSpec.from_hf_config(path, tp=0)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"{", "cannot be read as JSON"),
        (b"\xff\xfe", "cannot be read as JSON"),
        (b"[1]", "holds a list, where a model's config.json holds an object"),
        (b'{"num_attention_heads": 1' + b"0" * 5000 + b"}", "cannot be read as JSON"),
        (b'{"a": ' * 100_000, "cannot be read as JSON"),
    ],
)
def test_a_file_that_holds_no_config_is_refused(tmp_path, content, match):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=match):
        AttentionSpec.from_hf_config(path)


def test_what_is_no_path_and_no_dict_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"config\.json does not exist.*nothing is downloaded"):
        AttentionSpec.from_hf_config(tmp_path)
    with pytest.raises(SpecError, match="org/model does not exist"):
        AttentionSpec.from_hf_config("org/model")
    for wrong in (None, 3, b"config.json", [BASE], "a\0b"):
        with pytest.raises(SpecError, match=r"config\.json"):
            AttentionSpec.from_hf_config(wrong)


# --- tensor parallelism


@pytest.mark.parametrize("tp", [0, -1, True, 2.0, "2", None, pytest.param(10**5000, id="huge")])
def test_tp_is_a_positive_integer(tp):
    with pytest.raises(SpecError, match="tp"):
        read(tp=tp)


def test_kv_heads_are_divided_and_shared_when_there_are_more_devices():
    shapes = [read(tp=tp, num_attention_heads=8, num_key_value_heads=2)[0] for tp in (1, 2, 4, 8)]
    assert [(s.num_qo_heads, s.num_kv_heads) for s in shapes] == [(8, 2), (4, 1), (2, 1), (1, 1)]
    latent = read("deepseek_v3", 4, **LATENT)[0]
    assert (latent.num_qo_heads, latent.num_kv_heads, latent.head_dim) == (1, 1, 40)


@settings(max_examples=200, deadline=None)
@given(kv_heads=st.integers(1, 12), group=st.integers(1, 12), tp=st.integers(1, 150))
def test_every_tp_gives_equal_parts_or_the_degrees_that_would(kv_heads, group, tp):
    heads = kv_heads * group
    # A device's query heads must read whole KV heads, or all of them the same one.
    fit = [d for d in range(1, heads + 1) if heads % d == 0 and (kv_heads % d == 0 or group % (heads // d) == 0)]
    config = {**BASE, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 8}
    if tp in fit:
        spec = AttentionSpec.from_hf_config(config, tp)[0]
        assert spec.num_qo_heads * tp == heads
        assert spec.num_kv_heads == max(1, kv_heads // tp)
    else:
        with pytest.raises(SpecError, match=rf"Degrees that work: {', '.join(map(str, fit))}\.$"):
            AttentionSpec.from_hf_config(config, tp)


# --- whatever else a config holds

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.sampled_from([10**30, -(10**30), 1e308, 5e-324])
    | st.floats() | st.text(max_size=8) | st.sampled_from(["bfloat16", "sliding_attention", "full_attention", "yarn"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SEEDS = [*PRESETS.values(), *({"model_type": name, **BASE, "layer_types": MIXED} for name in FAMILIES)]
NAMES = sorted(
    {key for seed in SEEDS for key in seed} | {"text_config", "dtype", "rope_parameters", "is_encoder_decoder"}
    | {"sliding_window", "architectures", "alibi", "attn_logit_softcapping", "kv_lora_rank", "use_mla", "prefix_lm"}
)  # fmt: skip


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_mangled_config_gives_specs_or_a_spec_error(data):
    config = copy.deepcopy(data.draw(st.sampled_from(SEEDS)))
    target = config
    if data.draw(st.booleans()):
        target = next((config[key] for key in ("text_config", "attn_config", "rope_scaling") if key in config), config)
    for _ in range(data.draw(st.integers(0, 3))):
        if target and data.draw(st.booleans()):
            target.pop(data.draw(st.sampled_from(sorted(target))))
        else:
            target[data.draw(st.sampled_from(NAMES + sorted(target)))] = data.draw(JSON)
    tp = data.draw(st.sampled_from([1, 1, 1, 2]) | JSON)
    dtype = data.draw(st.none() | JSON)
    try:
        specs = AttentionSpec.from_hf_config(config, tp, dtype=dtype)
    except SpecError:
        return
    assert specs
    assert all(isinstance(spec, AttentionSpec) for spec in specs)


# --- what transformers' models do

TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOW = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7, "rope_theta": 1e4}
MODELS = {
    "llama": ("llama", {}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral-null": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {"sliding_window": 6, **EXPERTS}),
    "qwen2": ("qwen2", WINDOW),
    "qwen2-off": ("qwen2", {**WINDOW, "use_sliding_window": False}),
    "qwen2-types": ("qwen2", {**WINDOW, "layer_types": MIXED}),
    "qwen2_moe": ("qwen2_moe", {**WINDOW, **EXPERTS}),
    "qwen3": ("qwen3", {**WINDOW, "head_dim": 16}),
    "qwen3_moe": ("qwen3_moe", {**WINDOW, **EXPERTS}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 20}),
    "gemma2-no-cap": ("gemma2", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": None}),
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "num_hidden_layers": 7}),
    "gemma3_text-pattern": ("gemma3_text", {"head_dim": 16, "sliding_window": 6, "sliding_window_pattern": 3}),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "sliding_window": 6, **EXPERTS}),
    "phi3": ("phi3", {"sliding_window": 6}),
    "starcoder2": ("starcoder2", {"sliding_window": 6}),
    "granite": ("granite", {"attention_multiplier": 0.3}),
    "olmo3": ("olmo3", {"sliding_window": 6}),
    "cohere2": ("cohere2", {"sliding_window": 6}),
}


def config_of(name, **fields):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    return transformers.AutoConfig.for_model(name, **{**TINY, **fields})


def model_of(config):
    torch = pytest.importorskip("torch", reason="needs torch")
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype="float32").eval()


def both_ways(config, folder):
    """Read from the config's dict and from the file that transformers writes, which are to say the same."""
    config.save_pretrained(folder)
    from_dict = AttentionSpec.from_hf_config(config.to_dict(), dtype="float32")
    assert AttentionSpec.from_hf_config(folder, dtype="float32") == from_dict
    return from_dict


@pytest.mark.parametrize("case", MODELS)
def test_specs_are_what_the_model_asks_its_attention_function_for(case, tmp_path):
    name, fields = MODELS[case]
    config = config_of(name, **fields)
    model = model_of(config)
    from anyattn.integrations.transformers.probe import probe_layout

    asked = [spec.replace(sm_scale=spec.scale) for spec in probe_layout(model, cached=False).specs]
    assert [spec.replace(sm_scale=spec.scale) for spec in both_ways(config, tmp_path)] == asked


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_mla_specs_are_what_deepseek_s_modules_hold(name, tmp_path):
    config = config_of(
        name, n_routed_experts=8, n_group=2, topk_group=1, num_experts_per_tok=2, q_lora_rank=24,
        first_k_dense_replace=4, num_key_value_heads=4, rope_parameters=dict(YARN), **LATENT,
    )  # fmt: skip
    modules = [layer.self_attn for layer in model_of(config).model.layers]
    specs = both_ways(config, tmp_path)
    for spec, module in zip(specs, modules, strict=True):
        assert spec.scale == module.scaling != 24**-0.5
        assert (spec.num_qo_heads, spec.kv_lora_rank) == (module.num_heads, module.kv_lora_rank)
        assert (spec.qk_nope_head_dim, spec.qk_rope_head_dim) == (module.qk_nope_head_dim, module.qk_rope_head_dim)
        assert spec.v_head_dim == module.v_head_dim


@pytest.mark.parametrize(
    "fields",
    [
        {"multi_query": True},
        {"multi_query": False, "alibi": True},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ],
)
def test_falcon_specs_are_what_its_modules_hold(fields, tmp_path):
    config = config_of("falcon", **fields)
    model = model_of(config)
    for spec, block in zip(both_ways(config, tmp_path), model.transformer.h, strict=True):
        module = block.self_attention
        assert (spec.num_qo_heads, spec.num_kv_heads) == (module.num_heads, module.num_kv_heads)
        assert (spec.head_dim, spec.scale) == (module.head_dim, module.inv_norm_factor)
        assert spec.alibi == model.transformer.use_alibi


@pytest.mark.parametrize("scale", [None, 0.3])
def test_mpt_specs_are_what_its_modules_hold(scale, tmp_path):
    sizes = {"d_model": 64, "n_heads": 4, "n_layers": 2}
    config = config_of("mpt", **sizes, attn_config={"softmax_scale": scale})
    for spec, block in zip(both_ways(config, tmp_path), model_of(config).transformer.blocks, strict=True):
        assert (spec.num_qo_heads, spec.num_kv_heads) == (block.attn.n_heads, block.attn.n_heads)
        assert (spec.head_dim, spec.scale) == (block.attn.head_dim, block.attn.softmax_scale)
        assert spec.alibi


def test_a_multimodal_config_says_what_the_config_of_its_language_model_does(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.Gemma3Config(text_config={"num_hidden_layers": 12, "query_pre_attn_scalar": 168})
    specs = both_ways(config, tmp_path)
    assert specs == AttentionSpec.from_hf_config(config.text_config.to_dict(), dtype="float32")
    assert [spec.sliding_window for spec in specs] == ([4096] * 5 + [None]) * 2


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if len(family.defaults) > 1])
def test_defaults_are_those_of_transformers_classes(name):
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    others = {"kimi_k2": "deepseek_v3", "RefinedWeb": "falcon", "RefinedWebModel": "falcon"}
    named = others.get(name, name)  # transformers has no class of its own for it
    whole = transformers.AutoConfig.for_model(named).get_text_config().to_dict()
    assert AttentionSpec.from_hf_config({"text_config": {"model_type": name}}) == AttentionSpec.from_hf_config(whole)
    some = {key: value for key, value in whole.items() if key in (*SIZES, "d_model", "n_heads", "n_layers")}
    assert AttentionSpec.from_hf_config({**some, "model_type": name}) == AttentionSpec.from_hf_config(whole)


def test_a_window_counts_the_token_itself_as_transformers_does():
    torch = pytest.importorskip("torch", reason="needs torch")
    masks = pytest.importorskip("transformers.masking_utils", reason="needs transformers")
    sees = masks.sliding_window_causal_mask_function(3)
    keys = [key for key in range(14) if sees(None, None, torch.tensor(10), torch.tensor(key))]
    assert keys == [8, 9, 10]  # as a spec's sliding_window=3 has it: position p sees (p - 3, p]


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "Dream", "architectures": ["DreamModel"], "mask_token_id": 1},
        {"model_type": "llama_bidirec", "architectures": ["LlamaBidirectionalModel"]},
        {"model_type": "eurobert", "architectures": ["EuroBertModel"]},
        {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 16},
        {"model_type": "voxtral_encoder", "num_mel_bins": 128},
    ],
    ids=lambda config: config["model_type"],
)
def test_an_unknown_type_that_may_be_no_causal_language_model_is_refused(config):
    refused("may be no causal language model", **config)
    assert read("new", architectures=["NewForCausalLM"]) == read("new")


def test_published_configs_of_known_types_say_some_things_that_nothing_reads():
    assert read("bloom", offset_alibi=100)[0].alibi
    assert read("phi3", full_attn_mod=1, sliding_window=None) == read("phi3", sliding_window=None)
    twice = {"sliding_window": 4096, "head_dim": 256}
    assert read("gemma2", **twice, sliding_window_size=4096) == read("gemma2", **twice)
    refused("sliding_window_size=8 may change", "gemma2", **twice, sliding_window_size=8)
    assert read("RefinedWeb", parallel_attn=True, multi_query=True)[0].num_kv_heads == 1
    sizes = {"model_type": "bloom", "n_embed": 64, "n_layer": 2, "num_attention_heads": 4}
    assert AttentionSpec.from_hf_config(sizes)[0].head_dim == 16


def test_a_pattern_of_local_layers_is_read_for_unknown_types_too():
    windows = [spec.sliding_window for spec in read("cohere9", sliding_window=8, sliding_window_pattern=2)]
    assert windows == [8, None] * (len(windows) // 2)


@pytest.mark.parametrize("name", ["t5", "mt5"])
def test_scores_with_a_relative_bias_are_refused(name):
    refused("relative bias", name)

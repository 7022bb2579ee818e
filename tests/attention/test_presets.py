"""What each preset's layers are, written out by hand; and that every preset can be selected for."""

import json
import math
import subprocess
import sys

import pytest

from anyattn import AttentionSpec
from anyattn.attention.presets import PRESETS
from anyattn.errors import SpecError


def spec(heads, kv_heads, head_dim=128, **fields):
    return AttentionSpec(num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, **fields)


def latent(heads, mscale_all_dim, factor):
    """YaRN's correction of the scale, as DeepSeek-V2's modeling code has it."""
    mscale = 0.1 * mscale_all_dim * math.log(factor) + 1
    return AttentionSpec.mla(
        num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        sm_scale=192**-0.5 * mscale * mscale,
    )  # fmt: skip


GEMMA_WIDE = spec(32, 16, sm_scale=168**-0.5)
GEMMA_LOCAL = GEMMA_WIDE.replace(sliding_window=1024)
GPT_OSS_WIDE = spec(64, 8, 64, sinks=True)
GPT_OSS_LOCAL = GPT_OSS_WIDE.replace(sliding_window=128)

EXPECTED = {
    "llama-3-8b": [spec(32, 8)] * 32,
    "llama-3-70b": [spec(64, 8)] * 80,
    "qwen2-7b": [spec(28, 4)] * 28,
    "qwen3-32b": [spec(64, 8)] * 64,
    "mistral-7b": [spec(32, 8, sliding_window=4096)] * 32,
    "gemma-3-27b": ([GEMMA_LOCAL] * 5 + [GEMMA_WIDE]) * 10 + [GEMMA_LOCAL] * 2,
    "gpt-oss-20b": [GPT_OSS_LOCAL, GPT_OSS_WIDE] * 12,
    "deepseek-v2-lite": [latent(16, 0.707, 40)] * 27,
    "deepseek-v3": [latent(128, 1.0, 40)] * 61,
    "kimi-k2": [latent(64, 1.0, 64)] * 61,
    "falcon-7b": [spec(71, 1, 64)] * 32,
    "mpt-7b": [spec(32, 32, alibi=True)] * 32,
}
DEGREES = {
    "llama-3-8b": [1, 2, 4, 8, 16, 32],
    "llama-3-70b": [1, 2, 4, 8, 16, 32, 64],
    "qwen2-7b": [1, 2, 4, 28],
    "qwen3-32b": [1, 2, 4, 8, 16, 32, 64],
    "mistral-7b": [1, 2, 4, 8, 16, 32],
    "gemma-3-27b": [1, 2, 4, 8, 16, 32],
    "gpt-oss-20b": [1, 2, 4, 8, 16, 32, 64],
    "deepseek-v2-lite": [1, 2, 4, 8, 16],
    "deepseek-v3": [1, 2, 4, 8, 16, 32, 64, 128],
    "kimi-k2": [1, 2, 4, 8, 16, 32, 64],
    "falcon-7b": [1, 71],
    "mpt-7b": [1, 2, 4, 8, 16, 32],
}


def test_every_preset_is_expected_here():
    assert list(PRESETS) == list(EXPECTED) == list(DEGREES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_gives_the_specs_of_its_model_s_layers(name):
    assert AttentionSpec.from_preset(name) == tuple(EXPECTED[name])


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_divided_among_devices_or_says_how_it_can_be(name):
    whole = EXPECTED[name][0]
    for tp in range(1, whole.num_qo_heads + 2):
        if tp in DEGREES[name]:
            part = AttentionSpec.from_preset(name, tp)[0]
            assert part.num_qo_heads * tp == whole.num_qo_heads
            assert part.num_kv_heads == max(1, whole.num_kv_heads // tp)
            assert part.scale == whole.scale
        else:
            text = rf"preset {name}: .*Degrees that work: {', '.join(map(str, DEGREES[name]))}\.$"
            with pytest.raises(SpecError, match=text):
                AttentionSpec.from_preset(name, tp)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_the_content_of_a_config_json(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PRESETS[name]))
    assert AttentionSpec.from_hf_config(path) == AttentionSpec.from_preset(name)


def test_dtypes_are_the_caller_s_choice():
    spec = AttentionSpec.from_preset("llama-3-8b", 8, dtype="float16", kv_dtype="float8_e4m3fn")[0]
    assert (spec.dtype, spec.kv_dtype, spec.num_qo_heads, spec.num_kv_heads) == ("float16", "float8_e4m3fn", 4, 1)


@pytest.mark.parametrize(
    ("name", "meant"), [("llama3-8b", "llama-3-8b"), ("Mistral-7B", "mistral-7b"), ("gpt-oss", "gpt-oss-20b")]
)
def test_an_unknown_name_is_refused_with_the_closest_and_all_others(name, meant):
    with pytest.raises(SpecError, match=rf"no preset '{name}'\. Did you mean {meant}\? Presets: llama-3-8b, .*mpt-7b"):
        AttentionSpec.from_preset(name)


def test_a_name_like_no_other_is_refused_without_a_guess():
    for name in ("xyz", ""):
        with pytest.raises(SpecError, match=rf"there is no preset '{name}'\. Presets: "):
            AttentionSpec.from_preset(name)
    for name in (None, 3, ["llama-3-8b"]):
        with pytest.raises(SpecError, match="must be a string"):
            AttentionSpec.from_preset(name)


def test_reading_a_preset_imports_no_torch_and_no_transformers():
    program = (
        "import sys, anyattn; anyattn.AttentionSpec.from_preset('gemma-3-27b', 2)\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"

"""Models by name: the fields of their published config.json that attention depends on. Nothing is downloaded."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from anyattn.attention.hf_config import specs_from_hf_config
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError

PRESETS: Mapping[str, dict[str, Any]] = {
    # meta-llama/Meta-Llama-3-8B
    "llama-3-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # meta-llama/Meta-Llama-3-70B
    "llama-3-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # Qwen/Qwen2-7B
    "qwen2-7b": {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 28,
        "torch_dtype": "bfloat16",
    },
    # Qwen/Qwen3-32B
    "qwen3-32b": {
        "model_type": "qwen3",
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 64,
        "torch_dtype": "bfloat16",
    },
    # mistralai/Mistral-7B-v0.1: every layer has the window, which later versions do not have
    "mistral-7b": {
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    },
    # google/gemma-3-27b-it: the language model; its config leaves the pattern (5 local layers, then a global one) out
    "gemma-3-27b": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "hidden_size": 5376,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
        },
    },
    # openai/gpt-oss-20b
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "torch_dtype": "bfloat16",
    },
    # deepseek-ai/DeepSeek-V2-Lite
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707},
        "torch_dtype": "bfloat16",
    },
    # deepseek-ai/DeepSeek-V3, of R1 and V3.1 too; without the layers that predict several tokens
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
        "torch_dtype": "bfloat16",
    },
    # moonshotai/Kimi-K2-Instruct-0905: the one with a context of 262144 tokens, which the factor follows
    "kimi-k2": {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        "torch_dtype": "bfloat16",
    },
    # tiiuae/falcon-7b
    "falcon-7b": {
        "model_type": "falcon",
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "num_kv_heads": 71,  # as published: not looked at where multi_query is true
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": False,
        "torch_dtype": "bfloat16",
    },
    # mosaicml/mpt-7b
    "mpt-7b": {
        "model_type": "mpt",
        "n_layers": 32,
        "d_model": 4096,
        "n_heads": 32,
        "attn_config": {"attn_type": "multihead_attention", "alibi": True, "prefix_lm": False, "softmax_scale": None},
        "torch_dtype": "bfloat16",
    },
}


def specs_from_preset(
    name: str, tp: int = 1, *, dtype: Any = None, kv_dtype: Any = "auto"
) -> tuple[AttentionSpec, ...]:
    """See `AttentionSpec.from_preset`."""
    if not isinstance(name, str):
        raise SpecError(f"the name of a preset must be a string, not {type(name).__name__}.")
    if name not in PRESETS:
        near = difflib.get_close_matches(name.lower(), PRESETS, n=1)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise SpecError(
            f"there is no preset {name!r}.{meant} Presets: {', '.join(PRESETS)}. For another model give its "
            "config.json to AttentionSpec.from_hf_config."
        )
    return specs_from_hf_config(PRESETS[name], tp, dtype=dtype, kv_dtype=kv_dtype, name=f"preset {name}")

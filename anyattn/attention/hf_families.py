"""How each family of Hugging Face models writes down its attention: readers, and the table of model types."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyattn.attention.hf_fields import Fields, shown
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError

_Made = tuple[Callable[..., AttentionSpec], list["int | None"]]
"""What a reader returns: makes the spec of a layer from its sliding_window, dtype and kv_dtype; each layer's window."""


def _local_if_window(fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    return [window is not None] * num_layers


def _local_from_max_window_layers(fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    first = fields.count("max_window_layers", minimum=0) or 0
    return [window is not None and index >= first for index in range(num_layers)]


def _local_alternating_up_to_max_window_layers(fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    end = fields.count("max_window_layers", minimum=0) or 0
    return [window is not None and index % 2 == 0 and index < end for index in range(num_layers)]


def _local_alternating(fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    return [index % 2 == 0 for index in range(num_layers)]


def _local_but_every_nth(fields: Fields, num_layers: int, window: int | None) -> list[bool]:
    pattern = fields.count("_sliding_window_pattern") or fields.required("sliding_window_pattern")
    return [(index + 1) % pattern != 0 for index in range(num_layers)]


def _read_standard(fields: Fields, family: Family) -> _Made:
    """The fields that most models use, under the names that most of them give."""
    if fields.get("kv_lora_rank") is not None:
        return _read_mla(fields, family)
    heads = fields.required("num_attention_heads", "n_head", "n_heads", "num_heads")
    kv_names = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
    kv_heads = fields.required(*kv_names) if fields.gaps else fields.count(*kv_names)
    multi_query = fields.flag("multi_query")
    if kv_heads is None:
        kv_heads = 1 if multi_query else heads
    head_dim = _head_dim(fields, heads)
    v_head_dim = fields.count("v_head_dim")
    scalar, scale = fields.number("query_pre_attn_scalar"), fields.number("attention_multiplier")
    make = partial(
        AttentionSpec,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=None if v_head_dim == head_dim else v_head_dim,
        sm_scale=scale if scalar is None else scalar**-0.5,
        logits_soft_cap=fields.number("attn_logit_softcapping"),
        sinks=family.sinks,
        alibi=_alibi(fields),
    )
    return make, _windows(fields, family)


def _read_mla(fields: Fields, family: Family) -> _Made:
    """DeepSeek's latent attention. Its scale has YaRN's correction, squared: for queries and for keys.

    Source: yarn_apply_mscale of modeling_deepseek_v3.py in huggingface/transformers.
    """
    rope = fields.section("rope_scaling") or fields.section("rope_parameters")
    fields.get("head_dim", "num_key_value_heads")  # of keys before compression
    nope, rotary = fields.required("qk_nope_head_dim"), fields.required("qk_rope_head_dim")
    scale = (nope + rotary) ** -0.5
    rope_fields = Fields(rope, prefix="rope_scaling.")
    all_dim = rope_fields.number("mscale_all_dim", or_zero=True)
    if all_dim and rope_fields.get("rope_type", "type") not in (None, "default"):
        factor = rope_fields.number("factor")
        if factor is None:
            raise SpecError(
                "rope_scaling has mscale_all_dim and no factor: add it, the scale of the scores needs both."
            )
        mscale = 0.1 * all_dim * math.log(factor) + 1.0 if factor > 1 else 1.0
        scale = scale * mscale * mscale
    make = partial(
        AttentionSpec.mla,
        num_qo_heads=fields.required("num_attention_heads"),
        kv_lora_rank=fields.required("kv_lora_rank"),
        qk_rope_head_dim=rotary,
        qk_nope_head_dim=nope,
        v_head_dim=fields.required("v_head_dim"),
        sm_scale=scale,
    )
    return make, _windows(fields, family)


def _read_deepseek(fields: Fields, family: Family) -> _Made:
    """MLA; but the small language models inside DeepSeek-VL2 and DeepSeek-OCR switch it off."""
    if fields.flag("use_mla", default=True):
        return _read_mla(fields, family)
    fields.get("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads = fields.required("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads") or heads
    make = partial(AttentionSpec, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=_head_dim(fields, heads))
    return make, _windows(fields, family)


def _read_falcon(fields: Fields, family: Family) -> _Made:
    """num_kv_heads counts in the new architecture only; before that it is one KV head, or one a query head.

    ALiBi: Falcon adds the bias before it scales the scores (FalconAttention in huggingface/transformers), a spec after
    that; so the slopes to pass are ALiBi's times `spec.scale`.
    """
    heads = fields.required("num_attention_heads", "n_head")
    kv_heads = fields.count("num_kv_heads", "n_head_kv") or heads
    fields.skip("parallel_attn", "num_ln_in_parallel_attn", "num_key_value_heads")
    new, multi_query = fields.flag("new_decoder_architecture"), fields.flag("multi_query", default=True)
    if not new:
        kv_heads = 1 if multi_query else heads
    head_dim, alibi = _head_dim(fields, heads), _alibi(fields)
    make = partial(AttentionSpec, num_qo_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, alibi=alibi)
    return make, _windows(fields, family)


def _read_mpt(fields: Fields, family: Family) -> _Made:
    """Names of its own, and a section for attention (MPTConfig in mosaicml/llm-foundry)."""
    attention = Fields(fields.section("attn_config"), {"alibi": True}, prefix="attn_config.")
    heads = fields.required("n_heads", "num_attention_heads")
    kinds = {"multihead_attention": heads, "multiquery_attention": 1, "grouped_query_attention": None}
    kind = attention.get("attn_type") or "multihead_attention"
    if not isinstance(kind, str) or kind not in kinds:
        raise SpecError(f"attn_config.attn_type must be one of {', '.join(kinds)}, not {shown(kind)}.")
    kv_heads = attention.count("kv_n_heads") or kinds[kind] or attention.required("kv_n_heads")
    make = partial(
        AttentionSpec,
        num_qo_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=_head_dim(fields, heads),
        sm_scale=attention.number("softmax_scale"),
        alibi=attention.flag("alibi"),
    )
    attention.skip("alibi_bias_max", "qk_ln", "qk_gn")  # of the slopes, and before q and k are rotated
    attention.require_all_understood()
    fields.skip("num_key_value_heads")
    return make, _windows(fields, family)


def _head_dim(fields: Fields, heads: int) -> int:
    head_dim = fields.count("head_dim")
    if head_dim is not None:
        return head_dim
    hidden_size = fields.required("hidden_size", "n_embd", "n_embed", "d_model")
    if hidden_size % heads:
        raise SpecError(f"hidden_size {hidden_size} is no multiple of {heads} heads, and head_dim is missing: add it.")
    return hidden_size // heads


def _alibi(fields: Fields) -> bool:
    flags = [fields.flag("alibi"), fields.flag("use_alibi")]
    return any(flags)


def _windows(fields: Fields, family: Family) -> list[int | None]:
    """Each layer's window; W counts the token itself, as it does in a spec.

    Source: sliding_window_overlay of masking_utils.py in huggingface/transformers.
    """
    num_layers = fields.required("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    enabled = fields.flag("use_sliding_window", default=True)
    window = fields.count("sliding_window", most=(1 << 31) - 1) if enabled else None
    if fields.get("sliding_window") == fields.peek("sliding_window_size"):
        fields.skip("sliding_window_size")  # Gemma 2's configs say it twice
    types = fields.get("layer_types")
    if types is not None:
        local = _local_by_type(types, num_layers)
    elif family.local is not None:
        local = family.local(fields, num_layers, window)
    elif window is None:
        local = [False] * num_layers
    elif fields.peek("sliding_window_pattern") is not None:
        local = _local_but_every_nth(fields, num_layers, window)
    else:
        raise SpecError(
            f"sliding_window is {window}, and nothing says which layers have it: give a dict with layer_types (a list "
            'of "full_attention" or "sliding_attention" for each layer), or with sliding_window null for none.'
        )
    if window is None and any(local):
        off = " (use_sliding_window is false)" if not enabled else ""
        raise SpecError(f"layer {local.index(True)} has sliding attention, and sliding_window is missing{off}: set it.")
    return [window if is_local else None for is_local in local]


def _local_by_type(types: Any, num_layers: int) -> list[bool]:
    if not isinstance(types, list | tuple) or not all(isinstance(kind, str) for kind in types):
        raise SpecError(f"layer_types must be a list of strings, not {shown(types)}.")
    if len(types) != num_layers:
        raise SpecError(f"layer_types has {len(types)} entries for {num_layers} layers: give one for each layer.")
    known = {"full_attention": False, "attention": False, "sliding_attention": True}
    if unknown := [kind for kind in dict.fromkeys(types) if kind not in known]:
        layers = [str(index) for index, kind in enumerate(types) if kind == unknown[0]]
        rest = f" and {len(layers) - 8} more" if len(layers) > 8 else ""
        raise SpecError(
            f"layer type {unknown[0]!r} (layers {', '.join(layers[:8])}{rest}) is no softmax attention over a whole or "
            f"sliding KV cache, which is what a spec stands for. Served are {', '.join(known)}; drive the others by "
            "other means, and write AttentionSpecs for the attention layers by hand."
        )
    return [known[kind] for kind in types]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What is not in a model's config because its code knows it.

    defaults: what the model's class holds for fields that a config leaves out.
    unused: fields that sound like attention and that the model's code does not read.
    local: the layers that attend within the window, for configs without layer_types.
    """

    read: Callable[[Fields, Family], _Made] = _read_standard
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()
    local: Callable[[Fields, int, int | None], list[bool]] | None = None
    sinks: bool = False


def _sizes(hidden: int, layers: int, heads: int, kv_heads: int | None = None, head_dim: int | None = None) -> Any:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    more = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    return {**sizes, **{name: size for name, size in more.items() if size is not None}}


ALWAYS_WRITTEN = {*_sizes(1, 1, 1), "d_model", "n_heads", "n_layers"}
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_DEEPSEEK_V3 = Family(read=_read_deepseek, defaults={**_sizes(7168, 61, 128), **_LATENT})
_FALCON = Family(read=_read_falcon, defaults=_sizes(4544, 32, 71))
_GEMMA3 = Family(
    defaults={
        **_sizes(2304, 26, 8, 4, 256),
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    local=_local_but_every_nth,
)

# Defaults and local layers are those of transformers' configuration_*.py, the model type in place of the star.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(defaults=_sizes(4096, 32, 32)),
    "mistral": Family(defaults={**_sizes(4096, 32, 32, 8), "sliding_window": 4096}, local=_local_if_window),
    "mixtral": Family(defaults=_sizes(4096, 32, 32, 8), local=_local_if_window),
    "qwen2": Family(defaults={**_sizes(4096, 32, 32, 32), **_QWEN}, local=_local_from_max_window_layers),
    "qwen2_moe": Family(
        defaults={**_sizes(2048, 24, 16, 16), **_QWEN}, local=_local_alternating_up_to_max_window_layers
    ),
    "qwen3": Family(defaults={**_sizes(4096, 32, 32, 32, 128), **_QWEN}, local=_local_from_max_window_layers),
    "qwen3_moe": Family(defaults={**_sizes(2048, 24, 32, 4), **_QWEN}, local=_local_if_window),
    "gemma": Family(defaults=_sizes(3072, 28, 16, 16, 256)),
    "gemma2": Family(
        defaults={
            **_sizes(2304, 26, 8, 4, 256),
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "sliding_window": 4096,
        },
        local=_local_alternating,
    ),
    "gemma3": _GEMMA3,  # tokens of an image see each other both ways; the specs are those of text
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(
        defaults={**_sizes(2880, 36, 64, 8, 64), "sliding_window": 128}, local=_local_alternating, sinks=True
    ),
    "phi3": Family(defaults=_sizes(3072, 32, 32), local=_local_if_window, unused=("full_attn_mod",)),
    "deepseek_v2": Family(read=_read_deepseek, defaults={**_sizes(4096, 32, 32), **_LATENT}),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,  # Kimi K2's own docs/deploy_guidance.md: the same architecture under another name
    "falcon": _FALCON,
    "RefinedWeb": _FALCON,  # what Falcon was called before
    "RefinedWebModel": _FALCON,
    "mpt": Family(read=_read_mpt, defaults={"d_model": 2048, "n_heads": 16, "n_layers": 24}),
    "starcoder2": Family(local=_local_if_window),
    "bloom": Family(defaults={"alibi": True}, unused=("offset_alibi",)),  # always, and without a field that says so
}

NOT_SERVED: Mapping[str, str] = {
    "baichuan": "whether they have ALiBi is in their code, by size",
    "diffllama": "an attention of theirs is the difference of two",
    "flint": "their sinks are in their code",
    "gpt_neo": "that their scores are not scaled is in their code",
    "gpt_refact": "that they have ALiBi is in their code",
    "granite_swa": "their sinks are in their code",
    "granitemoe_swa": "their sinks are in their code",
    "llama4": "they attend in chunks",
    "llama4_text": "they attend in chunks",
    "longcat_flash": "they have two attentions a layer, with scales in their code",
    "mt5": "their scores have a relative bias, and no scale",
    "paligemma": "their prompts attend both ways",
    "t5": "their scores have a relative bias, and no scale",
    "umt5": "their scores have a relative bias, and no scale",
}
"""Model types whose config does not say what their attention is."""

"""From the config.json of a Hugging Face model to one AttentionSpec a layer. Needs no transformers and no torch.

What the fields of each family mean is in `hf_families`; that none is ignored, in `hf_fields`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from anyattn.attention.hf_families import ALWAYS_WRITTEN, FAMILIES, NOT_SERVED, Family
from anyattn.attention.hf_fields import Fields, shown
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError

_SECTIONS = ("text_config", "llm_config", "language_config")
"""Where configs of multimodal models keep the language model."""

_ENCODER_FIELD = "attention_probs_dropout_prob"
"""What BERT and its descendants call it: encoders, nearly all of them, and no other field says so."""
_DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForVision2Seq", "ForImageTextToText")
"""How the names of architectures end that write text from left to right."""
_NOT_LANGUAGE = ("image_size", "patch_size", "num_mel_bins", "mask_token_id", "pooling_type", "vision_use_head")
"""Fields of encoders of images and sound, and of models that fill in masked tokens."""


def specs_from_hf_config(
    config: Any, tp: Any = 1, *, dtype: Any = None, kv_dtype: Any = "auto", name: str | None = None
) -> tuple[AttentionSpec, ...]:
    """See `AttentionSpec.from_hf_config`. name: of the config, for errors; its path otherwise."""
    values, found_at = _load(config)
    try:
        if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
            raise SpecError(f"tp must be a positive integer, not {shown(tp)}.")
        return _specs(values, tp, dtype, kv_dtype)
    except SpecError as error:
        raise SpecError(f"{name or found_at}: {error}") from None


def _load(config: Any) -> tuple[dict[Any, Any], str]:
    """The config's values, and where they are from, for errors."""
    if isinstance(config, dict):
        return config, f"config of model_type {shown(config.get('model_type'))}"
    if not isinstance(config, str | os.PathLike):
        raise SpecError(
            "config must be the path of a config.json, the path of the folder that holds it, or a dict (of a "
            f"transformers config: config.to_dict()), not {type(config).__name__}."
        )
    try:
        path = Path(config)
        if path.is_dir():
            path /= "config.json"
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(
            f"{path} does not exist. Give the path of a config.json or of the folder that holds it; nothing is "
            "downloaded (`hf download REPOSITORY config.json` does that), and presets are read by from_preset."
        ) from None
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise SpecError(f"{shown(config)} cannot be read as JSON: {error}. Give the path of a config.json.") from error
    if not isinstance(values, dict):
        raise SpecError(f"{path} holds a {type(values).__name__}, where a model's config.json holds an object.")
    return values, str(path)


def _specs(values: dict[Any, Any], tp: int, dtype: Any, kv_dtype: Any) -> tuple[AttentionSpec, ...]:
    levels = [values]
    for _ in range(4):  # deeper than any model nests, and an end for a dict that holds itself
        section = next((key for key in _SECTIONS if levels[0].get(key) is not None), None)
        if section is None:
            break
        if not isinstance(levels[0][section], dict):
            raise SpecError(f"{section} must be an object, not {shown(levels[0][section])}.")
        levels.insert(0, levels[0][section])  # the innermost first
    model_type = next((level["model_type"] for level in levels if level.get("model_type") is not None), "")
    if not isinstance(model_type, str):
        raise SpecError(f"model_type must be a string, not {shown(model_type)}.")
    for level in levels:
        _require_decoder(level)
    if model_type not in FAMILIES:
        _require_language_model(levels)
    family = FAMILIES.get(model_type, Family())
    # Only writers of nested configs leave sizes out. In a config of its own that is a mistake.
    defaults = {k: v for k, v in family.defaults.items() if len(levels) > 1 or k not in ALWAYS_WRITTEN}
    fields = Fields(levels[0], defaults, gaps=len(levels) > 1 and not defaults)
    fields.skip(*family.unused)
    make, windows = family.read(fields, family)
    fields.require_all_understood()
    given = (level[key] for level in levels for key in ("dtype", "torch_dtype") if level.get(key) is not None)
    precision = {"dtype": next(given, "bfloat16") if dtype is None else dtype, "kv_dtype": kv_dtype}
    kinds = {window: _shard(make(sliding_window=window, **precision), tp) for window in dict.fromkeys(windows)}
    return tuple(kinds[window] for window in windows)


def _require_decoder(level: dict[Any, Any]) -> None:
    if level.get("is_encoder_decoder") is not None and level["is_encoder_decoder"] is not False:
        raise SpecError(
            "this is an encoder-decoder model, and no spec stands for cross-attention: write an AttentionSpec for the "
            "decoder's own attention by hand."
        )
    model_type, architectures = level.get("model_type"), level.get("architectures")
    if isinstance(model_type, str) and model_type in NOT_SERVED:
        raise SpecError(
            f"the config of a {model_type} model does not say what its attention is ({NOT_SERVED[model_type]}): write "
            "AttentionSpecs by hand where a spec can say it."
        )
    names = architectures if isinstance(architectures, list) else []
    if _ENCODER_FIELD in level or any(isinstance(name, str) and name.endswith("ForMaskedLM") for name in names):
        raise SpecError(
            f"this looks like an encoder (it has {_ENCODER_FIELD}, or an architecture for masked tokens), whose tokens "
            "see both ways, and a runtime serves decoders. If it is one, write an AttentionSpec by hand."
        )


def _require_language_model(levels: list[dict[Any, Any]]) -> None:
    """For types that are not known here: nothing says that their tokens see only what is before them but the names."""
    named = next((level["architectures"] for level in levels if level.get("architectures")), None)
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    field = next((field for field in _NOT_LANGUAGE if levels[0].get(field) is not None), None)
    if (names and not any(name.endswith(_DECODERS) for name in names)) or field is not None:
        why = f"it has {field}" if field is not None else f"its architecture is {shown(names[0])}"
        raise SpecError(
            f"this type is not known here, and may be no causal language model ({why}): if it is one, give a dict "
            "without that field; otherwise write an AttentionSpec by hand."
        )


def _shard(spec: AttentionSpec, tp: int) -> AttentionSpec:
    """The part of one of `tp` devices: query heads are divided, KV heads divided or, where devices are more, shared.

    MLA's one latent is what all heads read, so every device has it.
    """
    heads, kv_heads = spec.num_qo_heads, spec.num_kv_heads

    def fits(degree: int) -> bool:
        return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)

    if not fits(tp):
        degrees = ", ".join(str(degree) for degree in range(1, heads + 1) if fits(degree))
        raise SpecError(
            f"tp={shown(tp)} divides {heads} query heads and {kv_heads} KV heads into no equal parts. "
            f"Degrees that work: {degrees}."
        )
    return spec.replace(num_qo_heads=heads // tp, num_kv_heads=max(kv_heads // tp, 1))

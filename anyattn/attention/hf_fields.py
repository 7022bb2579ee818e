"""A Hugging Face config's fields, checked as they are read, and the names that say something about attention.

A reader looks up the fields of its family in a `Fields`, which remembers what was looked up. Whatever sounds like
attention and was not looked up is then an error: nothing in a config is ignored because nobody here knows it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from anyattn.errors import SpecError

_MOST = 1 << 20  # of heads, elements of a head, layers: no model has more, and a tuple that long still fits into memory

_CHANGES_ATTENTION = re.compile(
    r"(use_)?alibi|(is_)?causal|use_bidirectional_attention|prefix_lm|.*att(entio)?n.*soft_?cap.*|attention_chunk_size"
    r"|layer_types|layers_block_type|block_types|hybrid_.*pattern|full_attention_interval|attention_(types|layers)"
    r"|sliding_window(_size)?|attention_window_size|add_cross_attention|cross_attention_layers|num_kv_shared_layers|use_cla"
    r"|index_topk|linear_attn_config|mamba_.*|kv_lora_rank|use_mla|query_pre_attn_scalar|attention_multiplier"
)
"""Whole names of fields by which some model says that its attention is special."""
_SOUNDS_LIKE_ATTENTION = re.compile(
    r"attn|attention|alibi|sliding|window|sinks?\b|sink_|soft_?cap|logits?_cap|chunk|local|global|sparse|swa_|kda_"
    r"|linear_(attn|num|key|value|conv|head)|conv_|_conv|mamba|ssm|recurrent|lru_|lsh_|state_size|hybrid|loop|cycles"
    r"|causal|bidirectional|prefix_lm|cross|kv_shared|share_kv|cla_|index_(?!of)|indexer|compress_|layers?_types?\b"
    r"|layers_block_type|block_types|block_configs|per_layer_config|position_bias|position_embedding_type|relative_|rel_"
    r"|num_.*heads|n_head|kv_heads|head_dim|dim_head|head_size|d_head|kv_channels|query_groups|multi_query|mla"
)
"""Parts of the names of such fields."""
_NOT_ATTENTION = re.compile(
    r".*(dropout|pdrop|bias|_in_fp32|experts?|router)|_?attn_impl.*|.*flash_att.*|output_attentions"
    r"|attention_(hidden_size|in_multiplier|layer_norm.*|out_multiplier)|attn_temperature_tuning|qk_head_dim"
    r"|final_logit_soft_?capping|.*router.*soft_?cap.*|mlp_layer_types|(de|en)coder_sparse_step|chunk_size_feed_forward"
    r"|cross_attention_hidden_size|rope_local_base_freq|_?sliding_window_pattern|max_window_layers"
)
"""Whole names of fields that sound like it and do not change what is computed from q, k and v."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_causal": (True, None),
    "causal": (True, None),
    "scale_attn_weights": (True, None),
    "position_embedding_type": (None, "absolute", "rope", "rotary", "learned_absolute", "nope"),
}
"""Values that say nothing, for fields where those are not null, false, 0, -1 or empty."""


class Fields:
    """A config's fields, with the defaults of the model's class for what it leaves out. Raises SpecError."""

    def __init__(
        self,
        values: Mapping[Any, Any],
        defaults: Mapping[str, Any] | None = None,
        *,
        prefix: str = "",
        gaps: bool = False,
    ) -> None:
        """prefix: of names in messages. gaps: whether what is left out may be a default that is not known here."""
        self.gaps = gaps
        self._given = values
        self._values = {**(defaults or {}), **values}
        self._prefix = prefix
        self._read: set[str] = set()

    def get(self, *names: str) -> Any:
        """The value of the first of these names that is not null; None where there is none."""
        self._read.update(names)
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def count(self, *names: str, minimum: int = 1, most: int = _MOST) -> int | None:
        """An integer, or None."""
        value = self.get(*names)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= most:
            raise SpecError(f"{self._named(names)} must be an integer from {minimum} to {most}, not {shown(value)}.")
        return value

    def required(self, *names: str) -> int:
        """An integer."""
        value = self.count(*names)
        if value is None:
            others = f" (or, as other models call it, {', '.join(names[1:])})" if names[1:] else ""
            raise SpecError(
                f"{self._prefix}{names[0]} is missing{others}: give a dict with it, or write an AttentionSpec by hand."
            )
        return value

    def number(self, name: str, *, or_zero: bool = False) -> float | None:
        """A positive number, or None."""
        value = self.get(name)
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        except OverflowError:
            number = math.inf
        if not (0 < number < math.inf or (or_zero and number == 0)):
            raise SpecError(f"{self._prefix}{name} must be a positive number or null, not {shown(value)}.")
        return number

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or False; the default for null."""
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise SpecError(f"{self._prefix}{name} must be true or false, not {shown(value)}.")
        return default if value is None else value

    def section(self, name: str) -> dict[Any, Any]:
        """An object, empty for null."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise SpecError(f"{self._prefix}{name} must be an object, not {shown(value)}.")
        return value or {}

    def peek(self, name: str) -> Any:
        """A value that is not thereby understood."""
        return self._values.get(name)

    def skip(self, *names: str) -> None:
        """Fields that sound like attention, and that this family's code does not use or uses elsewhere."""
        self._read.update(names)

    def require_all_understood(self) -> None:
        """Raises SpecError for a field that sounds like attention, says something and was not read."""
        for name, value in self._given.items():
            if not isinstance(name, str) or name in self._read or _is_neutral(name, value):
                continue
            sounds = _SOUNDS_LIKE_ATTENTION.search(name) and not _NOT_ATTENTION.fullmatch(name)
            if sounds or _CHANGES_ATTENTION.fullmatch(name):
                raise SpecError(
                    f"{self._prefix}{name}={shown(value)} may change what attention computes, and how is not known "
                    "for this type of model. If it does not, give a dict without the field (and what it says of heads "
                    "under the usual names, num_key_value_heads, head_dim); else write an AttentionSpec by hand."
                )

    def _named(self, names: tuple[str, ...]) -> str:
        return self._prefix + next(name for name in names if self._values.get(name) is not None)


def _is_neutral(name: str, value: Any) -> bool:
    if not isinstance(value, bool | int | float | str | list | tuple | dict | None):
        return False
    return value in _NEUTRAL.get(name, (None, False, 0, -1, "", [], (), {}))


def shown(value: Any) -> str:
    """A value for messages: one that nothing can go wrong with."""
    try:
        text = repr(value)
    except Exception:  # such as an integer of more digits than Python writes out
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."

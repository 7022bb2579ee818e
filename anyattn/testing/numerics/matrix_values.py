"""What a matrix is made of: the declared values of each factor, what they are called, and which do not go together."""

from __future__ import annotations

from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.pages import refusal as layout_refusal
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError
from anyattn.testing.numerics.combinations import Named, Values, pairs
from anyattn.testing.numerics.values import (
    Fields,
    declared_phases,
    features,
    group_sizes,
    head_dims,
    mla_dims,
    page_sizes,
    serves,
)
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, GraphLevel

Factors = dict[str, list[Any]]

_FEATURES = {
    "sliding_window": "window",
    "logits_soft_cap": "soft cap",
    "sinks": "sinks",
    "alibi": "alibi",
    "return_lse": "LSE",
}
"""The spec's fields that ask for more, and what they are called."""

PLAIN: frozenset[Named] = frozenset(
    {
        ("kv_dtype", "auto"),
        ("causal", True),
        ("graph", GraphLevel.NEVER),
        *((name, value) for name in _FEATURES for value in (None, False)),
    }
)
"""Values that go without saying."""

_GRAPHS: dict[str, tuple[GraphLevel, ...]] = {
    "prefill": (GraphLevel.ALWAYS,),
    "chunked prefill": (GraphLevel.ALWAYS,),
    "mixed": (GraphLevel.ALWAYS,),
    "decode": (GraphLevel.DECODE, GraphLevel.ALWAYS),
    "uniform": (GraphLevel.UNIFORM, GraphLevel.ALWAYS),
    "verify": (GraphLevel.UNIFORM,),
}
"""The phases of steps, and of which levels their graphs are."""
_STEPS_OF_GRAPHS = {
    GraphLevel.DECODE: "a graph of level decode is for one new token of each sequence",
    GraphLevel.UNIFORM: "a graph of level uniform is for as many new tokens of each sequence, and more than one",
    GraphLevel.ALWAYS: "a graph with tree masks is of level uniform",
}
_OF_LAYOUTS = ("layout", "page_size", "head_dims", "mla_dims", "dtype", "kv_dtype")
"""What decides whether a layout holds pages; dims are those of heads or of MLA."""


def factors_of(declared: Capabilities, base: AttentionSpec) -> Factors:
    """The declared values of each factor. base: a plain spec, which says whether dims are those of MLA or of heads."""
    asked: Factors = {name: [spec[name] for _, spec in features(declared, name)] for name in _FEATURES}
    prefills, decodes = declared_phases(declared, "prefill", "mixed"), "decode" in declared.phases
    several = prefills or (decodes and declared.decode_qo_len > 1)
    phases = {
        **dict.fromkeys(("prefill", "chunked prefill", "mixed"), prefills),
        "decode": decodes,
        "uniform": several,
        "verify": serves(declared, "tree_mask"),
    }
    levels = {GraphLevel.DECODE: decodes, GraphLevel.UNIFORM: several, GraphLevel.ALWAYS: prefills}
    return {
        "phase": [phase for phase, is_served in phases.items() if is_served],
        "dtype": sorted(declared.dtypes),
        "kv_dtype": ["auto", *sorted(kv for kv in declared.kv_dtypes if declared.dtypes - {kv})],
        **({"mla_dims": mla_dims(declared)} if base.is_mla else {"head_dims": list(head_dims(declared))}),
        "group_size": [
            size
            for size in group_sizes(declared, is_mla=base.is_mla)
            if size * base.num_kv_heads in declared.num_qo_heads
        ],
        "page_size": list(page_sizes(declared)),
        "layout": list(declared.layouts),
        "sliding_window": [None, *asked["sliding_window"]],
        "logits_soft_cap": [None, *asked["logits_soft_cap"]],
        "sinks": [False, *asked["sinks"]],
        "alibi": [False, *asked["alibi"]],
        "return_lse": [False, True] if declared.lse else [False],
        "causal": sorted(declared.causal, reverse=True),
        "graph": [GraphLevel.NEVER, *(level for level, asked in levels.items() if asked and level <= declared.graph)],
    }


def spec_of(values: Values, base: AttentionSpec) -> AttentionSpec:
    """The base with these values. Raises SpecError where they do not go together."""
    names = {"dtype", "kv_dtype", "causal", *_FEATURES}
    fields: Fields = {name: value for name, value in values.items() if name in names}
    if "group_size" in values:
        fields["num_qo_heads"] = values["group_size"] * base.num_kv_heads
    if "head_dims" in values:
        qk, vo = values["head_dims"]
        fields |= {"head_dim": qk, "v_head_dim": None if qk == vo else vo}
    if "mla_dims" in values:
        rank, rope = values["mla_dims"]
        fields |= {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "head_dim": rank + rope}
        fields["sm_scale"] = (rank + rope) ** -0.5
    return base.replace(**fields, tree_mask=values.get("phase") == "verify")


def words(named: Named) -> str:
    """What a value is called."""
    name, value = named
    if name in _FEATURES:
        return _FEATURES[name] if value else f"no {_FEATURES[name]}"
    if name == "head_dims":
        return f"heads of {value[0]}" + (f", values of {value[1]}" if value[0] != value[1] else "")
    if name == "mla_dims":
        return f"MLA {value[0]}+{value[1]}"
    if name == "graph":
        return f"graph {value.name.lower()}" if value else "no graph"
    if name == "causal":
        return "causal" if value else "not causal"
    if name == "kv_dtype":
        return "KV of its own dtype" if value == "auto" else f"KV {value}"
    if name == "phase" and value == "uniform":
        return "uniform steps"
    return {"group_size": "group {}", "page_size": "pages of {}"}.get(name, "{}").format(value)


class Rules:
    """What does not go together: what a spec, a layout or a graph refuses, and what the declaration does.

    alone: values that go with no value of some other factor, each with the reason.
    """

    def __init__(self, declared: Capabilities, base: AttentionSpec, factors: Factors) -> None:
        self._declared, self._base, self._factors = declared, base, factors
        self._refused: dict[Named, dict[Named, str]] = {}
        for a, b in pairs([[{name: value} for value in values] for name, values in factors.items()]):
            if reason := self._of_two(a, b):
                self._refused.setdefault(a, {})[b] = reason
                self._refused.setdefault(b, {})[a] = reason
        self._of_layouts: dict[tuple[Named, ...], str] = {}
        self.alone: dict[Named, str] = {}
        for each, refused in self._refused.items():
            for name, values in factors.items():
                if all((name, value) in refused for value in values):
                    self.alone[each] = refused[name, values[0]]

    def refusal(self, values: Values) -> str:
        """Why they do not go together; empty where they do, as far as they are known."""
        there = values.items()
        for each in there:
            for other, reason in self._refused.get(each, {}).items():
                if other in there:
                    return reason
        return "" if values.get("layout") in (None, *KV_LAYOUTS) else self._of_layout(values)

    def why(self, a: Named, b: Named) -> str:
        """Why two values meet in no cell."""
        if reason := self.refusal(dict((a, b))):
            return reason
        for name, values in self._factors.items():
            reasons = [self.refusal(dict((a, b, (name, value)))) for value in values if name not in (a[0], b[0])]
            if reasons and all(reasons):
                return reasons[0]
        of_both = (reason for key, reason in self._of_layouts.items() if reason and {a, b} <= set(key))
        return next(of_both, "neither goes with what the other needs")

    def _of_two(self, a: Named, b: Named) -> str:
        both = dict((a, b))
        if "kv_dtype" in both and both["kv_dtype"] == both.get("dtype"):
            return "that is a cache of its own dtype"
        if both.get("graph") and both["graph"] not in _GRAPHS.get(both.get("phase", ""), (both["graph"],)):
            return _STEPS_OF_GRAPHS[both["graph"]]
        for first, second in self._declared.not_together:
            if {first, second} <= self._features(a) | self._features(b):
                return f"{first} and {second} are declared not to go together"
        try:
            spec_of(both, self._base)
        except SpecError as error:
            return str(error).partition(":")[0]
        return ""

    def _features(self, named: Named) -> set[str]:
        """What `Capabilities.not_together` calls it."""
        name, value = named
        known = {
            "mla_dims": {"mla"},
            "head_dims": {"value_head_dim"} if name == "head_dims" and value[0] != value[1] else set(),
            "dtype": {value},
            "kv_dtype": {"fp8"} if value in FP8_DTYPES else set(),
            "causal": set() if value else {"non_causal"},
            "phase": {"tree_mask"} if value == "verify" else set(),
            "graph": {"graph"} if value else set(),
        }
        return known.get(name, {name} if value and name in _FEATURES else set())

    def _of_layout(self, values: Values) -> str:
        key = tuple((name, values[name]) for name in _OF_LAYOUTS if name in values)
        if len(key) < len(_OF_LAYOUTS) - 1:
            return ""
        if key not in self._of_layouts:
            spec = spec_of(dict(key), self._base)
            self._of_layouts[key] = layout_refusal(spec, values["layout"], values["page_size"])
        return self._of_layouts[key]

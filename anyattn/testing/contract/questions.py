"""What a backend's declaration leaves out, field by field, as questions that it has to refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from anyattn.attention.capabilities import FEATURES, Capabilities, feature_names
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError
from anyattn.testing.contract.covered import Covered, mla_spec, on_a_graph_device, plain_specs, sparse_spec
from anyattn.types import ALL_LAYOUTS, DTYPE_BYTES, FP8_DTYPES, ROLES, GraphLevel, Role

_HEAD_DIMS = (64, 128, 80, 96, 256, 512, 40, 8, 1, 1000)
_HEAD_DIM_PAIRS = ((192, 128), (64, 128), (128, 64), (32, 48))
_MLA_DIMS = ((512, 64), (64, 16), (256, 32))
_TOPKS = (1, 64, 100, 2048)
_GROUP_SIZES = (1, 2, 3, 5, 7, 8, 16, 71, 1000)
_NUMS_OF_QO_HEADS = (1, 2, 3, 5, 8, 16, 64, 128, 256, 320, 1024, 10_007)
_PAGE_SIZES = (1, 2, 3, 16, 64, 128, 256, 1024, 10_007)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked for, in words, and what it is asked with instead of what is covered, or beside it: paging."""

    asked: str
    spec: AttentionSpec | None = None
    device: Platform | None = None
    roles: tuple[Role, ...] | None = None
    paging: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What a declaration does not cover, for one field.

    what: in words, for the check's name. field: that a reason has to name. capability: the declaration's field.
    values: what is not declared; nothing where everything is. ask: makes a question of each.
    """

    what: str
    field: str
    capability: str
    values: tuple[Any, ...]
    ask: Callable[[Covered, Any], Question]


def refusals(capabilities: Capabilities) -> Iterator[Refusal]:
    """For every field of a spec, every argument of paging and every fact that a declaration is about."""
    yield from _dtypes(capabilities)
    yield from _heads(capabilities)
    yield from _features(capabilities)
    yield from _graphs(capabilities)
    yield from _pages(capabilities)
    yield from _devices(capabilities)


def serves_mha(capabilities: Capabilities) -> bool:
    """Whether heads of keys and values are declared at all, and not MLA alone."""
    return capabilities.any_head_dim_pair or capabilities.head_dims is not None or bool(capabilities.head_dim_pairs)


def serves_dense(capabilities: Capabilities) -> bool:
    """Whether anything is declared but sparse MLA, whose cache and mask no spec can ask for otherwise."""
    return serves_mha(capabilities) or capabilities.any_mla_dims or bool(capabilities.mla_dims)


def _dtypes(capabilities: Capabilities) -> Iterator[Refusal]:
    dtypes, kv_dtypes = capabilities.dtypes, capabilities.kv_dtypes
    yield Refusal(
        what="another dtype",
        field="dtype",
        capability="dtypes",
        values=tuple(sorted(set(DTYPE_BYTES) - FP8_DTYPES - dtypes)),
        ask=lambda covered, dtype: Question(asked=f"dtype={dtype!r}", spec=covered.spec.replace(dtype=dtype)),
    )

    def with_kv_dtype(covered: Covered, kv_dtype: str) -> Question:
        dtype = covered.spec.dtype if covered.spec.dtype != kv_dtype else min(dtypes - {kv_dtype})
        spec = covered.spec.replace(dtype=dtype, kv_dtype=kv_dtype, may_quantize_q=True, may_quantize_probs=True)
        return Question(asked=f"kv_dtype={kv_dtype!r}", spec=spec)

    own = dtypes if len(dtypes) == 1 else set()  # which is no other dtype, whatever the spec
    yield Refusal(
        what="another kv_dtype",
        field="kv_dtype",
        capability="kv_dtypes",
        values=tuple(sorted(set(DTYPE_BYTES) - kv_dtypes - own)) if serves_dense(capabilities) else (),
        ask=with_kv_dtype,
    )
    fp8 = tuple(sorted(kv_dtypes & FP8_DTYPES))
    yield Refusal(
        what="kv_scale_per_head",
        field="kv_scale_per_head",
        capability="per_head_scales",
        values=()
        if capabilities.per_head_scales or not serves_mha(capabilities)
        else (fp8 or tuple(sorted(FP8_DTYPES))),
        ask=lambda covered, dtype: Question(
            asked="kv_scale_per_head=True",
            spec=covered.spec.replace(
                kv_dtype=dtype, kv_scale_per_head=True, may_quantize_q=True, may_quantize_probs=True
            ),
        ),
    )
    for name, other, quantizes in (
        ("may_quantize_q", "may_quantize_probs", capabilities.quantizes_q),
        ("may_quantize_probs", "may_quantize_q", capabilities.quantizes_probs),
    ):
        yield Refusal(
            what=f"an fp8 cache without {name}",
            field=name,
            capability=name.replace("may_quantize", "quantizes"),
            values=fp8 if quantizes else (),
            ask=lambda covered, dtype, name=name, other=other: Question(  # type: ignore[misc]
                asked=f"kv_dtype={dtype!r} with {name}=False",
                spec=covered.spec.replace(kv_dtype=dtype, **{name: False, other: True}),
            ),
        )


def _heads(capabilities: Capabilities) -> Iterator[Refusal]:
    any_pair, pairs = capabilities.any_head_dim_pair, capabilities.head_dim_pairs
    dims = capabilities.head_dims or ()

    def mha(covered: Covered, qk: int, vo: int) -> AttentionSpec:
        spec = covered.spec
        kv_heads = 1 if spec.is_mla else spec.num_kv_heads
        return AttentionSpec(
            num_qo_heads=spec.group_size * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=qk,
            v_head_dim=None if qk == vo else vo,
            dtype=spec.dtype,
            causal=spec.causal,
        )

    yield Refusal(
        what="another head_dim",
        field="head_dim",
        capability="head_dims",
        values=() if any_pair else tuple(d for d in _HEAD_DIMS if d not in dims and (d, d) not in pairs),
        ask=lambda covered, dim: Question(asked=f"head_dim={dim}", spec=mha(covered, dim, dim)),
    )
    yield Refusal(
        what="another v_head_dim",
        field="head_dim",
        capability="head_dim_pairs",
        values=() if any_pair else tuple(pair for pair in _HEAD_DIM_PAIRS if pair not in pairs),
        ask=lambda covered, pair: Question(
            asked=f"head_dim={pair[0]} with v_head_dim={pair[1]}", spec=mha(covered, *pair)
        ),
    )
    yield Refusal(
        what="MLA of other dims",
        field="kv_lora_rank",
        capability="mla_dims",
        values=() if capabilities.any_mla_dims else tuple(d for d in _MLA_DIMS if d not in capabilities.mla_dims),
        ask=lambda covered, d: Question(
            asked=f"MLA with kv_lora_rank={d[0]} and qk_rope_head_dim={d[1]}",
            spec=mla_spec(
                *d, num_qo_heads=covered.spec.group_size, dtype=covered.spec.dtype, causal=covered.spec.causal
            ),
        ),
    )
    topk = capabilities.topk
    yield Refusal(
        what="sparse MLA" if topk is None else "another topk",
        field="topk",
        capability="topk",
        values=_TOPKS[-1:] if topk is None else tuple(each for each in _TOPKS if each not in topk),
        ask=lambda covered, value: Question(
            asked=f"topk={value}",
            spec=sparse_spec(value, num_qo_heads=covered.spec.group_size, dtype=covered.spec.dtype).replace(
                may_quantize_q=True, may_quantize_probs=True
            ),
        ),
    )
    yield Refusal(
        what="another number of query heads a KV head",
        field="num_qo_heads",
        capability="group_sizes",
        values=tuple(size for size in _GROUP_SIZES if size not in capabilities.group_sizes),
        ask=lambda covered, size: Question(
            asked=f"{size} query heads a KV head",
            spec=covered.spec.replace(num_qo_heads=size * covered.spec.num_kv_heads),
        ),
    )

    def with_heads(covered: Covered, number: int) -> Question:
        spec, group = covered.spec, covered.spec.group_size
        kv_heads = 1 if spec.is_mla else number // group if number % group == 0 else number
        return Question(asked=f"{number} query heads", spec=spec.replace(num_qo_heads=number, num_kv_heads=kv_heads))

    yield Refusal(
        what="another number of query heads",
        field="num_qo_heads",
        capability="num_qo_heads",
        values=tuple(number for number in _NUMS_OF_QO_HEADS if number not in capabilities.num_qo_heads),
        ask=with_heads,
    )


def _features(capabilities: Capabilities) -> Iterator[Refusal]:
    is_dense = serves_dense(capabilities)
    for causal in (False, True):
        yield Refusal(
            what=f"causal={causal}",
            field="causal",
            capability="causal",
            values=(causal,) if causal not in capabilities.causal and is_dense else (),
            ask=lambda covered, value: Question(asked=f"causal={value}", spec=covered.spec.replace(causal=value)),
        )
    for name, declared, value in (
        ("sliding_window", "sliding_window", 33),
        ("logits_soft_cap", "logits_soft_cap", 30.0),
        ("sinks", "sinks", True),
        ("alibi", "alibi", True),
        ("tree_mask", "tree_mask", True),
        ("return_lse", "lse", True),
        ("deterministic", "deterministic", True),
    ):
        if name in ("sliding_window", "alibi", "tree_mask") and not is_dense:
            continue
        needed = {"causal": True} if name in ("sliding_window", "tree_mask") else {}  # the spec allows no other
        yield Refusal(
            what=name,
            field=name,
            capability=declared,
            values=() if getattr(capabilities, declared) else (value,),
            ask=lambda covered, value, name=name, needed=needed: Question(  # type: ignore[misc]
                asked=f"{name}={value}", spec=covered.spec.replace(**needed, **{name: value})
            ),
        )
    for pair in capabilities.not_together:
        yield Refusal(
            what=f"{pair[1]} together with {pair[0]}",
            field=FEATURES[pair[1]],
            capability="not_together",
            values=(pair,),
            ask=lambda covered, pair: _of_both(capabilities, covered, pair),
        )
    filled = {"decode": {"decode"}, "prefill": {"prefill", "mixed"}}
    yield Refusal(
        what="a role whose phases are not declared",
        field="phase",
        capability="phases",
        values=tuple(role for role in ROLES if not filled[role] <= capabilities.phases),
        ask=lambda covered, role: Question(asked=f"the role {role}", roles=(role,)),
    )


def _of_both(capabilities: Capabilities, covered: Covered, pair: tuple[str, str]) -> Question:
    question = Question(asked=" and ".join(pair), spec=_with_both(capabilities, pair))
    if "graph" not in pair:
        return question
    device, roles = on_a_graph_device(covered.device), _graph_roles(capabilities.graph)
    return dataclasses.replace(question, device=device, roles=roles)


def _with_both(capabilities: Capabilities, pair: tuple[str, str]) -> AttentionSpec:
    """A spec with two features. Raises CheckFailedError where the declaration covers none that could have both."""
    fp8 = min(capabilities.kv_dtypes & FP8_DTYPES, default="float8_e4m3fn")
    fields: dict[str, dict[str, Any]] = {
        "fp8": {"kv_dtype": fp8, "may_quantize_q": True, "may_quantize_probs": True},
        "kv_scale_per_head": {"kv_dtype": fp8, "kv_scale_per_head": True},
        "non_causal": {"causal": False},
        "sliding_window": {"sliding_window": 33},
        "logits_soft_cap": {"logits_soft_cap": 30.0},
        **({"graph": {"graph": capabilities.graph}} if capabilities.graph else {}),
        **{name: {name: True} for name in ("sinks", "alibi", "tree_mask", "return_lse", "deterministic")},
    }
    of_base = set(pair) - fields.keys()
    base = next((spec for spec in plain_specs(capabilities) if of_base <= feature_names(spec)), None)
    asked: dict[str, Any] = {name: value for each in pair for name, value in fields.get(each, {}).items()}
    try:
        if base is not None:
            return base.replace(**asked)
    except SpecError:
        base = None
    raise CheckFailedError(
        f"no spec has both {pair[0]} and {pair[1]} of not_together: leave out the pair, as it never comes up."
    )


def _graphs(capabilities: Capabilities) -> Iterator[Refusal]:
    most = capabilities.graph
    yield Refusal(
        what="a higher graph level",
        field="graph",
        capability="graph",
        values=tuple(level for level in GraphLevel if level > most),
        ask=lambda covered, level: Question(
            asked=f"graph={level.name.lower()!r}",
            spec=covered.spec.replace(graph=level),
            device=on_a_graph_device(covered.device),
            roles=_graph_roles(level),
        ),
    )
    yield Refusal(
        what="a graph level that the device lacks",
        field="graph",
        capability="graph",
        values=() if most == GraphLevel.NEVER else (most,),
        ask=lambda covered, level: Question(
            asked=f"graph={level.name.lower()!r} on a device without graphs",
            spec=covered.spec.replace(graph=level),
            device=dataclasses.replace(covered.device, graph=GraphLevel.NEVER),
            roles=_graph_roles(level),
        ),
    )


def _graph_roles(level: GraphLevel) -> tuple[Role, ...]:
    """Whose backend has the graphs of a level, and of none below."""
    return ("decode",) if level == GraphLevel.DECODE else ("prefill",)


def _pages(capabilities: Capabilities) -> Iterator[Refusal]:
    for name, capability, values in (
        ("page_size", "page_sizes", [size for size in _PAGE_SIZES if size not in capabilities.page_sizes]),
        ("layout", "layouts", [layout for layout in ALL_LAYOUTS if layout not in capabilities.layouts]),
        ("joined_layers", "strided_pages", [] if capabilities.strided_pages else [True]),
    ):
        yield Refusal(
            what=name if values == [True] else f"another {name}",
            field=name,
            capability=capability,
            values=tuple(values),
            ask=lambda covered, value, name=name: Question(  # type: ignore[misc]
                asked=f"{name}={value!r}", paging={name: value}
            ),
        )


def _devices(capabilities: Capabilities) -> Iterator[Refusal]:
    for name, fact, declared in (
        ("device_kind", "kind", capabilities.device_kinds),
        ("arch", "arch", capabilities.archs),
    ):
        yield Refusal(
            what=f"a device of another {fact}",
            field=name,
            capability=f"{name}s",
            values=() if declared is None else (f"no such {fact}",),
            ask=lambda covered, value, fact=fact: Question(  # type: ignore[misc]
                asked=f"a device of {fact} {value!r}", device=dataclasses.replace(covered.device, **{fact: value})
            ),
        )
    yield Refusal(
        what="a device without a feature",
        field="features",
        capability="features",
        values=tuple(sorted(capabilities.features)),
        ask=lambda covered, feature: Question(
            asked=f"a device without {feature}",
            device=dataclasses.replace(covered.device, features=covered.device.features - {feature}),
        ),
    )

"""The values that cases are made of: sizes, steps and features, those of them that a backend declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.types import ANY_INT, IntSet, Phase

Fields = dict[str, Any]

HEAD_DIMS = (64, 128, 256, 16, 80, 72, 96, 192)
GROUP_SIZES = (1, 2, 3, 5, 6, 7, 8, 16, 71)
_USUAL_GROUP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16)
_USUAL_MLA_HEADS = (1, 5, 8, 16, 64, 128)
_PAGE_SIZES = (16, 64, 1, 3, 128, 256)
_MLA_DIMS = ((64, 16), (512, 64))

STEPS = (
    (40, 0, 7, 129),  # prefill of odd lengths, one sequence still empty
    (5, 63, 1, 0),  # chunked prefill and a decode in one step, one sequence rests
    (1, 1, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 0),
    (2, 3, 4, 5),
    (1, 1, 1, 1),
)
EXACT_WINDOW = 129
"""As long as a sequence of `STEPS` at first."""
ENDLESS_WINDOW = 4096
"""Longer than any."""


def base_specs(capabilities: Capabilities) -> Iterator[AttentionSpec]:
    """Plain ones: of heads, then of each of MLA's dims."""
    dtype = next(d for d in ("bfloat16", "float16", "float32", "float64") if d in capabilities.dtypes)
    causal = max(capabilities.causal)
    groups = capabilities.group_sizes
    if (dims := next(head_dims(capabilities), None)) is not None:
        group = next((size for size in (4, *GROUP_SIZES) if size in groups), groups.example())
        kv_heads = num_kv_heads(capabilities, group)
        yield AttentionSpec(
            num_qo_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=dims[0],
            v_head_dim=None if dims[0] == dims[1] else dims[1],
            dtype=dtype,
            causal=causal,
        )
    group = next((size for size in (8, 16, 4, *GROUP_SIZES) if size in groups), groups.example())
    for rank, rope in mla_dims(capabilities):
        yield AttentionSpec.mla(
            num_qo_heads=group,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            sm_scale=(rank + rope) ** -0.5,
            dtype=dtype,
            causal=causal,
        )


def num_kv_heads(capabilities: Capabilities, group_size: int) -> int:
    """Two, where so many query heads are declared."""
    usual = (2, 1, 3, 4, 8, 16, 32, 64)
    return next((number for number in usual if number * group_size in capabilities.num_qo_heads), usual[0])


def mla_dims(capabilities: Capabilities) -> list[tuple[int, int]]:
    """Of latents and of rope parts."""
    return sorted(capabilities.mla_dims) or list(_MLA_DIMS if capabilities.any_mla_dims else ())


def head_dims(capabilities: Capabilities) -> Iterator[tuple[int, int]]:
    """Of keys and of values."""
    equal = ANY_INT if capabilities.any_head_dim_pair else capabilities.head_dims
    yield from ((d, d) for d in (_members(HEAD_DIMS, equal) if equal is not None else ()))
    yield from sorted(capabilities.head_dim_pairs)
    if capabilities.any_head_dim_pair:
        yield from ((192, 128), (32, 48))


def page_sizes(capabilities: Capabilities) -> tuple[int, ...]:
    """The usual one first: what is preferred, or one that a sequence does not fill, where there is any."""
    declared = _members(_PAGE_SIZES, capabilities.page_sizes)
    return tuple(dict.fromkeys([capabilities.preferred_page_size or declared[0], *declared]))


def group_sizes(capabilities: Capabilities, *, is_mla: bool) -> list[int]:
    """Query heads a KV head, as models have them: of the one latent of MLA, all the heads of a device."""
    return _members(_USUAL_MLA_HEADS if is_mla else _USUAL_GROUP_SIZES, capabilities.group_sizes)


def _members(usual: tuple[int, ...], declared: IntSet) -> list[int]:
    """Of a declared set: the usual numbers first, and each that is listed; one where that is none."""
    found = [number for number in usual if number in declared]
    return [*found, *sorted((declared.values or frozenset()) - {*found})] or [declared.example()]


def window_sizes(page_size: int) -> list[int]:
    """Of sliding windows, at the edges of pages and sequences."""
    near = (page_size - 1, page_size, page_size + 1)
    return [size for size in dict.fromkeys((1, 2, *near, 33, 64, EXACT_WINDOW, ENDLESS_WINDOW)) if size > 0]


def steps_of_pages(page_size: int) -> tuple[tuple[int, ...], ...]:
    """`STEPS`, where they do not fill two pages with a longer prompt, which does."""
    if 2 * page_size < STEPS[0][-1]:
        return STEPS
    return ((*STEPS[0][:-1], 2 * page_size + 1), *STEPS[1:])


def declared_phases(capabilities: Capabilities, *phases: Phase) -> bool:
    """Whether all of these are declared, as the role that they belong to asks for."""
    return set(phases) <= capabilities.phases


def features(capabilities: Capabilities, *names: str) -> Iterator[tuple[str, Fields]]:
    """The declared ones, each with the spec's fields that ask for it. names: of those wanted; none for all."""
    values: dict[str, Fields] = {
        "sliding_window": {"sliding_window": 33},
        "logits_soft_cap": {"logits_soft_cap": 3.0},
        "sinks": {"sinks": True},
        "alibi": {"alibi": True},
        "tree_mask": {"tree_mask": True},
    }
    for name, fields in values.items():
        needs_trees = name == "tree_mask" and not declared_phases(capabilities, "prefill", "mixed", "verify")
        needs_causal = name in ("sliding_window", "tree_mask") and True not in capabilities.causal
        if getattr(capabilities, name) and name in (names or values) and not needs_trees and not needs_causal:
            yield name, dict(fields)


def serves(capabilities: Capabilities, name: str) -> bool:
    """Whether a feature is declared, with what it needs besides."""
    return any(True for _ in features(capabilities, name))

"""The values that cases are made of: sizes, steps and features, those of them that a backend declares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.types import Phase

Fields = dict[str, Any]

HEAD_DIMS = (64, 128, 256, 16, 80, 72, 96, 192)
GROUP_SIZES = (1, 2, 3, 5, 6, 7, 8, 16, 71)
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
        yield AttentionSpec(
            num_qo_heads=2 * group,
            num_kv_heads=2,
            head_dim=dims[0],
            v_head_dim=None if dims[0] == dims[1] else dims[1],
            dtype=dtype,
            causal=causal,
        )
    group = next((size for size in (8, 16, 4, *GROUP_SIZES) if size in groups), groups.example())
    for rank, rope in sorted(capabilities.mla_dims) or (_MLA_DIMS if capabilities.any_mla_dims else ()):
        yield AttentionSpec.mla(
            num_qo_heads=group,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            sm_scale=(rank + rope) ** -0.5,
            dtype=dtype,
            causal=causal,
        )


def head_dims(capabilities: Capabilities) -> Iterator[tuple[int, int]]:
    """Of keys and of values."""
    equal = capabilities.head_dims
    found = [d for d in HEAD_DIMS if capabilities.any_head_dim_pair or d in (equal or ())]
    if equal is not None and not found:
        found = [equal.example()]
    yield from ((d, d) for d in found)
    yield from sorted(capabilities.head_dim_pairs)
    if capabilities.any_head_dim_pair:
        yield from ((192, 128), (32, 48))


def page_sizes(capabilities: Capabilities) -> tuple[int, ...]:
    """The usual one first: what is preferred, or one that a sequence does not fill, where there is any."""
    declared = [size for size in _PAGE_SIZES if size in capabilities.page_sizes]
    usual = capabilities.preferred_page_size or next(iter(declared), capabilities.page_sizes.example())
    return tuple(dict.fromkeys([usual, *declared]))


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

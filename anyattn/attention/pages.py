"""Where sets of page sizes and layouts meet: the pages that backends, pools and allocators can agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.selection import Preference
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import SpecError
from anyattn.mem_cache.base import AllocatorCapabilities
from anyattn.types import KV_LAYOUTS, IntSet, KVLayout

USUAL_PAGE_SIZES = (16, 64, 32, 128, 256, 1, 2, 4, 8, 512, 1024)
"""In the order in which they are taken where nothing else decides."""

_PIECES = (2, 4, 8, 16)
"""In tokens: what vendors' layouts cut a page into, by the size of an element; see mem_cache/layouts.py."""


def page_size_for_every_layout(page_size: int | None) -> int:
    """A page size that every layout can be cut into, where it can hold the layers' dims at all."""
    return -(-(page_size or 1) // _PIECES[-1]) * _PIECES[-1]


def refusal(spec: AttentionSpec, layout: KVLayout, page_size: int | None) -> str:
    """Why a layout cannot hold pages of such layers, empty where it can; without a page size, not at any."""
    if layout in KV_LAYOUTS:  # these take every size
        return ""
    try:
        spec.cache_spec(num_layers=1, page_size=page_size or page_size_for_every_layout(None), layout=layout)
    except SpecError as error:
        return str(error)
    return ""


def holds(spec: AttentionSpec, layout: KVLayout, page_size: int | None) -> bool:
    """Whether a layout can hold pages of such layers; without a page size, at any."""
    return not refusal(spec, layout, page_size)


def page_sizes_of(spec: AttentionSpec, layout: KVLayout) -> IntSet | None:
    """The page sizes at which a layout can hold such layers."""
    step = next((step for step in (1, *_PIECES) if holds(spec, layout, step)), None)
    return None if step is None else IntSet(multiple_of=step)


def pages_worth_trying(
    backends: Iterable[Capabilities], allocators: Iterable[AllocatorCapabilities], preference: Preference
) -> Iterator[tuple[int, KVLayout]]:
    """Page sizes and layouts, only those asked for where there are any: sets that meet, meet in one of these.

    A set is either listed, so that its members are tried, or all multiples of a number between bounds. Two or more of
    the second sort meet, if at all, in the first common multiple at or above the largest lower bound.
    """
    backends = list(backends)
    sets = [*(c.page_sizes for c in backends), *(a.page_sizes for a in allocators)]
    layouts = sorted({layout for c in backends for layout in c.layouts if preference.layout in (None, layout)})
    stepped = [numbers for numbers in sets if numbers.values is None]
    steps = {numbers.multiple_of for numbers in stepped}
    if not set(layouts) <= set(KV_LAYOUTS):
        steps |= set(_PIECES)
    common = {
        math.lcm(*some) for count in range(1, len(steps) + 1) for some in combinations(sorted(steps), count)
    }
    sizes = {
        *USUAL_PAGE_SIZES,
        *(c.preferred_page_size for c in backends if c.preferred_page_size is not None),
        *(size for numbers in sets for size in numbers.values or ()),
        *(-(-numbers.minimum // step) * step for numbers in stepped for step in common),
    }
    if preference.page_size is not None:
        sizes = {preference.page_size}
    for size in sorted(sizes):
        for layout in layouts:
            yield size, layout

"""Where sets of page sizes and layouts meet: the pages that backends, pools and allocators can agree on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.selection import Preference
from anyattn.mem_cache.base import AllocatorCapabilities
from anyattn.types import KVLayout

USUAL_PAGE_SIZES = (16, 64, 32, 128, 256, 1, 2, 4, 8, 512, 1024)
"""In the order in which they are taken where nothing else decides."""


def pages_worth_trying(
    backends: Iterable[Capabilities], allocators: Iterable[AllocatorCapabilities], preference: Preference
) -> Iterator[tuple[int, KVLayout]]:
    """Page sizes and layouts, only those asked for where there are any: sets that meet, meet in one of these.

    A set is either listed, so that its members are tried, or all multiples of a number between bounds. Two or more of
    the second sort meet, if at all, in the first common multiple at or above the largest lower bound.
    """
    backends = list(backends)
    sets = [*(c.page_sizes for c in backends), *(a.page_sizes for a in allocators)]
    stepped = [numbers for numbers in sets if numbers.values is None]
    steps = {numbers.multiple_of for numbers in stepped}
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
        for layout in sorted({layout for c in backends for layout in c.layouts}):
            if preference.layout in (None, layout):
                yield size, layout

"""Few combinations of several factors' values in which each two values of different factors meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations as pairs_of
from itertools import product


def combinations(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """sizes: how many values each factor has. Returns the number of a value for each factor; always the same ones.

    Each combination begins with a pair that none before it has. Its other values are those that bring the most such
    pairs, and of these the one that is in the fewest combinations so far.
    """
    missing = {
        ((a, i), (b, j))
        for a, b in pairs_of(range(len(sizes)), 2)
        for i, j in product(range(sizes[a]), range(sizes[b]))
    }
    found: list[tuple[int, ...]] = []
    while missing:
        chosen = dict(min(missing, key=lambda pair: [-each[1] for each in pair]))
        for factor in range(len(sizes)):
            if factor not in chosen:
                used = [values[factor] for values in found]
                gains = [(_gain((factor, i), chosen, missing), -used.count(i)) for i in range(sizes[factor])]
                chosen[factor] = gains.index(max(gains))
        values = tuple(chosen[factor] for factor in range(len(sizes)))
        missing -= set(pairs_of(enumerate(values), 2))
        found.append(values)
    return found


def _gain(each: tuple[int, int], chosen: dict[int, int], missing: set[tuple[tuple[int, int], tuple[int, int]]]) -> int:
    """How many pairs that are missing it makes with what is chosen."""
    return sum((min(each, other), max(each, other)) in missing for other in chosen.items())

"""Few combinations of several factors' values in which each two values of different factors meet, where they can."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations as two_of
from typing import Any

Named = tuple[str, Any]
"""What a value is of, and the value: ("page_size", 16)."""
Pair = tuple[Named, Named]
Values = dict[str, Any]
"""Values by what they are of. One value of a factor may stand for several at once, as a variant of a kernel does."""
Refusal = Callable[[Values], str]
"""Why such values do not go together, empty where they do; what is refused stays so when more values join it."""


def pairs(factors: Sequence[Sequence[Values]]) -> list[Pair]:
    """Each two values of different factors, those of the factors with the most values first."""
    named = [list(dict.fromkeys(each for value in values for each in value.items())) for values in factors]
    largest_first = sorted(two_of(named, 2), key=lambda two: -len(two[0]) * len(two[1]))
    return [(a, b) for first, second in largest_first for a in first for b in second]


def combinations(
    factors: Sequence[Sequence[Values]], wanted: Iterable[Pair], refusal: Refusal
) -> tuple[list[Values], list[Pair]]:
    """Combinations in which the wanted pairs meet, and the pairs that no combination can hold; always the same ones.

    Each combination begins with a pair that none before it has. Its other values are those that bring the most such
    pairs, and of these the ones that are in the fewest combinations so far.
    """
    wanted = list(wanted)
    search = _Search(wanted, refusal)
    found: list[Values] = []
    impossible: list[Pair] = []
    for a, b in wanted:
        if b not in search.missing[a]:
            continue
        chosen = search.completed(dict((a, b)), factors)
        if chosen is None:
            impossible.append((a, b))
            search.drop(a, b)
        else:
            found.append(chosen)
            search.keep(chosen)
    return found, impossible


class _Search:
    """What is missing, by each of a pair, and how often each value is in a combination."""

    def __init__(self, wanted: Iterable[Pair], refusal: Refusal) -> None:
        self.missing: defaultdict[Named, set[Named]] = defaultdict(set)
        for a, b in wanted:
            self.missing[a].add(b)
            self.missing[b].add(a)
        self._refusal = refusal
        self._used: Counter[Named] = Counter()

    def completed(self, chosen: Values, factors: Sequence[Sequence[Values]]) -> Values | None:
        """The chosen values with one of each factor; None where no values of these go with them."""
        if self._refusal(chosen):
            return None
        if not factors:
            return chosen
        values, *others = factors
        fitting = [
            {**chosen, **value}
            for value in values
            if all(chosen.get(name, wanted) == wanted for name, wanted in value.items())
        ]
        for more in sorted(fitting, key=self._rank(chosen)):
            if (done := self.completed(more, others)) is not None:
                return done
        return None

    def _rank(self, chosen: Values) -> Callable[[Values], tuple[int, int]]:
        before = set(chosen.items())

        def rank(more: Values) -> tuple[int, int]:
            there = set(more.items())
            added = there - before
            gain = sum(len(self.missing[each] & there) for each in added)
            return -gain, sum(self._used[each] for each in added)

        return rank

    def keep(self, chosen: Values) -> None:
        self._used.update(chosen.items())
        for a, b in two_of(chosen.items(), 2):
            self.drop(a, b)

    def drop(self, a: Named, b: Named) -> None:
        self.missing[a].discard(b)
        self.missing[b].discard(a)


def in_pairs(chosen: Iterable[Values]) -> Iterator[Pair]:
    """The pairs that are in combinations, in both orders."""
    for values in chosen:
        for a, b in two_of(values.items(), 2):
            yield a, b
            yield b, a

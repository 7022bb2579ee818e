"""Few cells in which every two values that a backend declares meet: phases, dtypes, heads, pages, features, graphs.

Heads of keys and values have one matrix, and MLA's latents another. Libraries compile a kernel for each variant of
dtypes, dims, window and soft cap. So few variants are made first, in which each two of those values meet; then they
meet all the rest. Steps without a graph are a matrix by themselves, as not every device has graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.testing.check import CannotRunError, Check, CheckFailedError
from anyattn.testing.numerics.case import Case, Section
from anyattn.testing.numerics.combinations import Named, Pair, Values, combinations, in_pairs, pairs
from anyattn.testing.numerics.matrix_values import PLAIN, Factors, Rules, factors_of, spec_of, words
from anyattn.testing.numerics.values import base_specs
from anyattn.types import GraphLevel

_VARIANT = ("dtype", "kv_dtype", "head_dims", "mla_dims", "sliding_window", "logits_soft_cap")
"""What kernels are compiled for."""
_MOST_VARIANTS = 12
"""With more, a variant's values meet every other value, but not each variant does."""
_LARGEST_UNIFORM = 3  # new tokens of each sequence, where all have as many
_LARGEST_GROUP = 16  # query heads a KV head; those of more get few new tokens, which are many rows still


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """values: what meets in it. case: its spec, pages and steps.

    graph: the level of the graph that its steps are replayed in; never, where they run without one.
    """

    values: tuple[Named, ...]
    case: Case
    graph: GraphLevel


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Two declared values that meet in no cell, or one that is in none. reason: in words."""

    values: tuple[Named, ...]
    reason: str

    def __str__(self) -> str:
        return " with ".join(map(words, self.values))


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Of heads, or of MLA's latents. factors: all declared values, by what they are of."""

    factors: Factors
    cells: tuple[Cell, ...]
    left_out: tuple[LeftOut, ...]

    def missing(self) -> list[Pair]:
        """Pairs of declared values that meet in no cell, and are not left out either."""
        met = set(in_pairs(dict(cell.values) for cell in self.cells))
        left_out = {frozenset(each.values) for each in self.left_out}
        return [
            (a, b)
            for a, b in pairs(_apart(self.factors))
            if (a, b) not in met and not left_out & {frozenset({a, b}), frozenset({a}), frozenset({b})}
        ]


@functools.lru_cache(maxsize=64)
def matrices(declared: Capabilities) -> tuple[Matrix, ...]:
    """That of heads and that of MLA's latents, where they are declared; always the same for a declaration."""
    bases = {base.is_mla: base for base in reversed(list(base_specs(declared)))}
    return tuple(_matrix(declared, base) for _, base in sorted(bases.items()) if factors_of(declared, base)["phase"])


def cells(declared: Capabilities) -> Iterator[Cell]:
    """Of all matrices."""
    for matrix in matrices(declared):
        yield from matrix.cells


def _matrix(declared: Capabilities, base: AttentionSpec) -> Matrix:
    factors = factors_of(declared, base)
    rules = Rules(declared, base, factors)
    there = {name: [value for value in values if (name, value) not in rules.alone] for name, values in factors.items()}
    of_variants = _apart(_variant(there))
    variants, _ = combinations(of_variants, pairs(of_variants), rules.refusal)
    without, levels = there["graph"][:1], there["graph"][1:]
    eager, impossible = _covered({**there, "graph": without}, variants, rules)
    variants = list({tuple(each.items()): each for each in map(_variant, eager)}.values())
    replayed, never_replayed = _covered({**there, "graph": levels}, variants, rules, only="graph")
    return Matrix(
        factors=factors,
        cells=tuple(_cell(declared, base, values) for values in [*eager, *replayed]),
        left_out=(
            *(LeftOut(values=(each,), reason=reason) for each, reason in rules.alone.items()),
            *(LeftOut(values=pair, reason=rules.why(*pair)) for pair in [*impossible, *never_replayed]),
        ),
    )


def _covered(
    factors: Factors, variants: Sequence[Values], rules: Rules, *, only: str = ""
) -> tuple[list[Values], list[Pair]]:
    """What holds all pairs of values, and the pairs that nothing can hold; other variants than these where it must.

    only: a factor, where just the pairs with one of its values are wanted.
    """
    apart = _apart(factors)
    few = len(variants) <= _MOST_VARIANTS
    numbered = [{**variant, **({"variant": number} if few else {})} for number, variant in enumerate(variants)]
    together = [numbered, *_apart({name: values for name, values in factors.items() if name not in _VARIANT})]
    wanted = [pair for pair in [*pairs(together), *pairs(apart)] if not only or only in dict(pair)]
    found, unmet = combinations(together, wanted, rules.refusal)
    more, impossible = combinations(apart, [pair for pair in unmet if "variant" not in dict(pair)], rules.refusal)
    return [{name: values[name] for name in factors} for values in [*found, *more]], impossible


def _variant(values: Values) -> Values:
    return {name: value for name, value in values.items() if name in _VARIANT}


def _apart(factors: Factors) -> list[list[Values]]:
    return [[{name: value} for value in values] for name, values in factors.items()]


def _cell(declared: Capabilities, base: AttentionSpec, values: Values) -> Cell:
    spec, size, layout = spec_of(values, base), values["page_size"], values["layout"]
    # The dims of MLA are what the names of all its cases begin with.
    shown = [each for each in values.items() if each not in PLAIN and each[0] != "mla_dims"]
    (case,) = Section(declared, spec, 0).case(
        f"matrix: {', '.join(map(words, shown))}",
        "combinations",
        spec={"kv_dtype": spec.kv_dtype},
        page_sizes=(size,),
        layouts=(layout,),
        scale_as_tensor=values["graph"] != GraphLevel.NEVER,
        **_steps(values, declared),
    )
    return Cell(values=tuple(values.items()), case=case, graph=values["graph"])


def _steps(values: Values, declared: Capabilities) -> dict[str, Any]:
    """Few steps of the phase, and what is stored before: the pages of a long sequence end in them."""
    long = max(129, values["page_size"] + 37)  # so that a window lets go of a page
    some, many = (33, 66) if values["group_size"] <= _LARGEST_GROUP else (9, 18)
    several = min(_LARGEST_UNIFORM, declared.decode_qo_len if declared.decode_qo_len > 1 else _LARGEST_UNIFORM)
    fewer, rest = ((max(several - 1, 2),) * 4, 1) if values["graph"] == GraphLevel.NEVER else ((0, several) * 2, 0)
    uniform = ((several,) * 4, fewer, (several,) * 4)  # in a graph, sequences without new tokens are padding
    ragged = ((5, 3, 7, 6), (9, 2, 1, 11))
    steps, before = {
        "prefill": (((some, 0, 7, 0), (0, many, 0, 2)), None),
        "chunked prefill": (((5, some, 2, 3), (7, 3, some, 2)), (long, 3, 17, 40)),
        "mixed": (((1, some, 5, 1), (7, 1, 0, 1)), (40, 3, 0, long)),
        "decode": (((1, 1, 1, 1), (rest, 1, rest, 1), (1, 1, 1, 1)), (long, 1, 0, 62)),
        "uniform": (uniform, (long, 1, 0, 62)),
        "verify": (ragged if values["graph"] == GraphLevel.NEVER else uniform, (long, 1, 0, 62)),
    }[values["phase"]]
    return {"steps": steps, "stored_before": before}


def checks(backend: type[AttentionBackend]) -> Iterator[Check]:
    """Of the tier numerics: whether the cells hold every two declared values, and what no cell can hold."""
    if not (found := matrices(backend.capabilities)):
        return
    yield Check(
        tier="numerics", name="every two declared values meet", capability="combinations", run=partial(_complete, found)
    )
    if any(matrix.left_out for matrix in found):
        yield Check(
            tier="numerics", name="values that cannot meet", capability="combinations", run=partial(_left_out, found)
        )


def _complete(found: Sequence[Matrix], seed: int) -> None:
    for matrix in found:
        if missing := matrix.missing():
            a, b = missing[0]
            raise CheckFailedError(
                f"{len(missing)} pairs of declared values are in no case, and nothing says why: {words(a)} with "
                f"{words(b)} is the first"
            )


def _left_out(found: Sequence[Matrix], seed: int) -> None:
    by_reason: dict[str, list[str]] = {}
    for each in (each for matrix in found for each in matrix.left_out):
        by_reason.setdefault(each.reason, []).append(str(each))
    texts = [f"{', '.join(dict.fromkeys(pairs_left_out))} ({reason})" for reason, pairs_left_out in by_reason.items()]
    raise CannotRunError(f"no case can hold {'; '.join(texts)}")

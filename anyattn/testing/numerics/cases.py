"""Which specs, batches and pages a backend must get right, derived from what it declares."""

from __future__ import annotations

from collections.abc import Iterator

from anyattn.attention.capabilities import Capabilities
from anyattn.testing.numerics.batch_cases import batches, inputs
from anyattn.testing.numerics.case import Case, Section
from anyattn.testing.numerics.feature_cases import (
    deterministic,
    pairs_with_masks,
    single_features,
    trees_and_sinks,
    windows,
)
from anyattn.testing.numerics.matrix import cells
from anyattn.testing.numerics.sparse_cases import sparse_cases
from anyattn.testing.numerics.storage_cases import dtypes, heads, joined_layers, pages
from anyattn.testing.numerics.values import base_specs
from anyattn.types import GraphLevel

__all__ = ["Case", "cases_for"]


def cases_for(capabilities: Capabilities) -> Iterator[Case]:
    """Every declared value at least once, against a case that is otherwise plain; then every two of them together.

    Declared dims of MLA are each such a case. The first base has all cases, and the first of MLA most of them; the
    others are tried with dtypes and single features. Sparse MLA has cases of its own.
    """
    names = set()
    bases = list(base_specs(capabilities))
    first_mla = next((base for base in bases if base.is_mla), None)
    for base in bases:
        depth = 2 if base is bases[0] else 1 if base is first_mla else 0
        for case in _cases(Section(capabilities, base, depth)):
            if case.name not in names:
                names.add(case.name)
                yield case
    yield from sparse_cases(capabilities)
    yield from (cell.case for cell in cells(capabilities) if cell.graph == GraphLevel.NEVER)


def _cases(section: Section) -> Iterator[Case]:
    yield from section.case("plain", "mla_dims" if section.base.is_mla else "contract")
    yield from dtypes(section)
    yield from single_features(section)
    if section.depth:
        for more in (pages, joined_layers, heads, windows, trees_and_sinks, batches, inputs):
            yield from more(section)
        yield from pairs_with_masks(section)
    yield from deterministic(section)

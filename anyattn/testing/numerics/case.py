"""A case, and the section of cases that differ from one plain spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.pages import holds
from anyattn.attention.spec import AttentionSpec
from anyattn.testing.numerics.inputs import Trees
from anyattn.testing.numerics.values import STEPS, Fields, page_sizes, steps_of_pages
from anyattn.types import FP8_DTYPES, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One spec and the steps it is driven through; tokens that each sequence gains in each step.

    capability: the field of the declaration that it is about, or "contract", or "combinations" of several.
    stored_before: tokens that each sequence has before the first step, stored without being attended.
    window_pages: where the spec has a window, whether its layers keep the window's pages only, in a pool of their own,
        so that the tables name the null page for all pages that were let go.
    joined_layers: whether the pages are those of some layers among several that share a storage.
    num_layers: that run with each step's plan, each with inputs of its own.
    scale_as_tensor: for fp8, whether k_scale and v_scale are tensors or floats; with `spec.kv_scale_per_head` they are
        tensors with a scale for each head.
    query_scale: deviation of q's elements, and of the scores.
    extreme_sinks, narrow_sinks, trees: see `inputs`. odd_strides: of q, k and v; otherwise they are parts of fused
        projections.
    """

    name: str
    spec: AttentionSpec
    page_size: int
    layout: KVLayout
    capability: str = "contract"
    steps: tuple[tuple[int, ...], ...] = STEPS
    stored_before: tuple[int, ...] | None = None
    window_pages: bool = True
    joined_layers: bool = False
    num_layers: int = 1
    scale_as_tensor: bool = False
    query_scale: float = 1.0
    extreme_sinks: bool = False
    narrow_sinks: bool = False
    trees: Trees = "each"
    odd_strides: bool = False

    @property
    def num_seqs(self) -> int:
        """Sequences in each step's batch."""
        return len(self.steps[0])


class Section:
    """The cases against one base spec, which is plain.

    depth: 2 for all of them, 1 for most, 0 for few. sizes: of pages, those to try, the usual one first.
    """

    def __init__(self, declared: Capabilities, base: AttentionSpec, depth: int) -> None:
        self.declared, self.base, self.depth = declared, base, depth
        self.sizes = page_sizes(declared)
        self._prefix = f"MLA {base.kv_lora_rank}+{base.qk_rope_head_dim} " if base.is_mla else ""

    def case(
        self,
        name: str,
        capability: str,
        *,
        layouts: tuple[KVLayout, ...] | None = None,
        page_sizes: tuple[int, ...] | None = None,
        spec: Fields | None = None,
        **fields: Any,
    ) -> Iterator[Case]:
        """One case, with the first of these pages that can hold it; none where none can or the heads are too many.

        spec: what is other than in the base.
        """
        asked = self.base.replace(**self._rounding(spec or {}))
        if asked.num_qo_heads not in self.declared.num_qo_heads:
            return
        for layout, size in product(layouts or self.declared.layouts, page_sizes or self.sizes):
            if holds(asked, layout, size) and not self.declared.pairs_in(asked):
                if "steps" not in fields:
                    fields["steps"] = steps_of_pages(size)
                yield Case(
                    name=self._prefix + name, capability=capability, spec=asked, page_size=size, layout=layout, **fields
                )
                return

    def _rounding(self, spec: Fields) -> Fields:
        """With an fp8 cache, a backend that rounds has to be allowed to."""
        if spec.get("kv_dtype") not in FP8_DTYPES:
            return spec
        return {
            **spec,
            "may_quantize_q": self.declared.quantizes_q,
            "may_quantize_probs": self.declared.quantizes_probs,
        }


def text_of(fields: Fields) -> str:
    """In words, for names."""
    return ", ".join(f"{name}={value}" for name, value in fields.items())

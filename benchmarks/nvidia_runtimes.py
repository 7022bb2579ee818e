"""The runtimes of anyattn that nvidia.py compares: named backends, and what is chosen where none is named."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from nvidia_results import AUTO, described
from nvidia_rows import Group, Row

import anyattn
from anyattn import Platform
from anyattn.attention.hybrid import PlannedStep
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.errors import AnyattnError
from anyattn.mem_cache.base import LayerKV
from anyattn.types import GraphLevel


class Runtimes:
    """Of one group, by backend and `AUTO`, over pools of the same content.

    reasons: why one is not there. failures: those among them that are no refusal of anyattn's.
    """

    def __init__(self, group: Group, rows: Sequence[Row], platform: Platform) -> None:
        self.of: dict[str, AttentionRuntime] = {}
        self.reasons: dict[str, str] = {}
        self.failures: list[str] = []
        num_pages = max(map(group.pages_of, rows))
        content: list[torch.Tensor] = []
        for backend in (*group.kernels, AUTO):
            try:
                rt = new_runtime(group, backend, num_pages, platform)
                pages = content_of(rt)
                content = content or [torch.randn_like(part[1:]) for part in pages]
                for part, values in zip(pages, content, strict=True):
                    part[1:].copy_(values)  # all but the null page
                self.of[backend] = rt
            except Exception as error:
                self.reasons[backend] = described(error)
                if not isinstance(error, AnyattnError):
                    self.failures.append(f"{group.name}, {backend}: {described(error)}")


def new_runtime(group: Group, backend: str, num_pages: int, platform: Platform) -> AttentionRuntime:
    """One layer on one backend, or on the chosen one. With graphs, where the group asks for them and it has some.

    Raises AnyattnError with the reasons where it cannot serve the group.
    """
    create = functools.partial(
        anyattn.create_runtime, num_layers=1, num_pages=num_pages, device=platform, page_size=group.page_size
    )
    names: dict[str, Any] = {}
    if backend != AUTO:
        names = {"decode_backend": backend, "layout": "NHD"}  # the raw kernels read the same pages
        if not group.decodes:
            names["prefill_backend"] = backend
    try:
        return create(group.spec, **names)
    except AnyattnError:
        if group.spec.graph == GraphLevel.NEVER:
            raise
    return create(group.spec.replace(graph="never"), **names)


def layer_kv(rt: AttentionRuntime) -> LayerKV:
    """The pages of the one layer."""
    return rt.pools[0].layers[rt.places[0][1]]


def planned(plan: Plan) -> PlannedStep:
    """The one spec's step: its backend, and that one's plan."""
    (step,) = plan.steps
    assert step is not None  # it is None for MLA with up-projections only
    return step


def content_of(rt: AttentionRuntime) -> list[torch.Tensor]:
    """Keys and values of the one layer, [num_pages, page_size, num_kv_heads, dim]; MLA's are one."""
    kv = layer_kv(rt)
    k, v = kv.nhd()
    return [k] if kv.v_in_k else [k, v]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """The layer's q, k and v of a step; MLA has no v."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None

    @classmethod
    def random(cls, group: Group, row: Row, device: torch.device) -> Inputs:
        """Normal ones."""
        spec, tokens = group.spec, int(row.qo_lens.sum())
        normal = functools.partial(torch.randn, dtype=getattr(torch, spec.dtype), device=device)
        q = normal(tokens, spec.num_qo_heads, spec.head_dim)
        if spec.is_mla:
            return cls(q=q, k=normal(tokens, spec.head_dim), v=None)
        k, v = (normal(tokens, spec.num_kv_heads, dim) for dim in (spec.head_dim, spec.vo_head_dim))
        return cls(q=q, k=k, v=v)

    def new_out(self, group: Group) -> torch.Tensor:
        """Where a step's output goes."""
        return self.q.new_empty(*self.q.shape[:2], group.spec.vo_head_dim)


@contextmanager
def open_step(rt: AttentionRuntime, row: Row) -> Iterator[Plan]:
    """A planned step over pages in random order, the same in every runtime. Its sequences are freed at the end."""
    allocator = rt.table.allocator
    pages = np.sort(allocator.alloc(allocator.num_free_pages))
    np.random.default_rng(row.length).shuffle(pages)
    allocator.free(pages)  # the page freed first is the first to be used
    seqs = rt.new_sequences(row.batch)
    try:
        prefix_lens = row.kv_lens - row.qo_lens
        if prefix_lens.any():
            rt.extend(seqs, prefix_lens.tolist())
        yield rt.plan(rt.extend(seqs, row.qo_lens.tolist()))
    finally:
        rt.free(seqs)

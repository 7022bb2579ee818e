"""What must stay in device graphs: the tensors that a plan leads to, and the KV data of everybody else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.mem_cache.layouts import as_bytes, tokens_view
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.step_view import StepView

_NOT_PLANS = (str, bytes, int, float, complex, type, ModuleType)
_OTHERS = (AttentionRuntime, AttentionBackend, PageTable, StepView)
"""Objects that plans may name and that are not theirs."""


def addresses(plan: Plan) -> dict[str, int]:
    """Where each tensor lies that a captured `run` may read: the batch's, and those of the backend's plan by name."""
    seen: set[int] = set()
    found = dict(_tensors("batch", plan.batch, seen))
    for step in filter(None, plan.steps):
        found.update(_tensors(f"the plan of {type(step.backend).__name__}", step.plan, seen))
    device = plan.runtime.device.type
    return {
        path: tensor.data_ptr()
        for path, tensor in found.items()
        if tensor.device.type == device and tensor.layout == torch.strided and tensor.numel()
    }


def _tensors(path: str, value: Any, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """seen: ids of objects that were looked into."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if value is None or callable(value) or isinstance(value, (*_NOT_PLANS, *_OTHERS)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = [(f"{path}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [(f"{path}[{place}]", part) for place, part in enumerate(value)]
    else:
        names = dict.fromkeys([*_slots(type(value)), *getattr(value, "__dict__", ())])
        parts = [(f"{path}.{name}", getattr(value, name, None)) for name in names]
    for name, part in parts:
        yield from _tensors(name, part, seen)


def _slots(kind: type) -> list[str]:
    names = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return [name for slots in names for name in ((slots,) if isinstance(slots, str) else slots)]


def kv_bytes(rt: AttentionRuntime) -> list[list[torch.Tensor]]:
    """A copy of all KV data on the CPU: for each pool, for each layer's keys and values [num_slots, bytes]."""
    return [
        [
            _by_slot(part, kv.layout, "k" if part is kv.k or kv.v_in_k else "v")
            for kv in pool.layers
            for part in kv.stored
        ]
        for pool in rt.pools
    ]


def _by_slot(pages: torch.Tensor, layout: Any, part: Any) -> torch.Tensor:
    view = tokens_view(as_bytes(pages), layout, part)
    num_slots = view.shape[0] * view.shape[1] * view.shape[2]
    return view.cpu().reshape(num_slots, -1).contiguous().view(torch.uint8)


def changed_slots(before: list[torch.Tensor], after: list[torch.Tensor]) -> set[int]:
    """Slots of one pool in which any layer's keys or values are no longer the same bytes."""
    return {
        slot
        for old, new in zip(before, after, strict=True)
        for slot in (old != new).any(dim=1).nonzero().flatten().tolist()
    }

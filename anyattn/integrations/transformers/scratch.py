"""Steps whose keys and values come whole, from any cache or none: stored in pages for one call, then attended.

All layers of one spec share the pages of one scratch runtime, because each call brings everything anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import torch

from anyattn.attention.runtime import AttentionRuntime, Plan
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import ContractError
from anyattn.integrations.transformers.masks import StepMask
from anyattn.integrations.transformers.packing import Packing
from anyattn.integrations.transformers.specs import AttentionCall
from anyattn.settings import Settings
from anyattn.wiring import create_runtime

_MOST_RUNTIMES = 8  # a model needs one for each distinct layer; more than this is several models taking turns
_LIKELY_PAGE_SIZE = 16  # only the first runtime is made by it; the ones after it know


class _Store(threading.local):
    """A thread's scratch runtimes, the least used first. Threads share none, as a step is several calls long."""

    def __init__(self) -> None:
        self.runtimes: OrderedDict[Any, ScratchRuntime] = OrderedDict()


_store = _Store()


def release_scratch() -> None:
    """Frees the memory that attn_implementation="anyattn" holds between calls in this thread; it comes back on use."""
    _store.runtimes.clear()


def attend_whole(call: AttentionCall) -> torch.Tensor:
    """Attention over keys and values that come whole: [batch_size, q_length, num_qo_heads, v_head_dim]."""
    mask = call.require_mask()
    q_length, kv_length = call.q.shape[2], call.k.shape[2]
    if (mask.batch_size, mask.q_length, mask.kv_length) != (call.q.shape[0], q_length, kv_length):
        raise ContractError(
            f"{call.name} got a mask for {mask.batch_size} rows, {mask.q_length} queries and {mask.kv_length} keys "
            f"with {call.q.shape[0]} rows, {q_length} queries and {kv_length} keys. If a PagedCache is in use, the "
            "model changes keys between cache and attention: leave the cache out, or use PagedGenerator."
        )
    spec = call.spec(causal=mask.causal, sliding_window=call.checked_window(mask))
    key = (spec, call.q.device, Settings.from_env())
    scratch = _store.runtimes.pop(key, None) or ScratchRuntime(spec, call.q.device)
    _store.runtimes[key] = scratch
    while len(_store.runtimes) > _MOST_RUNTIMES:
        _store.runtimes.popitem(last=False)
    return scratch.attend(call, mask)


class ScratchRuntime:
    """A runtime of one layer that grows with the steps it is given."""

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._runtime: AttentionRuntime | None = None
        self._seqs: list[int] = []
        self._mask: StepMask | None = None  # of the step that is planned
        self._plan: Plan | None = None
        self._prefix_slots: torch.Tensor | None = None

    def attend(self, call: AttentionCall, mask: StepMask) -> torch.Tensor:
        """call's keys and values as `mask` says, planned at the first call with this mask."""
        packing = mask.packing
        if not packing.new.count:
            return call.q.new_zeros(call.q.shape[0], call.q.shape[2], call.q.shape[1], call.v.shape[-1])
        if self._mask is not mask or self._runtime is None or self._plan is None:
            self._runtime, self._plan = self._begin(packing)
            self._mask = mask
        if self._prefix_slots is not None:
            pool, prefix = self._runtime.pools[0], packing.prefix
            pool.store(0, prefix.take(call.k), prefix.take(call.v), self._prefix_slots)
        out = self._runtime.run(
            0,
            packing.queries.take(call.q),
            packing.new.take(call.k),
            packing.new.take(call.v),
            self._plan,
            sinks=call.sinks,
        )
        return packing.queries.put(out, call.q.shape[0], call.q.shape[2])

    def _begin(self, packing: Packing) -> tuple[AttentionRuntime, Plan]:
        self._mask = None
        runtime = self._fitting(packing)
        runtime.free(self._seqs)
        self._seqs = runtime.new_sequences(len(packing.new_lens))
        prefix = runtime.extend(self._seqs, packing.prefix_lens)
        self._prefix_slots = prefix.out_slots if packing.prefix.count else None
        return runtime, runtime.plan(runtime.extend(self._seqs, packing.new_lens))

    def _fitting(self, packing: Packing) -> AttentionRuntime:
        """The runtime, replaced by a larger one where it is too small; none of its contents are needed any more."""
        runtime = self._runtime
        lengths = [before + new for before, new in zip(packing.prefix_lens, packing.new_lens, strict=True)]
        page_size = _LIKELY_PAGE_SIZE if runtime is None else runtime.table.page_size
        while True:
            needed = sum(-(-length // page_size) for length in lengths)
            if runtime is not None and needed <= runtime.table.allocator.num_pages:
                return runtime
            num_pages = needed if runtime is None else max(needed, 2 * runtime.table.allocator.num_pages)
            self._runtime, self._seqs, runtime = None, [], None  # give the old pages back before taking new ones
            runtime = create_runtime(self._spec, num_layers=1, num_pages=num_pages, device=str(self._device))
            self._runtime, page_size = runtime, runtime.table.page_size

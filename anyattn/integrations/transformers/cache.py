"""A transformers cache whose keys and values live in an anyattn runtime's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from transformers import Cache, PreTrainedModel

from anyattn.attention.runtime import Plan
from anyattn.errors import ContractError
from anyattn.integrations.transformers.attention import NAME, mark, plain_tensors
from anyattn.integrations.transformers.cache_layer import HollowLayer
from anyattn.integrations.transformers.masks import StepMask
from anyattn.integrations.transformers.packing import Tokens, has_holes
from anyattn.integrations.transformers.probe import probe_layout
from anyattn.integrations.transformers.specs import AttentionCall
from anyattn.wiring import create_runtime

if TYPE_CHECKING:
    import numpy.typing as npt

    Bools = npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Step:
    """One forward under way. mask, plan, new: there once a layer attends.

    real: [batch_size, tokens so far], bool, which of them are no padding.
    """

    length: int
    batch_size: int
    updated: set[int] = field(default_factory=set)
    attended: set[int] = field(default_factory=set)
    handed_out: int | None = None
    mask: StepMask | None = None
    plan: Plan | None = None
    new: Tokens | None = None
    real: Bools | None = None


class PagedCache(Cache):
    """Keys and values in pages: `model.generate(..., past_key_values=PagedCache(model, num_pages=1024))`.

    The model must run with attn_implementation="anyattn". Padding takes no pages. One cache serves one batch of rows;
    `reset` gives its pages back for the next. Beam search and assisted decoding, which rearrange or crop a cache, are
    refused: leave the cache out for them, as attn_implementation="anyattn" works with transformers' own.

    runtime: holds the pages, and says what was selected: `cache.runtime.explain()`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_pages: int,
        page_size: int | None = None,
        backend: str | None = None,
    ) -> None:
        """num_pages, page_size, backend: as for `create_runtime`.

        Raises ContractError when the model cannot keep its cache here (see `probe_layout`).
        """
        self._layout = probe_layout(model, cached=True)
        if model.config.get_text_config()._attn_implementation != NAME:
            raise ContractError(
                f'a PagedCache needs the model to attend through anyattn: model.set_attn_implementation("{NAME}").'
            )
        with plain_tensors():
            self.runtime = create_runtime(
                self._layout.specs, num_pages=num_pages, page_size=page_size, backend=backend, device=str(model.device)
            )
        self._has_window = any(spec.sliding_window is not None for spec in self._layout.specs)
        self._seqs: list[int] = []
        self._real: Bools | None = None  # of all finished steps
        self._step: _Step | None = None
        self._paged_layers = [HollowLayer() for _ in range(max(self._layout.layers) + 1)]
        super().__init__(layers=list(self._paged_layers))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hands new keys and values on to the attention function, which stores them and attends.

        Raises ContractError when the attention function did not get those of the layer before.
        """
        step = self._step
        if step is not None and step.handed_out is not None:
            raise ContractError(
                f"layer {step.handed_out} did not attend to what this cache handed out. The model must run with "
                f'attn_implementation="{NAME}"; after an error in a forward, reset() the cache.'
            )
        if step is not None and layer_idx in step.updated:
            raise ContractError("the last forward with this cache did not reach all layers: reset() the cache.")
        batch_size, _, length, _ = key_states.shape
        if step is None:
            if self._real is not None and self._real.shape[0] != batch_size:
                raise ContractError(f"this cache holds {self._real.shape[0]} rows, not {batch_size}: reset() it first.")
            step = self._step = _Step(length=length, batch_size=batch_size)
        if (batch_size, length) != (step.batch_size, step.length):
            raise ContractError(
                f"layer {layer_idx} has {batch_size} rows of {length} new tokens, and a layer before it has "
                f"{step.batch_size} of {step.length}."
            )
        step.updated.add(layer_idx)
        step.handed_out = layer_idx
        self._paged_layers[layer_idx].length += length
        mark(self, key_states, value_states)
        return key_states, value_states

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Stores a layer's new keys and values and attends: the attention function's part of `update`."""
        step = self._step
        layer = self._layout.layer(call)
        if step is None or call.layer is None or call.layer in step.attended:
            raise ContractError(f"{call.name} attends to keys that this cache handed out in an earlier forward.")
        mask = call.require_mask()
        try:
            self._check(step, mask, call)
            if step.mask is None:
                self._begin(step, mask)
        except Exception:
            if step.mask is None:
                self._forget()
            raise
        assert step.new is not None
        out = call.q.new_zeros(0, call.q.shape[1], call.v.shape[-1])
        if step.plan is not None:
            q, k, v = (step.new.take(tensor) for tensor in (call.q, call.k, call.v))
            out = self.runtime.run(layer.index, q, k, v, step.plan, sinks=call.sinks)
        step.handed_out = None
        step.attended.add(call.layer)
        if step.attended == self._layout.layers.keys():
            self._finish(step)
        return step.new.put(out, step.batch_size, step.length)

    def _begin(self, step: _Step, mask: StepMask) -> None:
        """Reserves slots for the step's real tokens and plans. Changes nothing when it raises."""
        seen = 0 if self._real is None else self._real.shape[1]
        total = (step.batch_size, seen + step.length)
        real = np.ones(total, dtype=np.bool_) if mask.padding is None else mask.padding
        if real.shape != total or mask.q_offset != seen or mask.kv_offset != 0:
            raise ContractError(
                f"the mask is for {mask.batch_size} rows, {mask.q_length} new tokens from {mask.q_offset} and "
                f"{mask.kv_length} keys; this cache holds {seen} tokens, and {step.length} are new."
            )
        if self._real is not None and not np.array_equal(real[:, :seen], self._real):
            raise ContractError(
                "attention_mask calls a token padding that is in the cache, or one real that was left out of it: "
                "pass the mask of all tokens so far, unchanged."
            )
        if self._has_window and has_holes(real):
            raise ContractError("a layer has a sliding window: attention_mask must have padding on one side only.")
        new = real[:, seen:]
        rows, columns = np.nonzero(new)
        dense = rows.size == new.size
        step.new = Tokens.of_all_rows(step.batch_size, slice(0, step.length)) if dense else Tokens(rows, columns)
        if rows.size:
            step.plan = self._plan(new.sum(axis=1))
        step.mask, step.real = mask, real

    def _plan(self, counts: npt.NDArray[np.int_]) -> Plan:
        seqs = self._seqs or self.runtime.new_sequences(counts.size)
        extended = [(seq, count) for seq, count in zip(seqs, counts.tolist(), strict=True) if count]
        try:
            batch = self.runtime.extend([seq for seq, _ in extended], [count for _, count in extended])
        except Exception:
            if not self._seqs:
                self.runtime.free(seqs)
            raise
        self._seqs = seqs
        try:
            return self.runtime.plan(batch)
        except Exception:
            self.reset()  # the slots are reserved, and nothing will be stored there
            raise

    def _check(self, step: _Step, mask: StepMask, call: AttentionCall) -> None:
        spec = self._layout.layer(call).spec
        if not mask.agrees_with(causal=True, sliding_window=spec.sliding_window):
            raise ContractError(
                f"{call.name} has a mask with sliding_window={mask.sliding_window}, causal={mask.causal}, and computes "
                f"with sliding_window={spec.sliding_window}: the mask changed since this cache was made."
            )
        if step.mask is not None and not _same_tokens(mask, step.mask):
            raise ContractError(f"{call.name} has other tokens or another padding than the layers before it.")

    def _finish(self, step: _Step) -> None:
        self._real, self._step = step.real, None
        for layer in self._paged_layers:  # layers that attend to another one's keys have no update of their own
            layer.length = self._seen

    def _forget(self) -> None:
        """As before the step, for which nothing has been reserved."""
        self._step = None
        for layer in self._paged_layers:
            layer.length = self._seen

    @property
    def _seen(self) -> int:
        return 0 if self._real is None else int(self._real.shape[1])

    def reset(self) -> None:
        """Gives all pages back; the cache is then as new."""
        self.runtime.free(self._seqs)
        self._seqs, self._real, self._step = [], None, None
        for layer in self._paged_layers:
            layer.length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused, but for 0."""
        if tokens_to_remove:
            self._refuse("assisted decoding, which crops its cache")

    def reorder_cache(self, beam_idx: torch.Tensor) -> NoReturn:
        """Refused."""
        self._refuse("beam search, which reorders its cache")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Refused."""
        self._refuse("repeating the rows of a cache")

    def batch_select_indices(self, indices: Sequence[int] | torch.Tensor) -> NoReturn:
        """Refused."""
        self._refuse("selecting rows of a cache")

    def _refuse(self, what: str) -> NoReturn:
        self.reset()  # what was generated so far is lost, and nobody but this cache knows its pages
        raise ContractError(
            f"PagedCache does not serve {what}; its pages are free again. Leave the cache out: "
            f'attn_implementation="{NAME}" serves it with the cache that transformers makes by default.'
        )


def _same_tokens(one: StepMask, other: StepMask) -> bool:
    """Whether two layers' masks are of one step; their patterns may differ."""
    if one is other:
        return True
    if (one.q_length, one.kv_length) != (other.q_length, other.kv_length):
        return False
    if one.padding is None or other.padding is None:
        return one.padding is other.padding
    return bool(np.array_equal(one.padding, other.padding))

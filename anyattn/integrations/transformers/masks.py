"""What stands where transformers expects a mask: a step's queries, keys, padding and proven pattern, as data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from anyattn.errors import ContractError
from anyattn.integrations.transformers.packing import Packing, pack_bidirectional, pack_causal
from anyattn.integrations.transformers.patterns import SERVED, MaskFunction, Pattern, pattern_up_to, proven_pattern

if TYPE_CHECKING:
    import numpy.typing as npt

    Bools = npt.NDArray[np.bool_]

class _NotATensor(ContractError, AttributeError):
    """An AttributeError too, so that `hasattr` keeps its meaning."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepMask:
    """Stands where a mask tensor would: transformers hands it from the mask function to the attention function.

    q_length, q_offset: query i is at position q_offset + i. kv_length, kv_offset: likewise of the keys.
    padding: [batch_size, kv_length], bool, on the host, False for keys that are padding; None when none is.
    causal: position p sees no later one; otherwise every query sees every key.
    sliding_window: W where the mask hides something by it: p sees (p - W, p]. None when it hides nothing here.
    function, use_vmap: what transformers gave, for `pattern_up_to`.
    """

    batch_size: int
    q_length: int
    kv_length: int
    q_offset: int
    kv_offset: int
    padding: Bools | None
    causal: bool
    sliding_window: int | None
    function: MaskFunction
    use_vmap: bool

    @classmethod
    def unpadded(cls, batch_size: int, q_length: int, kv_length: int, *, causal: bool) -> StepMask:
        """Every key is real and before, or at, the last query."""
        return cls(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=kv_length - q_length,
            kv_offset=0,
            padding=None,
            causal=causal,
            sliding_window=None,
            function=causal_mask_function if causal else bidirectional_mask_function,
            use_vmap=False,
        )

    @property
    def ndim(self) -> int:
        """As of the 4D tensor that it stands for."""
        return 4

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As of the 4D tensor that it stands for."""
        return self.batch_size, 1, self.q_length, self.kv_length

    @property
    def num_visible_keys(self) -> int:
        """Keys up to the last query's own: all of them, but for caches that are larger than what they hold."""
        return self.q_offset + self.q_length - self.kv_offset if self.causal else self.kv_length

    @cached_property
    def packing(self) -> Packing:
        """The step's real tokens as sequences of a paged runtime. Raises SpecError where padding makes that inexact."""
        if not self.causal:
            return pack_bidirectional(self.batch_size, self.q_length, self.kv_length, self.padding)
        return pack_causal(
            self.batch_size,
            self.q_length,
            self.num_visible_keys,
            self.padding,
            has_window=self.sliding_window is not None,
        )

    def agrees_with(self, *, causal: bool, sliding_window: int | None) -> bool:
        """Whether a spec with this pattern hides just what this mask hides, at the lengths at hand."""
        if not self.causal or not causal:
            return self.causal == causal
        hides = sliding_window is not None and sliding_window < self.num_visible_keys
        return (sliding_window if hides else None) == self.sliding_window

    def pattern_up_to(self, num_positions: int) -> Pattern:
        """The pattern of the mask function at every length up to `num_positions`. Raises SpecError if it has none."""
        return pattern_up_to(num_positions, self.function, self.use_vmap)

    def __getitem__(self, index: Any) -> NoReturn:
        raise ContractError(_MISUSED)

    def __getattr__(self, name: str) -> NoReturn:
        raise _NotATensor(f"{name!r} was asked of an attention mask. {_MISUSED}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ContractError(_MISUSED)


_MISUSED = (
    "This model computes with its attention mask itself instead of handing it to the attention function, so it cannot "
    "run on anyattn. Load it with attn_implementation='sdpa' or 'eager'."
)


def step_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> StepMask:
    """The mask function that `register` gives to transformers; its parameters are AttentionMaskInterface's.

    attention_mask: [batch_size, number of tokens so far], True for real tokens; it may end before the keys do, and
        what is beyond it is padding.

    Raises SpecError when the mask is not one that a spec can say.
    """
    if isinstance(attention_mask, StepMask):  # made ahead by `generate`, as it does for compilable caches
        return attention_mask
    queries = range(int(q_offset), int(q_offset) + q_length)
    keys = range(kv_offset, kv_offset + kv_length)
    causal, window = proven_pattern(mask_function, use_vmap, batch_size, queries, keys, torch.device(device))
    return StepMask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=queries.start,
        kv_offset=kv_offset,
        padding=_padding(attention_mask, batch_size, keys),
        causal=causal,
        sliding_window=window,
        function=mask_function,
        use_vmap=use_vmap,
    )


def _padding(attention_mask: torch.Tensor | None, batch_size: int, keys: range) -> Bools | None:
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch_size:
        raise ContractError(
            f"attention_mask must be [{batch_size}, number of tokens], not {list(attention_mask.shape)}: "
            f"anyattn takes padding, not whole masks. {SERVED}"
        )
    real = attention_mask.to(torch.bool).cpu().numpy()
    real = np.pad(real, ((0, 0), (0, max(keys.stop - real.shape[1], 0))))[:, keys.start : keys.stop]
    return None if real.all() else real

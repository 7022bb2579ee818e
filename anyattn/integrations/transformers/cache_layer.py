"""What transformers asks of one layer of a cache that keeps its keys and values elsewhere."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from anyattn.errors import ContractError


class HollowLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Knows a length and holds no tensors. length: tokens so far, padding included; the cache sets it."""

    is_sliding = False  # windows are the runtime's business: every layer keeps its tokens, and masks count them all

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: there are no tensors."""

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: what to do with new keys is for the whole cache to say."""
        raise ContractError("update this cache through the cache itself, not through one of its layers.")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys after a step of `query_length` tokens, and the first one's position."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens so far, padding included."""
        return self.length

    def get_max_length(self) -> int:
        """-1: nothing here sets a limit."""
        return -1

    get_max_cache_shape = get_max_length  # as transformers 5.4 calls it

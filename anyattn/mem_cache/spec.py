"""What one model keeps per token: the geometry of its KV cache, and the sizes that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from anyattn.errors import SpecError
from anyattn.types import DTYPE_BYTES, KV_LAYOUTS, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The KV cache of a model on one device.

    num_kv_heads, head_dim, v_head_dim: of one layer; MLA has one head of `head_dim = kv_lora_rank + rope` whose
        first `v_head_dim = kv_lora_rank` elements are the values too, and are stored once.
    kv_dtype: dtype of the stored elements; fp8 is read as stored value times scale.
    page_size: tokens in a page.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_dtype: str
    page_size: int
    layout: KVLayout = "NHD"
    mla: bool = False

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if self.kv_dtype not in DTYPE_BYTES:
            raise SpecError(f"kv_dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.kv_dtype!r}.")
        if self.layout not in KV_LAYOUTS:
            raise SpecError(f"layout must be one of {', '.join(KV_LAYOUTS)}, not {self.layout!r}.")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        stored = self.head_dim if self.mla else self.head_dim + self.v_head_dim
        return self.num_layers * self.num_kv_heads * stored * DTYPE_BYTES[self.kv_dtype]

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together."""
        return self.bytes_per_token * self.page_size

    def pages_for_bytes(self, memory_bytes: int) -> int:
        """How many pages can be allocated from a pool of at most `memory_bytes`, its null page not counted."""
        return max(memory_bytes // self.bytes_per_page - 1, 0)

"""The contract of allocators and pools: what a plugin implements to bring its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.types import DTYPE_BYTES, KV_LAYOUTS, IntSet, KVLayout, Reason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from anyattn.mem_cache.spec import CacheSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorCapabilities:
    """What a KV allocator serves. `device_kinds` None means every kind."""

    device_kinds: frozenset[str] | None = None
    page_sizes: IntSet
    priority: int = 0

    def __post_init__(self) -> None:
        _check_declaration(self, page_sizes=IntSet)

    def reject_reasons(self, device_kind: str, page_size: int | None = None) -> list[Reason]:
        """All reasons against this allocator; without a page size, those that hold at every page size."""
        reasons = _device_reasons(self.device_kinds, device_kind)
        if page_size is not None and page_size not in self.page_sizes:
            reasons.append(
                Reason(
                    field="page_size",
                    wanted=str(page_size),
                    supported=str(self.page_sizes),
                    remedy=f"set page_size={self.page_sizes.nearest(page_size)}",
                )
            )
        return reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapabilities:
    """What a KV pool stores. `device_kinds` None means every kind."""

    device_kinds: frozenset[str] | None = None
    mla: bool
    """Whether it keeps MLA's latents (True) or keys and values of heads (False)."""
    kv_dtypes: frozenset[str]
    layouts: tuple[KVLayout, ...] = KV_LAYOUTS
    """In order of preference."""
    priority: int = 0

    def __post_init__(self) -> None:
        _check_declaration(self, kv_dtypes=frozenset, layouts=tuple, mla=bool)

    def reject_reasons(self, device_kind: str, *, mla: bool, kv_dtype: str) -> list[Reason]:
        """All reasons against this pool."""
        reasons = _device_reasons(self.device_kinds, device_kind)
        if mla != self.mla:
            kinds = {True: "MLA latents", False: "keys and values of heads"}
            reasons.append(
                Reason(
                    field="mla", wanted=kinds[mla], supported=kinds[self.mla], remedy="name another pool", another=True
                )
            )
        if kv_dtype not in self.kv_dtypes:
            supported = sorted(self.kv_dtypes)
            reasons.append(
                Reason(
                    field="kv_dtype",
                    wanted=kv_dtype,
                    supported=", ".join(supported),
                    remedy=f"set kv_dtype={supported[0]!r}",
                )
            )
        return reasons


def _check_declaration(declared: AllocatorCapabilities | PoolCapabilities, **types: type) -> None:
    types_of: dict[str, Any] = {"device_kinds": (frozenset, type(None)), "priority": int, **types}
    for name, kinds in types_of.items():
        value = getattr(declared, name)
        if not isinstance(value, kinds) or (isinstance(value, frozenset | tuple) and not value):
            raise ContractError(f"{type(declared).__name__}: {name} cannot be {value!r}.")
    for name, known in (("device_kinds", None), ("kv_dtypes", set(DTYPE_BYTES)), ("layouts", set(KV_LAYOUTS))):
        for member in getattr(declared, name, None) or ():
            if not isinstance(member, str) or (known is not None and member not in known):
                raise ContractError(f"{type(declared).__name__}: {name} cannot hold {member!r}.")


def _device_reasons(supported: frozenset[str] | None, device_kind: str) -> list[Reason]:
    if supported is None or device_kind in supported:
        return []
    names = ", ".join(sorted(supported))
    return [Reason(field="device_kind", wanted=device_kind, supported=names, remedy=f"use a device of kind {names}")]


class KVAllocator(ABC):
    """Hands out pages, all or nothing. Page 0, the null page, is never handed out."""

    capabilities: ClassVar[AllocatorCapabilities]

    @abstractmethod
    def __init__(self, num_pages: int, page_size: int) -> None:
        """Pages 1 to `num_pages` are free."""

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Pages there are, the null page not counted."""

    @property
    @abstractmethod
    def num_free_pages(self) -> int:
        """Pages that `alloc` can still hand out."""

    @abstractmethod
    def alloc(self, num_pages: int) -> npt.NDArray[np.int32]:
        """`num_pages` page ids, int32.

        Raises OutOfPagesError, and takes nothing, when fewer are free.
        """

    @abstractmethod
    def free(self, pages: npt.NDArray[np.int32]) -> None:
        """Takes pages back.

        Raises ContractError, and takes none, when one of them is not allocated or is named twice.
        """

    @abstractmethod
    def check(self) -> None:
        """Proves the books: every page is either free or allocated, never both. Raises ContractError."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerKV:
    """One layer's pages, as a backend reads them.

    k: [num_pages, page_size, num_kv_heads, head_dim] for NHD, [num_pages, num_kv_heads, page_size, head_dim] for HND.
    v: likewise with v_head_dim; for MLA a view of the first `kv_lora_rank` elements of k.
    k_scale, v_scale: what stored values are multiplied with; a float, or a float32 tensor of one element.
    """

    k: torch.Tensor
    v: torch.Tensor
    layout: KVLayout
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0

    def nhd(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as [num_pages, page_size, num_kv_heads, dim]; views, strided where the layout is HND."""
        if self.layout == "NHD":
            return self.k, self.v
        return self.k.transpose(1, 2), self.v.transpose(1, 2)


class KVPool(ABC):
    """Owns the KV bytes of all layers and is the only writer of them."""

    capabilities: ClassVar[PoolCapabilities]

    cache: CacheSpec
    layers: list[LayerKV]

    @abstractmethod
    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        """Zeroed pages 0 (the null page) to `num_pages`, for every layer."""

    @abstractmethod
    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Writes one layer's new tokens to their slots.

        k: [num_tokens, num_kv_heads, head_dim], for MLA [num_tokens, kv_lora_rank + qk_rope_head_dim].
        v: [num_tokens, num_kv_heads, v_head_dim], for MLA None.
        slots: [num_tokens], int64, `page_id * page_size + offset`.
        Shapes and dtypes are the caller's to check: `AttentionRuntime.run` does.
        """

    @abstractmethod
    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        """Sets what `store` divides by and readers multiply with, before anything of the layer is stored.

        A float, or a float32 tensor of one element on the pool's device. Raises ContractError for another, and when
        the pool's dtype is not fp8.
        """

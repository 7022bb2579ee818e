"""KV pools whose stores are torch-npu's: heads in NHD and MLA in NZ for Atlas A2 and A3, heads in NZ for the 310P.

The operators write every slot that they are given, those of the null page too, which is then zeroed again. Only such
slots are there several times. That is documented to be without a guarantee for `npu_scatter_pa_kv_cache`: it is assumed
that these slots get anything, and that the others get their tokens.

Sources: torch-npu 2.14.0 (_op_plugin_docs.py, `npu_scatter_pa_kv_cache`; include/.../AtbOpsInterface.h); CANN, "ATB",
ReshapeAndCacheOperation.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.hardware_backend.ascend import SERVERS
from anyattn.hardware_backend.ascend.element_pages import ElementMover, zero_tails
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import LayerKV, PoolCapabilities
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.types import NULL_PAGE

if TYPE_CHECKING:
    import torch
    import torch_npu

    from anyattn.mem_cache.kernels.pages import PageMover
    from anyattn.mem_cache.spec import CacheSpec
else:
    torch = lazy_import("torch")
    torch_npu = lazy_import("torch_npu")

_DEVICE_KINDS = frozenset({"ascend"})
_DTYPES = frozenset({"bfloat16", "float16"})
_FRACTAL_NZ = 29
"""ACL_FORMAT_FRACTAL_NZ, as `npu_format_cast` takes it."""
_MOST_SLOTS = (1 << 31) - 1


class _Int32Slots:
    """A step's slots as int32, made for its first layer.

    They are made again where layers begin anew, as the same tensor may hold another step's by then, and where a capture
    begins, as a graph has to make its own.
    """

    def __init__(self) -> None:
        self._given: torch.Tensor | None = None
        self._layer, self._captured = -1, False

    def of(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        captured = torch_npu.npu.is_current_stream_capturing()
        if slots is not self._given or layer <= self._layer or captured != self._captured:
            self._given, self._made, self._captured = slots, slots.int(), captured
        self._layer = layer
        return self._made


def _require_slots(cache: CacheSpec, num_pages: int) -> None:
    """Raises ContractError for a pool whose slots int32, which the operators take them in, cannot name."""
    if (num_pages + 1) * cache.page_size > _MOST_SLOTS:
        most = _MOST_SLOTS // cache.page_size - 1
        raise ContractError(f"slots are int32 on Ascend NPUs: give num_pages={most} or fewer, not {num_pages}.")


class AscendMHAPool(MHAPool):
    """Keys and values of heads on Atlas A2 and A3."""

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        device_kinds=_DEVICE_KINDS, archs=SERVERS, kind="mha", kv_dtypes=_DTYPES, layouts=("NHD",), priority=1
    )

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        _require_slots(cache, num_pages)
        super().__init__(cache, num_pages, device)
        self._slots = _Int32Slots()

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        assert v is not None
        kv = self.layers[layer]
        torch_npu._npu_reshape_and_cache(
            key=_stored_as(kv.k, k),
            value=_stored_as(kv.v, v),
            key_cache=kv.k,
            value_cache=kv.v,
            slot_indices=self._slots.of(layer, slots),
        )
        _zero_null_page(kv)


class AscendMLAPool(MLAPool):
    """MLA's latents and rope parts on Atlas A2 and A3."""

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        device_kinds=_DEVICE_KINDS, archs=SERVERS, kind="mla", kv_dtypes=_DTYPES, layouts=("NZ",), priority=1
    )

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        _require_slots(cache, num_pages)
        super().__init__(cache, num_pages, device)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        kv = self.layers[layer]
        if kv.rope is None:  # latents alone
            super().store(layer, k, v, slots)
            return
        latents, rope = self._apart(k, v)
        torch_npu.npu_scatter_pa_kv_cache(
            key=_stored_as(kv.k, latents.unsqueeze(1)),
            value=_stored_as(kv.rope, rope.unsqueeze(1)),
            key_cache=kv.k.squeeze(1),
            value_cache=kv.rope.squeeze(1),
            slot_mapping=slots.contiguous(),
        )
        _zero_null_page(kv)


class AscendNZPool(MHAPool):
    """Keys and values of heads on the Ascend 310P, in tensors of the format FRACTAL_NZ, which its operators ask for.

    That is a mark of the tensor: its elements lie as those of layout NZ do. Its bytes are not for other operators to
    see, so pages are moved by elements.
    """

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        device_kinds=_DEVICE_KINDS,
        archs=frozenset({"ascend310p"}),
        kind="mha",
        kv_dtypes=frozenset({"float16"}),
        layouts=("NZ",),
        priority=1,
    )

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        _require_slots(cache, num_pages)
        super().__init__(cache, num_pages, device)

    def _new_layer(self, *raw: torch.Tensor) -> LayerKV:
        plain = super()._new_layer(*raw)
        k, v = (
            torch_npu.npu_format_cast(part.flatten(1, 2), _FRACTAL_NZ).unflatten(1, part.shape[1:3])
            for part in (plain.k, plain.v)
        )
        return LayerKV(k=k, v=v, layout="NZ")

    def parts(self) -> list[torch.Tensor]:
        return [part for kv in self.layers for part in kv.stored]

    @property
    def page_mover(self) -> PageMover:
        if self._page_mover is None:
            self._page_mover = ElementMover(self.parts())
        return self._page_mover

    @property
    def tail_zeroer(self) -> Any:
        return partial(zero_tails, self.parts())

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        assert v is not None
        kv = self.layers[layer]
        if self.cache.page_size % 16 or self.cache.head_dim != self.cache.v_head_dim:  # not taken on the 310P
            super().store(layer, k, v, slots)
            return
        torch_npu._npu_reshape_and_cache(
            key=_stored_as(kv.k, k),
            value=_stored_as(kv.v, v),
            key_cache=kv.k.flatten(1, 2),
            value_cache=kv.v.flatten(1, 2),
            slot_indices=slots.int(),
        )
        _zero_null_page(kv)


def _stored_as(pages: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return new.to(pages.dtype).contiguous()


def _zero_null_page(kv: LayerKV) -> None:
    for part in kv.stored:
        part[NULL_PAGE].zero_()

"""The pools of DeepSeek sparse attention (DSA): MLA's latents as fp8 rows, and the keys that its indexer scores.

Both keep the scales that quantisation needs among their bytes, and are read by kernels that know where.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.base import LayerKV, PoolCapabilities
from anyattn.mem_cache.kernels.store import RowTarget, prepare, store_rows
from anyattn.mem_cache.pool import PagedPool
from anyattn.mem_cache.spec import DSA_ROW_BYTES, DSA_V_HEAD_DIM, INDEX_SCALE_BYTES

if TYPE_CHECKING:
    import torch

    from anyattn.mem_cache.indices import Int64s
    from anyattn.mem_cache.spec import CacheSpec
else:
    torch = lazy_import("torch")

_DSA_TILES = 4
_DSA_SCALES_END = DSA_V_HEAD_DIM + _DSA_TILES * 4


class _RowPool(PagedPool):
    """What both share: no scales to set, and rows quantised as they are stored."""

    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        super().__init__(cache, num_pages, device)
        self._targets = [self._new_target(kv.k) for kv in self.layers]
        prepare(self.device, torch.float8_e4m3fn)

    def _new_target(self, k: torch.Tensor) -> RowTarget:
        raise NotImplementedError

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        self._check_layer(layer)
        raise ContractError(f"{type(self).__name__} makes the scales itself as it stores; there are none to set.")


class DSAPool(_RowPool):
    """A row of 656 bytes a token, as FlashMLA's sparse kernels read it: [num_pages, page_size, 1, 656], uint8.

    512 float8_e4m3fn of the latent, 4 float32 scales, one for each 128 of them, and 64 bfloat16 of rope. A scale is its
    tile's largest magnitude / 448, and at least the smallest normal float32. `LayerKV.v` is `k`: a row has both.
    """

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        kind="dsa", kv_dtypes=frozenset({"float8_e4m3fn"}), layouts=("NHD",), joined_layers=True
    )

    def _new_layer(self, *raw: torch.Tensor) -> LayerKV:
        k = torch.unflatten(raw[0], 1, self.cache.page_shapes()[0])
        return LayerKV(k=k, v=k, layout="NHD", v_in_k=True)

    def _new_target(self, k: torch.Tensor) -> RowTarget:
        return RowTarget(*_dsa_fields(k[:, :, 0]))

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        if v is None:
            k, v = k[:, :DSA_V_HEAD_DIM], k[:, DSA_V_HEAD_DIM:]
        store_rows(k, v, self._targets[layer], slots, self.cache.page_size)


def _dsa_fields(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of rows [..., 656]: latents [..., 512], uint8, scales [..., 4], float32, rope [..., 64], bfloat16."""
    latent, scales, rope = rows.split_with_sizes(
        [DSA_V_HEAD_DIM, _DSA_SCALES_END - DSA_V_HEAD_DIM, DSA_ROW_BYTES - _DSA_SCALES_END], dim=-1
    )
    return latent, scales.view(torch.float32), rope.view(torch.bfloat16)


def dsa_rows(rows: torch.Tensor) -> torch.Tensor:
    """What rows of a DSAPool mean: [..., 656], uint8, to [..., 576], float32, latents then rope."""
    latent, scales, rope = _dsa_fields(rows)
    tiles = torch.unflatten(latent.view(torch.float8_e4m3fn).float(), -1, (_DSA_TILES, -1)) * scales.unsqueeze(-1)
    return torch.cat([tiles.flatten(-2), rope.float()], dim=-1)


class IndexKPool(_RowPool):
    """One key a token and no values, in pages as DeepGEMM's paged MQA logits read them.

    A page has `page_size` keys of head_dim float8_e4m3fn, and behind all of them `page_size` float32 scales; a scale is
    its key's largest magnitude / 448, and at least the smallest normal float32. `LayerKV.k` has the shape that DeepGEMM
    wants, [num_pages, page_size, 1, head_dim + 4], uint8, though a token's bytes do not lie together; `v` is empty.
    """

    capabilities: ClassVar[PoolCapabilities] = PoolCapabilities(
        kind="index", kv_dtypes=frozenset({"float8_e4m3fn"}), layouts=("NHD",), joined_layers=True
    )

    def _new_layer(self, *raw: torch.Tensor) -> LayerKV:
        k = torch.unflatten(raw[0], 1, self.cache.page_shapes()[0])
        return LayerKV(k=k, v=k[..., :0], layout="NHD", v_in_k=True)

    def _new_target(self, k: torch.Tensor) -> RowTarget:
        return RowTarget(*_index_fields(k))

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        store_rows(k, None, self._targets[layer], slots, self.cache.page_size)

    def zero_tails(self, pages: Int64s, used: Int64s) -> None:
        raise ContractError("pages of indexer keys have no tails to zero: a token's key and scale do not lie together.")


def _index_fields(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [..., page_size, 1, head_dim + 4], uint8, as views: keys [..., page_size, head_dim], scales [..., 1]."""
    page_size, head_dim = k.shape[-3], k.shape[-1] - INDEX_SCALE_BYTES
    keys, scales = k.flatten(-3).split_with_sizes([page_size * head_dim, page_size * INDEX_SCALE_BYTES], dim=-1)
    return torch.unflatten(keys, -1, (page_size, head_dim)), scales.view(torch.float32).unsqueeze(-1)


def index_keys(pages: torch.Tensor) -> torch.Tensor:
    """An IndexKPool's keys, [..., page_size, head_dim], float32; pages: [..., page_size, 1, head_dim + 4]."""
    keys, scales = _index_fields(pages)
    return keys.view(torch.float8_e4m3fn).float() * scales

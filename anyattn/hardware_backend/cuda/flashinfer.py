"""FlashInfer's paged prefill and tensor-core decode for heads of keys and values (flashinfer-python 0.6 and later).

What is declared is what has been run on an H200 with 0.6.13: FlashInfer itself serves more.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.lazy import lazy_import
from anyattn.mem_cache.device_table import to_device
from anyattn.mem_cache.indices import indptr, token_positions
from anyattn.types import ANY_INT, KV_LAYOUTS, ints

if TYPE_CHECKING:
    import flashinfer
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    flashinfer = lazy_import("flashinfer")

_WORKSPACE_BYTES = 256 << 20
_LN_2 = math.log(2.0)  # FlashInfer's LSE is in base 2


@dataclass(eq=False)
class _Plan:
    """A wrapper that holds one step's plan."""

    wrapper: Any


class FlashInferBackend(AttentionBackend):
    """One FlashInfer wrapper a live plan, so that planning one step leaves the plan of another as it is.

    The wrappers share one workspace, which is safe as their kernels run on one stream.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16"}),
        head_dims=ints(64),
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        lse=True,
        contiguous_q=True,
        priority=50,
        run_on=frozenset({"sm90"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        self._dtype: torch.dtype = getattr(torch, spec.dtype)
        self._workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=platform.torch_device)
        self._idle: dict[bool, list[tuple[Any, torch.cuda.Event]]] = {False: [], True: []}

    def plan(self, batch: Batch) -> _Plan:
        decode = batch.phase == "decode"
        wrapper = self._take(decode)
        kv_indptr, kv_indices, kv_lens = self._within_window(batch)
        paged = torch.from_numpy(kv_indptr), kv_indices, torch.from_numpy(batch.host.kv_last_page_len)
        heads = (self.spec.num_qo_heads, self.spec.num_kv_heads, self.spec.head_dim, batch.page_size)
        options = {
            "window_left": -1 if self.spec.sliding_window is None else self.spec.sliding_window - 1,
            "q_data_type": self._dtype,
            "kv_data_type": self._dtype,
            "sm_scale": self.spec.scale,
            "seq_lens": torch.from_numpy(kv_lens.astype(np.int32)),
        }
        if decode:
            wrapper.plan(*paged, *heads, **options)
        else:
            qo_indptr = torch.from_numpy(batch.host.qo_indptr)
            wrapper.plan(qo_indptr, *paged, *heads, causal=self.spec.causal, **options)
        planned = torch.cuda.Event()  # type: ignore[no-untyped-call]
        planned.record(torch.cuda.current_stream(self.platform.torch_device))
        plan = _Plan(wrapper)
        weakref.finalize(plan, self._idle[decode].append, (wrapper, planned)).atexit = False
        return plan

    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        result = plan.wrapper.run(q, (kv.k, kv.v), out=out, return_lse=self.spec.return_lse)
        return result[1] * _LN_2 if self.spec.return_lse else None

    def _within_window(self, batch: Batch) -> tuple[Any, torch.Tensor, Any]:
        """The batch's kv_indptr, kv_indices and kv_lens, without the pages before what a window lets any query see.

        In their place may be the null page, and the kernels multiply whatever lies in a masked key's value by 0. Masks
        count from the sequences' ends, so that leaving out whole pages at their beginnings changes nothing.
        """
        host, page_size = batch.host, batch.page_size
        if self.spec.sliding_window is None:
            return host.kv_indptr, batch.kv_indices, host.kv_lens
        behind = np.maximum(host.prefix_lens + 1 - self.spec.sliding_window, 0) // page_size
        if not behind.any():
            return host.kv_indptr, batch.kv_indices, host.kv_lens
        owner, column = token_positions(behind, host.num_pages)
        (places,) = to_device([host.kv_indptr[owner] + column], batch.kv_indices.device, wide=1)
        return indptr(host.num_pages - behind), batch.kv_indices[places], host.kv_lens - behind * page_size

    def _take(self, decode: bool) -> Any:
        """A wrapper that no live plan uses."""
        if self._idle[decode]:
            wrapper, planned = self._idle[decode].pop()
            planned.synchronize()  # its last plan may still be on the way from the pinned buffer that the next fills
            return wrapper
        if decode:
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, self.cache.layout, use_tensor_cores=True
            )
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, self.cache.layout)

"""Attention on x86 CPUs with AVX2 or AVX-512: pages read in place for decode, torch's flash attention for prefill.

Decode is bound by how fast memory is read, so its kernel (`paged_kernel`) reads each key and value once, where it is.
Prefill is bound by arithmetic, for which torch uses AMX where there is (`cpu_prefill`). Threads are torch's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.layer_views import LayerViews
from anyattn.attention.sinks import join_sinks
from anyattn.hardware_backend.intel import cpu_prefill, cpu_work
from anyattn.lazy import lazy_import
from anyattn.types import ANY_INT, DTYPE_BYTES, KV_LAYOUTS, OCP_FP8_DTYPES, GraphLevel, Load, Role

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.hardware_backend.intel import openmp, paged_kernel
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")
    openmp = lazy_import("anyattn.hardware_backend.intel.openmp")
    paged_kernel = lazy_import("anyattn.hardware_backend.intel.paged_kernel")

_PLACES = {name: place for place, name in enumerate(cpu_work.ARGUMENTS)}
_DTYPES = frozenset({"float32", "bfloat16", "float16"})
_MOST_ROWS, _GROUP_ROWS = 64, 16
"""The paged kernel serves a sequence of up to 64 query rows a KV head, of large groups 16 for each token: with more,
the arithmetic costs more than the reading, and torch's is faster."""
_TILE_ROWS = 32  # query rows that share the reading of a key where there are several new tokens
_TOKEN_BYTES = 4096  # of the KV heads of one token that an item of decode covers, at most: see `Shape.chunk`


def _priority(platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
    """Measured with benchmarks/cpu.py: with AVX2 the same code reaches less of the read bandwidth, yet twice what
    gathering does."""
    return 60 if "avx512f" in platform.features else 40


@dataclass(eq=False, kw_only=True)
class _Launch:
    """One call of the paged kernel. arguments: [len(ARGUMENTS)], int64, all but the layer's filled in.

    counters: [2], int64. kept: what the arguments have the addresses of.
    """

    function: int
    arguments: Any
    counters: Any
    num_threads: int
    kept: tuple[Any, ...]


@dataclass(eq=False, kw_only=True)
class _Plan:
    launches: list[_Launch]
    blocks: list[cpu_prefill.Block]


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """numbers: what `ARGUMENTS` has from k to v_head_stride, and from k_scale to v_scale_stride.

    kept: what these have the addresses of.
    """

    pages: list[int]
    scales: list[int]
    kept: tuple[torch.Tensor, ...]


class IntelCPUBackend(AttentionBackend):
    """Sequences of few new tokens are read in place; longer ones are gathered for torch's flash attention.

    With a soft cap, or values that are longer than keys, which that does not know, all are read in place.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cpu"}),
        archs=frozenset({"x86_64"}),
        features=frozenset({"avx2", "f16c", "fma"}),
        packages=("torch>=2.9", "numba>=0.62"),
        extra="cpu",
        dtypes=_DTYPES,
        kv_dtypes=_DTYPES | OCP_FP8_DTYPES,
        per_head_scales=True,
        any_head_dim_pair=True,
        any_mla_dims=True,
        page_sizes=ANY_INT,
        preferred_page_size=16,
        layouts=KV_LAYOUTS,
        strided_pages=True,
        phases=frozenset({"prefill", "decode", "mixed"}),
        causal=frozenset({True, False}),
        sliding_window=True,
        logits_soft_cap=True,
        sinks=True,
        lse=True,
        graph=GraphLevel.NEVER,
        deterministic=True,
        priority=_priority,
        run_on=frozenset({"x86_64"}),
    )

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        super().__init__(spec, cache, platform)
        row_bytes = spec.head_dim * DTYPE_BYTES[cache.kv_dtype]
        decode = paged_kernel.Shape(
            num_heads=_largest_divisor(spec.num_kv_heads, _TOKEN_BYTES // row_bytes),
            group_size=spec.group_size,
            num_tokens=1,
            head_dim=spec.head_dim,
            vo_head_dim=spec.vo_head_dim,
            dtype=spec.dtype,
            kv_dtype=cache.kv_dtype,
            capped=spec.logits_soft_cap is not None,
            lanes=16 if "avx512f" in platform.features else 8,
        )
        several = replace(decode, num_heads=1, num_tokens=max(_TILE_ROWS // spec.group_size, 1))
        self._shapes = {False: decode, True: several}
        self._prefill = None
        if spec.vo_head_dim <= spec.head_dim and spec.logits_soft_cap is None:
            self._prefill = cpu_prefill.GatheredPrefill(spec, cache.page_size)
        self._factors = torch.tensor([spec.scale, spec.logits_soft_cap or 0.0, 1.0, 1.0, 1.0, 1.0])
        self._memory: dict[str, torch.Tensor] = {}
        self._views = LayerViews(self._layer)

    def plan(self, batch: Batch) -> _Plan:
        lens = batch.host.qo_lens
        gathered = lens * min(self.spec.group_size, _GROUP_ROWS) > _MOST_ROWS
        if self._prefill is None:
            gathered[:] = False
        launches = []
        for several, chosen in ((False, lens == 1), (True, (lens > 1) & ~gathered)):
            seqs = chosen.nonzero()[0]
            if seqs.size:
                launches.append(self._launch(batch, self._shapes[several], seqs))
        blocks: list[cpu_prefill.Block] = []
        for seq in gathered.nonzero()[0].tolist():
            assert self._prefill is not None
            blocks += self._prefill.plan(batch, seq)
        return _Plan(launches=launches, blocks=blocks)

    def _launch(self, batch: Batch, shape: paged_kernel.Shape, seqs: Any) -> _Launch:
        num_threads = torch.get_num_threads()
        work = cpu_work.divide(
            self.spec, batch.host, seqs, num_tokens=shape.num_tokens, num_heads=shape.num_heads, num_threads=num_threads
        )
        num_threads = min(num_threads, len(work.items))
        scratch_bytes = shape.scratch_layout()[-1]
        scratch = self._room("scratch", num_threads * scratch_bytes)
        partials = self._room("partials", work.num_slots * shape.partial_floats * 4)
        counters, finished = np.zeros(2, dtype=np.int64), np.zeros(work.num_splits, dtype=np.int64)
        filled = {
            "counters": counters.ctypes.data,
            "num_items": len(work.items),
            "items": work.items.ctypes.data,
            "kv_indices": batch.kv_indices.data_ptr(),
            "page_size": self.cache.page_size,
            "scratch": scratch.data_ptr(),
            "scratch_bytes": scratch_bytes,
            "partials": partials.data_ptr(),
            "finished": finished.ctypes.data,
            "window": self.spec.sliding_window or 0,
            "causal": self.spec.causal,
            "num_qo_heads": self.spec.num_qo_heads,
            "factors": self._factors.data_ptr(),
        }
        return _Launch(
            function=paged_kernel.kernel(shape),
            arguments=np.array([filled.get(name, 0) for name in cpu_work.ARGUMENTS], dtype=np.int64),
            counters=counters,
            num_threads=num_threads,
            kept=(work.items, batch.kv_indices, scratch, partials, finished),
        )

    def _room(self, name: str, num_bytes: int) -> torch.Tensor:
        """Memory that all layers and steps share, at a multiple of 64 bytes. Grows; a plan keeps what it was given."""
        room = self._memory.get(name)
        if room is None or room.numel() < num_bytes:
            with torch.inference_mode(False):
                raw = torch.empty(num_bytes + 64, dtype=torch.uint8)
            room = self._memory[name] = raw[-raw.data_ptr() % 64 :]
        return room

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
        lse = None
        if self.spec.return_lse:
            lse = torch.empty(q.shape[:2], dtype=torch.float32)
        sinks = None if sinks is None else sinks.float().contiguous()
        if plan.launches:
            self._run_in_place(q, kv, plan, out, lse, sinks)
        if plan.blocks:
            assert self._prefill is not None
            joined = lse
            if sinks is not None and joined is None:
                joined = torch.empty(q.shape[:2], dtype=torch.float32)
            self._prefill.run(q, kv, plan.blocks, out, joined)
            if sinks is not None and joined is not None:
                for block in plan.blocks:
                    join_sinks(out[block.rows], joined[block.rows], sinks)
        return lse

    def _run_in_place(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: _Plan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        layer: _Layer = self._views.of(kv)
        at, itemsize = _PLACES, q.element_size()
        for launch in plan.launches:
            arguments = launch.arguments
            arguments[at["q"] : at["k"]] = (
                q.data_ptr(), q.stride(0) * itemsize, q.stride(1) * itemsize, out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
            )  # fmt: skip
            arguments[at["k"] : at["page_size"]] = layer.pages
            arguments[at["sinks"]] = 0 if sinks is None else sinks.data_ptr()
            arguments[at["k_scale"] : at["scratch"]] = layer.scales
            launch.counters[:] = 0
            openmp.run_on_threads(launch.function, arguments.ctypes.data, launch.num_threads)

    def _layer(self, kv: LayerKV) -> _Layer:
        pages: list[int] = []
        for part in kv.nhd():
            strides = (stride * part.element_size() for stride in part.stride()[:3])
            pages += [part.data_ptr(), *strides]
        scales = [torch.as_tensor(scale, dtype=torch.float32).view(-1) for scale in (kv.k_scale, kv.v_scale)]
        numbers = [number for scale in scales for number in (scale.data_ptr(), int(scale.numel() > 1))]
        return _Layer(pages=pages, scales=numbers, kept=tuple(scales))


def _largest_divisor(number: int, most: int) -> int:
    return next(divisor for divisor in range(max(min(number, most), 1), 0, -1) if number % divisor == 0)

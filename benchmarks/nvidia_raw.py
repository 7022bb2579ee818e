"""The vendors' kernels as nvidia.py calls them without anyattn: everything that can be done before a call is."""

from __future__ import annotations

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from anyattn import AttentionSpec
from anyattn.attention.batch import Batch
from anyattn.mem_cache.base import LayerKV

WORKSPACE_BYTES = 256 << 20
"""FlashInfer's; its kernels run one after the other, so that one serves them all."""

Call = Callable[[], torch.Tensor]
"""Attends, and returns the output, [num_tokens, num_qo_heads, vo_head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RawStep:
    """What a kernel is called with. q and out: [num_tokens, num_qo_heads, dim]; tables as in `Batch`, int32."""

    spec: AttentionSpec
    q: torch.Tensor
    out: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    qo_indptr: torch.Tensor
    kv_lens: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_last_page_len: torch.Tensor
    block_table: torch.Tensor
    max_qo_len: int
    max_kv_len: int

    @classmethod
    def of(cls, spec: AttentionSpec, q: torch.Tensor, out: torch.Tensor, kv: LayerKV, batch: Batch) -> RawStep:
        """The step of a batch of anyattn, over the pages of one of its pools."""
        k, v = kv.nhd()
        names = ("qo_indptr", "kv_lens", "kv_indptr", "kv_indices", "kv_last_page_len", "block_table")
        tables = {name: getattr(batch, name) for name in names}
        return cls(
            spec=spec, q=q, out=out, k=k, v=v, max_qo_len=batch.max_qo_len, max_kv_len=batch.max_kv_len, **tables
        )  # fmt: skip

    @classmethod
    def smallest(cls, spec: AttentionSpec, page_size: int, device: torch.device) -> RawStep:
        """Four tokens of one sequence in one page: enough to have kernels compiled."""
        tensor = functools.partial(torch.tensor, dtype=torch.int32, device=device)
        zeros = functools.partial(torch.zeros, dtype=getattr(torch, spec.dtype), device=device)
        k = zeros(2, page_size, spec.num_kv_heads, spec.head_dim)
        return cls(
            spec=spec, q=zeros(4, spec.num_qo_heads, spec.head_dim), out=zeros(4, spec.num_qo_heads, spec.vo_head_dim),
            k=k, v=k[..., : spec.vo_head_dim], qo_indptr=tensor([0, 4]), kv_lens=tensor([4]), kv_indptr=tensor([0, 1]),
            kv_indices=tensor([1]), kv_last_page_len=tensor([4]), block_table=tensor([[1]]), max_qo_len=4, max_kv_len=4,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        """MLA's: where the latent part of a row ends and its rope part begins."""
        return self.spec.vo_head_dim

    def query_parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """MLA's latent and rope parts, as views: every layer has a q of its own, so that every call makes them anew."""
        latent, rope = self.q.split_with_sizes((self.rank, self.spec.head_dim - self.rank), -1)
        return latent, rope


def fa3(step: RawStep) -> Call:
    """FlashAttention 3; for MLA the latent part of q goes into its second query."""
    module, attend = _first_importable(
        ("flash_attn_interface", "flash_attn_with_kvcache"),
        ("sgl_kernel.flash_attn", "flash_attn_with_kvcache"),
        ("vllm.vllm_flash_attn", "flash_attn_varlen_func"),
    )
    k = step.k[..., step.rank :] if step.spec.is_mla else step.k
    common = {"max_seqlen_q": step.max_qo_len, "cu_seqlens_q": step.qo_indptr, "softmax_scale": step.spec.scale}
    common |= {"causal": True, "out": step.out}
    if module == "vllm.vllm_flash_attn":
        second = "q_v"
        call = functools.partial(
            attend, k=k, v=step.v, max_seqlen_k=step.max_kv_len, seqused_k=step.kv_lens, block_table=step.block_table,
            fa_version=3, **common,
        )  # fmt: skip
    else:
        second = "qv"
        if "out" not in inspect.signature(attend).parameters:
            del common["out"]
        tables = {"cache_seqlens": step.kv_lens, "page_table": step.block_table}
        call = functools.partial(attend, k_cache=k, v_cache=step.v, **tables, **common)
    if not step.spec.is_mla:
        return functools.partial(call, q=step.q)

    def in_parts() -> torch.Tensor:
        latent, rope = step.query_parts()
        result: torch.Tensor = call(q=rope, **{second: latent})
        return result

    return in_parts


def flash_mla(step: RawStep) -> Call:
    """FlashMLA's dense decode. Its schedule is made in the first call and kept, as the lengths stay the same."""
    module, attend = _first_importable(
        ("flash_mla", "flash_mla_with_kvcache"),
        ("vllm.third_party.flashmla.flash_mla_interface", "flash_mla_with_kvcache"),
    )
    new_schedule = importlib.import_module(module).get_mla_metadata
    num_seqs, num_heads = step.kv_lens.numel(), step.spec.num_qo_heads
    if "cache_seqlens" in inspect.signature(new_schedule).parameters:  # builds before 2026 want it made beforehand
        schedule, num_splits = new_schedule(step.kv_lens, step.max_qo_len * num_heads, 1)
    else:
        schedule, num_splits = new_schedule()
    arguments: dict[str, Any] = {
        "k_cache": step.k,
        "block_table": step.block_table,
        "cache_seqlens": step.kv_lens,
        "head_dim_v": step.rank,
        "tile_scheduler_metadata": schedule,
        "num_splits": num_splits,
        "softmax_scale": step.spec.scale,
        "causal": True,
    }
    known = inspect.signature(attend).parameters
    if "use_legacy" in known:  # sgl-flash-mla keeps dense attention there
        arguments["use_legacy"] = True

    def attend_with_views() -> torch.Tensor:  # every layer has a q of its own
        q = step.q.view(num_seqs, step.max_qo_len, num_heads, step.spec.head_dim)
        return attend(q=q, **arguments)[0].view(step.out.shape)

    return attend_with_views


def flashinfer_decode(step: RawStep) -> Call:
    """FlashInfer's decode on tensor cores."""
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(step.q.device), "NHD", use_tensor_cores=True)
    wrapper.plan(step.kv_indptr, step.kv_indices, step.kv_last_page_len, *_heads(step), **_numbers(step))
    return lambda: wrapper.run(step.q, (step.k, step.v), out=step.out)


def flashinfer_prefill(step: RawStep, *, backend: str) -> Call:
    """FlashInfer's paged prefill. backend: "fa2" or "fa3", the template that its kernel is made of."""
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(_workspace(step.q.device), "NHD", backend=backend)
    tables = (step.qo_indptr, step.kv_indptr, step.kv_indices, step.kv_last_page_len)
    wrapper.plan(*tables, *_heads(step), causal=True, **_numbers(step))
    return lambda: wrapper.run(step.q, (step.k, step.v), out=step.out)


def flashinfer_mla(step: RawStep) -> Call:
    """FlashInfer's MLA, by the template fa3."""
    import flashinfer

    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(_workspace(step.q.device), backend="fa3")
    tables = {
        "qo_indptr": step.qo_indptr, "kv_indptr": step.kv_indptr, "kv_indices": step.kv_indices,
        "kv_len_arr": step.kv_lens,
    }  # fmt: skip
    sizes = {
        "num_heads": step.spec.num_qo_heads, "head_dim_ckv": step.rank,
        "head_dim_kpe": step.spec.head_dim - step.rank, "page_size": step.k.shape[1], "causal": True,
    }  # fmt: skip
    pages = step.k.squeeze(2)
    latent_pages, rope_pages = pages[..., : step.rank], pages[..., step.rank :]
    if hasattr(flashinfer.mla, "MLAPlanMetadata"):  # from 0.7 on
        metadata = flashinfer.mla.MLAPlanMetadata.csr(**tables)
        wrapper.plan(metadata=metadata, query_layout="split", kv_cache_layout="split", **sizes, **_numbers(step))
        return lambda: wrapper.run(query=step.query_parts(), kv_cache=(latent_pages, rope_pages), out=step.out)
    wrapper.plan(**tables, **sizes, **_numbers(step))
    return lambda: wrapper.run(*step.query_parts(), latent_pages, rope_pages, out=step.out)


KERNELS: dict[str, Callable[[RawStep], Call]] = {
    "FA3": fa3,
    "FlashMLA": flash_mla,
    "FlashInfer decode": flashinfer_decode,
    "FlashInfer fa2": functools.partial(flashinfer_prefill, backend="fa2"),
    "FlashInfer fa3": functools.partial(flashinfer_prefill, backend="fa3"),
    "FlashInfer MLA fa3": flashinfer_mla,
}
"""By the name of their column: from a step to a call that attends. Raise ImportError where the package is missing."""

COMPILED_ALIKE = {"FlashInfer decode": "FlashInfer fa2"}
"""Columns that run the kernel of another one."""


def compile_kernels(wanted: Iterable[tuple[AttentionSpec, int, str]], device: torch.device) -> float:
    """Has FlashInfer compile its kernels, side by side. Returns the seconds that took.

    wanted: specs, page sizes and names of columns. What fails here fails again, and is reported, where it is measured.
    """

    def compile_one(spec: AttentionSpec, page_size: int, name: str) -> None:
        with torch.inference_mode(), torch.cuda.device(device):
            KERNELS[name](RawStep.smallest(spec, page_size, device))

    start = time.perf_counter()
    distinct = {
        (COMPILED_ALIKE.get(name, name), spec.is_mla): (spec, page_size)
        for spec, page_size, name in wanted
        if name.startswith("FlashInfer")
    }
    _workspace(device)
    with ThreadPoolExecutor() as pool:
        for (name, _), (spec, page_size) in distinct.items():
            pool.submit(compile_one, spec, page_size, name)
    return time.perf_counter() - start


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _heads(step: RawStep) -> tuple[int, int, int, int]:
    """num_qo_heads, num_kv_heads, head_dim, page_size."""
    return step.spec.num_qo_heads, step.spec.num_kv_heads, step.spec.head_dim, step.k.shape[1]


def _numbers(step: RawStep) -> dict[str, Any]:
    return {"sm_scale": step.spec.scale, "q_data_type": step.q.dtype, "kv_data_type": step.k.dtype}


@functools.cache
def _first_importable(*places: tuple[str, str]) -> tuple[str, Any]:
    """The first module that can be imported and has the function, and the function. Raises ImportError with why."""
    reasons = []
    for module, function in places:
        try:
            return module, getattr(importlib.import_module(module), function)
        except Exception as error:  # builds for another torch fail in ways of their own
            reasons.append(f"{module}: {error}")
    raise ImportError("; ".join(reasons))

"""What anyattn itself offers, through the same hooks as a stranger's plugin: one line each."""

from __future__ import annotations

from anyattn.plugins.hookspecs import hookimpl
from anyattn.types import CONTRACT_VERSION

contract_version = CONTRACT_VERSION


@hookimpl
def anyattn_platforms() -> dict[str, str]:
    """Accelerators first: the first usable device is the default."""
    return {
        "cuda": "anyattn.platforms.cuda:probe",
        "cpu": "anyattn.platforms.cpu:probe",
    }


@hookimpl
def anyattn_attention_backends() -> dict[str, str]:
    """Portable ones and those that wrap a vendor's kernels."""
    return {
        "flashinfer": "anyattn.hardware_backend.cuda.flashinfer:FlashInferBackend",
        "reference": "anyattn.attention.reference:ReferenceBackend",
        "torch_native": "anyattn.attention.torch_native:TorchNativeBackend",
    }


@hookimpl
def anyattn_kv_allocators() -> dict[str, str]:
    """Host bookkeeping."""
    return {"paged": "anyattn.mem_cache.allocator:PagedAllocator"}


@hookimpl
def anyattn_kv_pools() -> dict[str, str]:
    """Plain torch."""
    return {
        "mha": "anyattn.mem_cache.pool:MHAPool",
        "mla": "anyattn.mem_cache.pool:MLAPool",
    }

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
        "rocm": "anyattn.platforms.rocm:probe",
        "ascend": "anyattn.platforms.ascend:probe",
        "xpu": "anyattn.platforms.xpu:probe",
        "musa": "anyattn.platforms.musa:probe",
        "apple": "anyattn.platforms.apple:probe",
        "cpu": "anyattn.platforms.cpu:probe",
    }


@hookimpl
def anyattn_attention_backends() -> dict[str, str]:
    """Portable ones and those that wrap a vendor's kernels."""
    return {
        "aiter": "anyattn.hardware_backend.rocm.aiter:AiterBackend",
        "aiter_asm": "anyattn.hardware_backend.rocm.aiter_asm:AiterAsmBackend",
        "aiter_mla": "anyattn.hardware_backend.rocm.aiter_mla:AiterMLABackend",
        "aiter_mla_ocp": "anyattn.hardware_backend.rocm.aiter_mla:AiterMLAOCPBackend",
        "aiter_mla_prefill": "anyattn.hardware_backend.rocm.aiter_mla_prefill:AiterMLAPrefillBackend",
        "aiter_paged": "anyattn.hardware_backend.rocm.aiter_paged:AiterPagedBackend",
        "aiter_paged_ocp": "anyattn.hardware_backend.rocm.aiter_paged:AiterPagedOCPBackend",
        "cutedsl_mla": "anyattn.hardware_backend.cuda.cutedsl_mla:CuteDSLMLABackend",
        "cutlass_mla": "anyattn.hardware_backend.cuda.cutlass_mla:CutlassMLABackend",
        "dsa": "anyattn.hardware_backend.cuda.dsa:DSABackend",
        "fa3": "anyattn.hardware_backend.cuda.fa3:FA3Backend",
        "fa3_fwd": "anyattn.hardware_backend.cuda.fa3_fwd:FA3FwdBackend",
        "fa3_sm8x": "anyattn.hardware_backend.cuda.fa3:FA3Sm8xBackend",
        "fa4": "anyattn.hardware_backend.cuda.fa4:FA4Backend",
        "flash_attn": "anyattn.hardware_backend.cuda.flash_attn:FlashAttnBackend",
        "flashinfer": "anyattn.hardware_backend.cuda.flashinfer:FlashInferBackend",
        "flashinfer_mla": "anyattn.hardware_backend.cuda.flashinfer_mla:FlashInferMLABackend",
        "flashmla": "anyattn.hardware_backend.cuda.flashmla:FlashMLABackend",
        "fused_infer_attention": (
            "anyattn.hardware_backend.ascend.fused_infer_attention:FusedInferAttentionBackend"
        ),
        "fused_infer_attention_v2": (
            "anyattn.hardware_backend.ascend.fused_infer_attention:FusedInferAttentionV2Backend"
        ),
        "fused_infer_attention_mla": (
            "anyattn.hardware_backend.ascend.fused_infer_attention_mla:FusedInferAttentionMLABackend"
        ),
        "npu_paged_attention": "anyattn.hardware_backend.ascend.paged_attention:NPUPagedAttentionBackend",
        "torch_varlen": "anyattn.hardware_backend.cuda.torch_varlen:TorchVarlenBackend",
        "trtllm_mha": "anyattn.hardware_backend.cuda.trtllm_mha:TRTLLMMHABackend",
        "trtllm_mla": "anyattn.hardware_backend.cuda.trtllm_mla:TRTLLMMLABackend",
        "xqa": "anyattn.hardware_backend.cuda.xqa:XQABackend",
        "flex_attention": "anyattn.attention.flex_attention:FlexAttentionBackend",
        "flex_attention_cpu": "anyattn.attention.flex_attention:FlexAttentionCPUBackend",
        "intel_cpu": "anyattn.hardware_backend.intel.cpu:IntelCPUBackend",
        "intel_xpu": "anyattn.hardware_backend.intel.xpu_flash_attn:IntelXPUBackend",
        "intel_xpu_grouped": "anyattn.hardware_backend.intel.xpu_flash_attn:IntelXPUGroupedBackend",
        "mlx": "anyattn.hardware_backend.apple.mlx:MLXBackend",
        "reference": "anyattn.attention.reference:ReferenceBackend",
        "triton": "anyattn.attention.triton_attention.backend:TritonBackend",
        "torch_native": "anyattn.attention.torch_native:TorchNativeBackend",
    }


@hookimpl
def anyattn_kv_allocators() -> dict[str, str]:
    """Host bookkeeping."""
    return {"paged": "anyattn.mem_cache.allocator:PagedAllocator"}


@hookimpl
def anyattn_kv_pools() -> dict[str, str]:
    """Triton where it runs, plain torch elsewhere."""
    return {
        "ascend_mha": "anyattn.hardware_backend.ascend.pools:AscendMHAPool",
        "ascend_mla": "anyattn.hardware_backend.ascend.pools:AscendMLAPool",
        "ascend_nz": "anyattn.hardware_backend.ascend.pools:AscendNZPool",
        "dsa": "anyattn.mem_cache.sparse_pools:DSAPool",
        "mha": "anyattn.mem_cache.pool:MHAPool",
        "mla": "anyattn.mem_cache.pool:MLAPool",
    }


@hookimpl
def anyattn_simulated_devices() -> dict[str, str]:
    """One of each generation that a backend is declared for, with facts from the vendors' documents."""
    return {
        "h100": "anyattn.platforms.simulated:H100",
        "h200": "anyattn.platforms.simulated:H200",
        "a100": "anyattn.platforms.simulated:A100",
        "l40s": "anyattn.platforms.simulated:L40S",
        "b200": "anyattn.platforms.simulated:B200",
        "rtx5090": "anyattn.platforms.simulated:RTX5090",
        "mi300x": "anyattn.platforms.simulated:MI300X",
        "mi355x": "anyattn.platforms.simulated:MI355X",
        "ascend910b": "anyattn.platforms.simulated:ASCEND910B",
        "ascend910_93": "anyattn.platforms.simulated:ASCEND910_93",
        "ascend310p": "anyattn.platforms.simulated:ASCEND310P",
        "xeon-amx": "anyattn.platforms.simulated:XEON_AMX",
        "xeon-avx2": "anyattn.platforms.simulated:XEON_AVX2",
        "epyc": "anyattn.platforms.simulated:EPYC",
        "graviton4": "anyattn.platforms.simulated:GRAVITON4",
        "pvc": "anyattn.platforms.simulated:PVC",
        "b580": "anyattn.platforms.simulated:B580",
        "mtt-s5000": "anyattn.platforms.simulated:MTT_S5000",
        "m3": "anyattn.platforms.simulated:M3",
    }

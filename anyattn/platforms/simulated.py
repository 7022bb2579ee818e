"""Devices that are not here, as facts, for asking what would be chosen on them: one of each generation.

Names and memory are what the vendor's tool shows unless a comment says otherwise. What depends on the machine around a
device (driver, free memory) is unknown. Graph, Triton, collectives and status are as the probe of that kind has them.
"""

from __future__ import annotations

from typing import Any

from anyattn.platforms.apple import MPS_MISSING_DTYPES
from anyattn.platforms.ascend import NPU_MISSING_DTYPES
from anyattn.platforms.base import Platform
from anyattn.platforms.host import TORCH_REMEDIES
from anyattn.types import GraphLevel

_MIB, _GIB = 1 << 20, 1 << 30


def _device(short_name: str, /, **facts: Any) -> Platform:
    """torch does not know the torch device, so that nothing runs on it by mistake."""
    remedy = TORCH_REMEDIES[facts["kind"]]
    return Platform(torch_device=f"sim:{short_name}", simulated=True, torch_remedy=remedy, **facts)


def _nvidia(short_name: str, name: str, capability: tuple[int, int], *, num_cores: int, memory_mib: int) -> Platform:
    """memory_mib: as nvidia-smi shows it; drivers differ by a little."""
    return _device(
        short_name,
        kind="cuda",
        vendor="nvidia",
        name=name,
        arch=f"sm{capability[0]}{capability[1]}",
        compute_capability=capability,
        memory_total_bytes=memory_mib * _MIB,
        num_cores=num_cores,
        collective="nccl",
        graph=GraphLevel.ALWAYS,
        triton=True,
        status="run on hardware" if capability == (9, 0) else "contract-tested",
    )


# Multiprocessors: NVIDIA's whitepapers "A100 Tensor Core GPU Architecture", "H100 Tensor Core GPU Architecture" (the
# H200 has the same chip) and "RTX Blackwell GPU Architecture"; the L40S datasheet (18176 CUDA cores, 128 in each); for
# the B200 what CUDA's deviceQuery shows.
H100 = _nvidia("h100", "NVIDIA H100 80GB HBM3", (9, 0), num_cores=132, memory_mib=81559)
H200 = _nvidia("h200", "NVIDIA H200", (9, 0), num_cores=132, memory_mib=143771)
A100 = _nvidia("a100", "NVIDIA A100-SXM4-80GB", (8, 0), num_cores=108, memory_mib=81920)
L40S = _nvidia("l40s", "NVIDIA L40S", (8, 9), num_cores=142, memory_mib=46068)
B200 = _nvidia("b200", "NVIDIA B200", (10, 0), num_cores=148, memory_mib=183359)
RTX5090 = _nvidia("rtx5090", "NVIDIA GeForce RTX 5090", (12, 0), num_cores=170, memory_mib=32607)

MI300X = _device(
    "mi300x",
    kind="rocm",
    vendor="amd",
    name="AMD Instinct MI300X",
    arch="gfx942",
    memory_total_bytes=206_141_652_992,  # rocm-smi --showmeminfo vram, unpartitioned
    num_cores=304,  # compute units; "AMD Instinct MI300X Accelerator" data sheet
    collective="rccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
    status="contract-tested",
)

MI355X = _device(
    "mi355x",
    kind="rocm",
    vendor="amd",
    name="AMD Instinct MI355X",
    arch="gfx950",
    memory_total_bytes=309_220_868_096,  # rocm-smi --showmeminfo vram, unpartitioned
    num_cores=256,  # compute units; ROCm documentation, "GPU hardware specifications"
    collective="rccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
    status="contract-tested",
)

ASCEND910B = _device(
    "ascend910b",
    kind="ascend",
    vendor="huawei",
    name="Ascend 910B3",
    arch="ascend910b",
    memory_total_bytes=64 * _GIB,  # as it is sold
    num_cores=20,  # AI cores of this one of the 910B's models; CANN, platform_config/Ascend910B3.ini
    collective="hccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
    missing_dtypes=NPU_MISSING_DTYPES["ascend910b"],
    status="contract-tested",
)

ASCEND910_93 = _device(
    "ascend910_93",
    kind="ascend",
    vendor="huawei",
    name="Ascend 910_9392",  # one of the two dies of an Atlas A3 card, each of which is a device
    arch="ascend910_93",
    memory_total_bytes=64 * _GIB,  # as it is sold, half of the card's
    num_cores=24,  # AI cores of the die; CANN, "ATC", --aicore_num
    collective="hccl",
    graph=GraphLevel.NEVER,  # see the probe
    triton=True,
    missing_dtypes=NPU_MISSING_DTYPES["ascend910_93"],
    status="contract-tested",
)

ASCEND310P = _device(
    "ascend310p",
    kind="ascend",
    vendor="huawei",
    name="Ascend 310P3",
    arch="ascend310p",
    memory_total_bytes=24 * _GIB,  # of an Atlas 300I Pro, as it is sold
    num_cores=8,  # AI cores; CANN, platform_config/Ascend310P3.ini
    collective="hccl",
    graph=GraphLevel.NEVER,
    triton=False,
    missing_dtypes=NPU_MISSING_DTYPES["ascend310p"],
    status="contract-tested",
)

# Sapphire Rapids: the instruction sets that Linux shows for it; its AMX has no fp16.
XEON_AMX = _device(
    "xeon-amx",
    kind="cpu",
    vendor="intel",
    name="Intel(R) Xeon(R) Platinum 8480+",
    arch="x86_64",
    features=frozenset(
        {"avx", "avx2", "fma", "f16c", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8"}
        | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16", "avx512_vnni"}
    ),
    memory_total_bytes=None,  # the machine's
    num_cores=56,  # one socket; Intel ARK, "Intel Xeon Platinum 8480+ Processor"
    num_threads=112,
    collective="gloo",
    status="run on hardware",
)

# Genoa (Zen 4): all of AVX-512 that kernels ask for but fp16, and no AMX. What Linux shows was read on such a CPU.
EPYC = _device(
    "epyc",
    kind="cpu",
    vendor="amd",
    name="AMD EPYC 9654 96-Core Processor",
    arch="x86_64",
    features=frozenset(
        {"avx", "avx2", "fma", "f16c"}
        | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni"}
    ),
    memory_total_bytes=None,
    num_cores=96,  # one socket; "AMD EPYC 9004 Series Processors" data sheet
    num_threads=192,
    collective="gloo",
    status="run on hardware",
)

# Broadwell: the last of Xeon's generations without AVX-512.
XEON_AVX2 = _device(
    "xeon-avx2",
    kind="cpu",
    vendor="intel",
    name="Intel(R) Xeon(R) CPU E5-2699 v4 @ 2.20GHz",
    arch="x86_64",
    features=frozenset({"avx", "avx2", "fma", "f16c"}),
    memory_total_bytes=None,
    num_cores=22,  # one socket; Intel ARK, "Intel Xeon Processor E5-2699 v4"
    num_threads=44,
    collective="gloo",
    status="run on hardware",
)

# By its core, as the probe names it: the instruction sets that Linux shows for a Neoverse V2 (CPU part 0xd4f).
GRAVITON4 = _device(
    "graviton4",
    kind="cpu",
    vendor="arm",
    name="Arm Neoverse V2",
    arch="aarch64",
    features=frozenset(
        {"asimd", "asimdhp", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2", "svebf16", "svei8mm"}
    ),
    memory_total_bytes=None,
    num_cores=96,  # one socket, of one thread each; AWS, "AWS Graviton Technical Guide"
    num_threads=96,
    collective="gloo",
    status="contract-tested",
)

# One of the two stacks of the card, which torch takes for a device of its own: half of its memory and cores.
PVC = _device(
    "pvc",
    kind="xpu",
    vendor="intel",
    name="Intel Data Center GPU Max 1550",
    arch="pvc",
    memory_total_bytes=68_702_699_520,  # torch.xpu.get_device_properties
    num_cores=64,  # Xe cores; "Intel Data Center GPU Max 1550" product specifications have 128 for both
    collective="xccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
    status="contract-tested",
)

B580 = _device(
    "b580",
    kind="xpu",
    vendor="intel",
    name="Intel Arc B580",
    arch="bmg_g21",
    memory_total_bytes=12 * _GIB,  # as it is sold
    num_cores=20,  # Xe cores; "Intel Arc B580 Graphics" product specifications
    collective="xccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
    status="contract-tested",
)

MTT_S5000 = _device(
    "mtt-s5000",
    kind="musa",
    vendor="moore threads",
    name="MTT S5000",
    arch="mp_31",
    memory_total_bytes=80 * _GIB,  # as it is sold; musaInfo shows 79.91 GB
    num_cores=56,  # multiProcessorCount; output of musaInfo in the "MUSA SDK 5.2.0" installation guide
    collective="mccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
    status="declared",
)

M3 = _device(
    "m3",
    kind="apple",
    vendor="apple",
    name="Apple M3",
    arch="apple9",
    # The larger variants, of the memory (the CPU's too) and of the GPU: Apple, "MacBook Air (13-inch, M3, 2024) - Tech
    # Specs".
    memory_total_bytes=24 * _GIB,
    num_cores=10,
    collective="gloo",
    missing_dtypes=MPS_MISSING_DTYPES,
    status="contract-tested",
)

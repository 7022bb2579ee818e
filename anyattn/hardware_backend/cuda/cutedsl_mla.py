"""FlashInfer's MLA decode in the CuTe DSL, for Blackwell's data centre GPUs.

What is declared was read in flashinfer-python 0.6.13 and 0.7.4, where it is a backend of the function that has
TensorRT-LLM's kernels too. It compiles at its first use.
"""

from __future__ import annotations

from typing import ClassVar

from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.mla_decode import MLADecodeBackend
from anyattn.types import KV_LAYOUTS, GraphLevel, IntSet, ints


class CuteDSLMLABackend(MLADecodeBackend):
    """Decode of one or several tokens each, bfloat16 throughout.

    Masked keys get a score of -1e6 and their values are multiplied by what that leaves, 0: see `whole_pages`.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm100", "sm103"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16"}),  # fp8 would take scales as floats only
        mla_dims=frozenset({(512, 64)}),
        group_sizes=IntSet(maximum=128),
        page_sizes=ints(2, 4, 8, 16, 32, 64, 128),
        preferred_page_size=64,
        layouts=KV_LAYOUTS,  # of one KV head, so that both are the same bytes
        phases=frozenset({"decode"}),
        decode_qo_len=8,
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=80,
        contract_tested_on=frozenset({"sm100", "sm103"}),
    )
    kernels = "cute-dsl"
    lse_unit = 1.0
    workspace_dtype = "int8"
    workspace_bytes = 128 << 20  # more than any batch takes, by the function's documentation

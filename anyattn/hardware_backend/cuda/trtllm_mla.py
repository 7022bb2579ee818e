"""TensorRT-LLM's generated MLA decode kernels for Blackwell's data centre GPUs, as FlashInfer brings them.

What is declared was read in flashinfer-python 0.6.13 and 0.7.4: the signature, and the host code that picks a kernel.
The kernels themselves are cubins, which FlashInfer fetches, or finds in the package flashinfer-cubin.
"""

from __future__ import annotations

from typing import ClassVar

from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.cuda.mla_decode import LN_2, MLADecodeBackend
from anyattn.types import KV_LAYOUTS, GraphLevel, ints


class TRTLLMMLABackend(MLADecodeBackend):
    """Decode of one or several tokens each. An fp8 cache is attended in fp8, so that q is rounded to it, unscaled.

    The kernels read whole pages by the tensor memory accelerator: see `whole_pages`. Heads come in blocks of 8, 16, 64
    or 128, which must be whole; these are the numbers that tensor parallelism leaves of a model's 128, 64 or 32.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm100", "sm103"}),
        packages=("torch>=2.9", "flashinfer-python>=0.6.13"),
        extra="cuda",
        dtypes=frozenset({"bfloat16"}),  # of the output, always
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        quantizes_q=True,
        quantizes_probs=True,
        mla_dims=frozenset({(512, 64), (256, 64)}),
        group_sizes=ints(8, 16, 32, 64, 128),
        page_sizes=ints(32, 64),
        preferred_page_size=64,
        layouts=KV_LAYOUTS,  # of one KV head, so that both are the same bytes
        phases=frozenset({"decode"}),
        decode_qo_len=8,
        lse=True,
        graph=GraphLevel.UNIFORM,
        contiguous_q=True,
        needs_finite_tails=True,
        priority=95,
        contract_tested_on=frozenset({"sm100", "sm103"}),
    )
    kernels = "trtllm-gen"
    lse_unit = LN_2
    workspace_dtype = "uint8"
    workspace_bytes = 256 << 20  # it begins with counters, which must be 0 at first; each launch leaves them so

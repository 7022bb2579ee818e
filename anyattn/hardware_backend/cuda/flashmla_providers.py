"""Who brings FlashMLA's decode, dense and sparse, and how each is called.

Incompatible distributions share the import name `flash_mla`, so that what is installed is told by its signatures:

- newer upstream, and vLLM's build of it: an object that fills itself at the first call;
- sgl-flash-mla: the same object, and a call that computes what goes into it; dense decode, and sparse decode of rows of
  656 bytes, are among its legacy kernels;
- older upstream, and forks of that: a call that gives two tensors; no sparse decode that would take sinks.

Upstream's release of 2026-09-30 dropped dense decode, those rows and Hopper, and is refused.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache.spec import DSA_V_HEAD_DIM

if TYPE_CHECKING:
    import torch

_MODULES: tuple[Any, ...] = (lazy_import("flash_mla"), lazy_import("vllm.third_party.flashmla.flash_mla_interface"))
"""Where it may be, in order of preference."""

_FUNCTIONS = ("flash_mla_with_kvcache", "get_mla_metadata")

_DECODE = (
    "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
    "softmax_scale", "causal",
)  # fmt: skip
"""Parameters of `flash_mla_with_kvcache` that all of them have."""

_SPARSE = ("is_fp8_kvcache", "indices", "attn_sink")
"""Those that sparse decode wants besides."""


class Provider(ABC):
    """One distribution's decode.

    precomputes: whether `new_metadata` computes it there and then, as a pair of int32 tensors whose shapes follow from
        the number of sequences and `num_rows`. Otherwise it is an object that the first `decode` fills, on the device.
    sparse_arguments: what `decode_sparse` passes besides; None where there is no sparse decode.
    """

    precomputes: ClassVar[bool]
    sparse_arguments: ClassVar[dict[str, Any] | None] = None

    def __init__(self, module: Any) -> None:
        self._module = module
        self._decode = module.flash_mla_with_kvcache

    @abstractmethod
    def new_metadata(self, kv_lens: torch.Tensor, num_rows: int) -> Any:
        """How the work is divided; for all layers, as long as these lengths hold.

        kv_lens: [num_seqs], int32, contiguous. num_rows: new tokens of a sequence times query heads.
        """

    def decode(self, q: torch.Tensor, metadata: Any, **arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [num_seqs, qo_len, num_qo_heads, 512], and LSE [num_seqs, num_qo_heads, qo_len], float32, natural log.

        q: [num_seqs, qo_len, num_qo_heads, 576]. metadata: from `new_metadata`. arguments: the others of
        `_DECODE`. A row that sees nothing gives output 0 and LSE +inf.
        """
        result: tuple[torch.Tensor, torch.Tensor] = self._decode(q=q, **self._of_metadata(metadata), **arguments)
        return result

    def _of_metadata(self, metadata: Any) -> dict[str, Any]:
        return {"tile_scheduler_metadata": metadata, "num_splits": None}

    def new_sparse_metadata(self) -> Any:
        """For all calls of `decode_sparse` with the same shapes: the first one fills it, from nothing but these."""
        return self._module.get_mla_metadata()[0]

    def decode_sparse(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        indices: torch.Tensor,
        metadata: Any,
        *,
        softmax_scale: float,
        attn_sink: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [num_rows, 1, num_qo_heads, 512], and LSE [num_rows, num_qo_heads, 1], float32, natural log.

        q: [num_rows, 1, num_qo_heads, 576], bfloat16, of 64 or 128 heads. k_cache: [num_pages, page_size, 1, 656],
        uint8. indices: [num_rows, 1, topk], int32, slots, -1 for none. attn_sink: [num_qo_heads], float32, which counts
        in the output alone. A row of none gives output 0 and LSE +inf.
        """
        result: tuple[torch.Tensor, torch.Tensor] = self._decode(
            q=q,
            k_cache=k_cache,
            block_table=None,
            cache_seqlens=None,
            head_dim_v=DSA_V_HEAD_DIM,
            tile_scheduler_metadata=metadata,
            num_splits=None,
            softmax_scale=softmax_scale,
            causal=False,
            is_fp8_kvcache=True,
            indices=indices,
            attn_sink=attn_sink,
            **(self.sparse_arguments or {}),
        )
        return result


class SelfFilling(Provider):
    """Newer upstream and vLLM: the first call computes the metadata from its lengths, and keeps it in the object."""

    precomputes = False
    sparse_arguments: ClassVar[dict[str, Any] | None] = {}

    def new_metadata(self, kv_lens: torch.Tensor, num_rows: int) -> Any:
        return self._module.get_mla_metadata()[0]


class Legacy(Provider):
    """sgl-flash-mla: the metadata is computed by a call of its own, and put into the object that the decode takes."""

    PRECOMPUTE = ("seqlens_k", "num_q_tokens_per_head_k", "h_k", "use_legacy")
    precomputes = True
    sparse_arguments: ClassVar[dict[str, Any] | None] = {"use_legacy": True}

    def new_metadata(self, kv_lens: torch.Tensor, num_rows: int) -> Any:
        arguments = zip(self.PRECOMPUTE, (kv_lens, num_rows, 1, True), strict=True)
        return self._module.get_mla_decoding_metadata(**dict(arguments))

    def _of_metadata(self, metadata: Any) -> dict[str, Any]:
        scheduler = self._module.get_mla_metadata()[0]
        scheduler.tile_scheduler_metadata, scheduler.num_splits = metadata
        return {"tile_scheduler_metadata": scheduler, "num_splits": None, "use_legacy": True}


class TwoTensors(Provider):
    """Older upstream, whose second argument had two names."""

    PRECOMPUTE = (
        ("cache_seqlens", "num_heads_per_head_k", "num_heads_k"),
        ("cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k"),
    )
    precomputes = True

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        super().__init__(module)
        self._names = names

    def new_metadata(self, kv_lens: torch.Tensor, num_rows: int) -> Any:
        arguments = zip(self._names, (kv_lens, num_rows, 1), strict=True)
        return tuple(self._module.get_mla_metadata(**dict(arguments)))

    def _of_metadata(self, metadata: Any) -> dict[str, Any]:
        return {"tile_scheduler_metadata": metadata[0], "num_splits": metadata[1]}


def find_provider() -> Provider:
    """The first that is installed and has dense decode.

    Raises ContractError where there is none, with what was found under each name instead.
    """
    return _find("dense", "flashmla")


def find_sparse_provider() -> Provider:
    """The first that is installed and has sparse decode of rows of 656 bytes. Raises as `find_provider` does."""
    return _find("sparse", "dsa")


def _find(kind: Literal["dense", "sparse"], backend: str) -> Provider:
    refused = []
    for module in _MODULES:
        try:
            provider = _provider_of(module)
            if kind == "sparse":
                _require_sparse(provider, module)
            return provider
        except Exception as error:  # an extension that does not fit this torch raises anything when it is loaded
            refused.append(f"{module.__name__}: {error if isinstance(error, ContractError) else repr(error)}")
    raise ContractError(
        f"no FlashMLA is installed whose {kind} decode {backend} knows how to call: {'; '.join(refused)}. Install one "
        'that has it (pip install "anyattn[flashmla]"), or name another decode_backend.'
    )


def _require_sparse(provider: Provider, module: Any) -> None:
    """Raises ContractError where a provider has no sparse decode, or one of other parameters."""
    decode = inspect.signature(module.flash_mla_with_kvcache)
    if provider.sparse_arguments is None:
        raise ContractError("it is of before sparse decode took sinks")
    if not _takes(decode, (*_DECODE, *_SPARSE, *provider.sparse_arguments)):
        raise ContractError(f"it has no sparse decode, or another one, {_FUNCTIONS[0]}{decode}")


def _provider_of(module: Any) -> Provider:
    """By signatures alone. Raises ContractError, or whatever importing the module raises."""
    decode, metadata = (inspect.signature(getattr(module, name)) for name in _FUNCTIONS)
    unknown = ContractError(f"it has unknown signatures, {_FUNCTIONS[0]}{decode} and {_FUNCTIONS[1]}{metadata}")
    if not _takes(decode, _DECODE):
        raise unknown
    if "use_legacy" in decode.parameters:
        if not module.has_legacy():
            raise ContractError("it was built without its legacy kernels, which these decodes are among")
        if not _takes(inspect.signature(module.get_mla_decoding_metadata), Legacy.PRECOMPUTE):
            raise unknown
        return Legacy(module)
    if (fp8 := decode.parameters.get("is_fp8_kvcache")) is not None and fp8.default is True:
        raise ContractError("it has sparse decode alone, of other rows, as upstream since its release of 2026-09-30")
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if all(each.kind in variadic for each in metadata.parameters.values()):
        return SelfFilling(module)
    names = next((names for names in TwoTensors.PRECOMPUTE if _takes(metadata, names)), None)
    if names is None:
        raise unknown
    return TwoTensors(module, names)


def _takes(signature: inspect.Signature, names: tuple[str, ...]) -> bool:
    """Whether it can be called with arguments of just these names."""
    try:
        signature.bind(**dict.fromkeys(names))
    except TypeError:
        return False
    return True

"""Who brings FlashAttention 3 with paged KV, and how each is called.

Their kernels are the same; the functions around them differ in names, and in which options a build has:

- upstream, and SGLang's kernels: `flash_attn_with_kvcache`, which takes the longest sequence from the page table;
- vLLM's build: `flash_attn_varlen_func`, which is told.

All of them read keys and values whole tiles at a time, by the tensor memory accelerator, where a page holds whole
tiles; what lies behind a sequence's end is then multiplied by 0 rather than left out, and `needs_finite_tails` in the
backend's declaration has it made finite.
"""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError, contained
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

_REQUIRED = frozenset(
    {
        "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size", "softcap", "num_splits",
        "return_softmax_lse", "q_descale", "k_descale", "v_descale",
    }
)  # fmt: skip
"""Keywords that every build has, beside those of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the calls of all steps have in common.

    head_dim: of q and k; for MLA the rope part's. dtype: of q, k and v. window_left: tokens before the query's own that
    it sees; -1 for all. softcap: 0.0 for none.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: torch.dtype
    softmax_scale: float
    causal: bool
    window_left: int
    softcap: float
    is_mla: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the calls of one step's layers have in common.

    cu_seqlens_q: [num_seqs + 1], seqused_k: [num_seqs], block_table: [num_seqs, columns], all int32 on the device.
    max_seqlen_q: no sequence has more new tokens. num_splits: parts that keys are divided into; 0 leaves it to FA3.
    """

    cu_seqlens_q: torch.Tensor
    seqused_k: torch.Tensor
    block_table: torch.Tensor
    max_seqlen_q: int
    num_splits: int


class Provider(ABC):
    """One build.

    takes_out, takes_sinks: whether `attend` can be told where to write, and whether it takes sinks, which are then
        bfloat16 and which its LSE counts too.
    has_metadata: whether the division of a step's work can be computed once for all layers; each computes it otherwise.
    """

    function: ClassVar[str]
    tensors: ClassVar[tuple[str, str, str]]
    qv: ClassVar[str]
    sinks: ClassVar[str]
    required: ClassVar[frozenset[str]]

    def __init__(self, module: Any, call: Call) -> None:
        """Raises ContractError where the build is not one that is called like this."""
        self.call = call
        self._function = getattr(module, self.function)
        takes = inspect.signature(self._function).parameters
        if missing := {*self.required, *self.tensors, self.qv} - takes.keys():
            raise ContractError(f"its {self.function} takes no {', '.join(sorted(missing))}")
        self.takes_out = "out" in takes
        self.takes_sinks = self.sinks in takes
        self._metadata_function = getattr(module, "get_scheduler_metadata", None)
        self.has_metadata = self._metadata_function is not None and "scheduler_metadata" in takes

    @abstractmethod
    def options(self, step: Step) -> dict[str, Any]:
        """Keywords of a step's calls, but for its metadata."""

    @abstractmethod
    def _like_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The keywords of `get_scheduler_metadata` that have to be as the calls' are."""

    def metadata(self, step: Step) -> torch.Tensor:
        """How the step's work is divided: int32, [some], computed on the device from the step's lengths.

        Calls that get it go wrong with any other numbers than it was computed with, which the options hold.
        """
        call, like = self.call, self._like_options(self.options(step))
        assert self._metadata_function is not None
        result: torch.Tensor = self._metadata_function(  # the first ones have other names in every build
            step.seqused_k.shape[0],
            step.max_seqlen_q,
            like.pop("max_seqlen_k"),
            call.num_qo_heads,
            call.num_kv_heads,
            call.head_dim,
            step.seqused_k,
            qkv_dtype=call.dtype,
            headdim_v=call.v_head_dim,
            cu_seqlens_q=step.cu_seqlens_q,
            page_size=call.page_size,
            causal=call.causal,
            has_softcap=call.softcap > 0.0,
            num_splits=step.num_splits,
            **like,
        )
        return result

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        options: dict[str, Any],
        out: torch.Tensor | None = None,
        qv: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
        descales: dict[str, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [num_tokens, num_qo_heads, v_head_dim], and LSE [num_qo_heads, num_tokens], float32, natural log.

        q: [num_tokens, num_qo_heads, head_dim]. k, v: [num_pages, page_size, num_kv_heads, head_dim or v_head_dim].
        options: of the step, with `scheduler_metadata` where there are some. out: where to write.
        qv: MLA's latent part of q. descales: q_descale, k_descale and v_descale of fp8, [num_seqs, num_kv_heads],
            float32; the output is bfloat16 then.
        """
        of_q, of_k, of_v = self.tensors
        arguments = {**options, of_q: q, of_k: k, of_v: v}
        if out is not None:
            arguments["out"] = out
        if qv is not None:
            arguments[self.qv] = qv
        if sinks is not None:
            arguments[self.sinks] = sinks.contiguous()
        if descales is not None:
            arguments.update(descales)
        result = self._function(**arguments)
        return result[0], result[1]

    def _common(self, step: Step) -> dict[str, Any]:
        call = self.call
        return {
            "cu_seqlens_q": step.cu_seqlens_q,
            "max_seqlen_q": step.max_seqlen_q,
            "softmax_scale": call.softmax_scale,
            "causal": call.causal,
            "window_size": (call.window_left, 0 if call.window_left >= 0 else -1),
            "softcap": call.softcap,
            "num_splits": step.num_splits,
            "return_softmax_lse": True,
        }


class WithKVCache(Provider):
    """Upstream and SGLang's kernels, which know the longest sequence as what the page table could hold."""

    function = "flash_attn_with_kvcache"
    tensors = ("q", "k_cache", "v_cache")
    qv, sinks = "qv", "sinks"
    required = _REQUIRED | {"cache_seqlens", "page_table"}

    def options(self, step: Step) -> dict[str, Any]:
        return self._common(step) | {"cache_seqlens": step.seqused_k, "page_table": step.block_table}

    def _like_options(self, options: dict[str, Any]) -> dict[str, Any]:
        max_seqlen_k = options["page_table"].shape[1] * self.call.page_size
        return {"max_seqlen_k": max_seqlen_k, "window_size": options["window_size"]}


class Varlen(Provider):
    """vLLM's build, which has FlashAttention 2 and 4 beside it."""

    function = "flash_attn_varlen_func"
    tensors = ("q", "k", "v")
    qv, sinks = "q_v", "s_aux"
    required = _REQUIRED | {"seqused_k", "block_table", "max_seqlen_k", "fa_version"}

    def __init__(self, module: Any, call: Call) -> None:
        if not module.FA3_AVAILABLE:
            raise ContractError("it was built without FlashAttention 3, or its kernels do not load")
        super().__init__(module, call)

    def options(self, step: Step) -> dict[str, Any]:
        return self._common(step) | {
            "seqused_k": step.seqused_k,
            "block_table": step.block_table,
            "max_seqlen_k": step.block_table.shape[1] * self.call.page_size,
            "fa_version": 3,
        }

    def _like_options(self, options: dict[str, Any]) -> dict[str, Any]:
        return {name: options[name] for name in ("max_seqlen_k", "window_size")}


_BUILDS: tuple[tuple[Any, type[Provider], frozenset[str] | None], ...] = (
    (lazy_import("flash_attn_interface"), WithKVCache, None),
    (lazy_import("sgl_kernel.flash_attn"), WithKVCache, None),
    (lazy_import("vllm.vllm_flash_attn"), Varlen, frozenset({"sm90"})),
)
"""In order of preference, with the archs that a build has kernels for; None for all that FlashAttention 3 has."""


def find_provider(call: Call, arch: str) -> Provider:
    """The first that is installed, loads and is called as is known here. Warns of those before it that do not load.

    Raises ContractError where there is none, with what is wrong with each.
    """
    absent, broken = [], []
    for module, kind, archs in _BUILDS:
        name = module.__name__
        if archs is not None and arch not in archs:
            absent.append(f"{name} has no kernels for {arch}")
            continue
        try:
            provider: Provider = contained(kind, module, call)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                broken.append(f"{name} needs {error.name}")  # it is installed, and what it imports is not
            else:
                absent.append(f"{name} is not installed")
        except Exception as error:  # an extension that does not fit this torch raises anything when it is loaded
            broken.append(f"{name}: {error if isinstance(error, ContractError) else repr(error)}")
        else:
            if broken:
                text = f"fa3 runs on {name}, as what it prefers is installed and cannot be used: {'; '.join(broken)}"
                warnings.warn(text, stacklevel=3)
            return provider
    raise ContractError(
        f"no build of FlashAttention 3 can be used: {'; '.join([*broken, *absent])}. Install one that was built for "
        'the torch that is installed (pip install "sglang-kernel>=0.4"), or name another backend.'
    )


def is_aligned(x: torch.Tensor) -> bool:
    """Whether every row of [tokens, heads, dim] begins where FlashAttention 3 can access it: at a multiple of 16 bytes.

    Written out, as it is done for every layer of every step.
    """
    token, head, _ = x.stride()
    return not (x.data_ptr() | (token | head) * x.itemsize) % 16

"""What attention a model's layers compute: the question that selection answers."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.errors import SpecError
from anyattn.mem_cache.spec import DSA_HEAD_DIM, DSA_V_HEAD_DIM, CacheKind, CacheSpec
from anyattn.types import DTYPE_BYTES, FP8_DTYPES, GraphLevel, KVLayout, dtype_name

_KV_DTYPES = ("auto", *DTYPE_BYTES)
_FLAGS = (
    "kv_scale_per_head", "may_quantize_q", "may_quantize_probs", "causal", "sinks", "alibi", "tree_mask", "return_lse",
    "deterministic",
)  # fmt: skip
_SMALLEST, _LARGEST = 1e-30, 1e30  # within what float32 products of scores keep


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One kind of attention layer, as data. MHA, GQA and MQA by head counts; for MLA use `AttentionSpec.mla`.

    Every field that asks for a feature has a neutral default. A backend that does not know a field refuses the
    spec unless the field holds its default, so a field added later is never silently ignored.

    num_qo_heads, num_kv_heads: heads on this device, after tensor parallelism.
    head_dim: elements of one query and key head.
    v_head_dim: elements of one value and output head, where they differ from `head_dim`. For MLA: elements of one
        value head after the up-projection, wanted for `bind_mla` only.
    dtype: of q, k, v and the output; a name or a torch dtype.
    kv_dtype: of the cache; "auto" is `dtype`.
    kv_scale_per_head: fp8 keys and values may have a scale for each KV head, float32 tensors [num_kv_heads], where
        otherwise one scale serves all heads of a layer. Not for MLA.
    may_quantize_q, may_quantize_probs: whether a backend may round q, or the softmax's numerators, to the dtype of an
        fp8 cache, so that its products run in fp8. What it costs in precision is the model's to bear, so none does it
        unasked. Without an fp8 cache they change nothing.
    sm_scale: what scores are multiplied with; None is 1/sqrt(head_dim).
    causal: position p sees [0, p], aligned bottom-right; otherwise every token of the sequence.
    sliding_window: W sees (p - W, p], the token itself counted.
    logits_soft_cap: c maps scaled scores s to c * tanh(s / c).
    sinks: `run` takes one logit a head that joins the softmax's denominator (it changes the output, not the LSE).
    alibi: `run` takes one slope a head; slope * (key position - query position) is added to the scores.
    tree_mask: batches may bring a mask among a sequence's new tokens (verification of speculated token trees).
    return_lse: `run` also returns log(sum(exp(scores))), natural, float32, [num_tokens, num_qo_heads].
    graph: the batches for which a captured device graph must stay valid; a GraphLevel or its name in lower case.
    deterministic: a row's bits do not depend on the other sequences of its batch.
    kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim: MLA's latent rank and parts of the query head.
    topk: sparse MLA, as in DeepSeek-V3.2: `run` takes for each token so many positions of its sequence, chosen by the
        engine, and the token sees of these what the causal mask lets it see. Needs a latent of 512, a rope part of 64
        and kv_dtype float8_e4m3fn; the cache then holds the rows that `mem_cache.sparse_pools.DSAPool` describes.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    kv_scale_per_head: bool = False
    may_quantize_q: bool = False
    may_quantize_probs: bool = False
    sm_scale: float | None = None
    causal: bool = True
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    tree_mask: bool = False
    return_lse: bool = False
    graph: GraphLevel = GraphLevel.NEVER
    deterministic: bool = False
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    qk_nope_head_dim: int | None = None
    topk: int | None = None

    @classmethod
    def mla(
        cls, *, num_qo_heads: int, kv_lora_rank: int, qk_rope_head_dim: int, sm_scale: float, **fields: Any
    ) -> AttentionSpec:
        """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) in its absorbed form.

        q is [num_tokens, num_qo_heads, kv_lora_rank + qk_rope_head_dim], latent part first; k is
        [num_tokens, kv_lora_rank + qk_rope_head_dim]; v is None; the output's heads have kv_lora_rank elements.
        `sm_scale` must be given: it follows from the head size before absorption, which need not be in the spec.
        """
        return cls(
            num_qo_heads=num_qo_heads,
            num_kv_heads=1,
            head_dim=kv_lora_rank + qk_rope_head_dim,
            kv_lora_rank=kv_lora_rank,
            qk_rope_head_dim=qk_rope_head_dim,
            sm_scale=sm_scale,
            **fields,
        )

    @classmethod
    def from_hf_config(
        cls, config: str | os.PathLike[str] | dict[str, Any], tp: int = 1, *, dtype: Any = None, kv_dtype: Any = "auto"
    ) -> tuple[AttentionSpec, ...]:
        """A spec for each layer of a Hugging Face model, as `create_runtime` takes them. `layer_kinds` groups them.

        config: path of a config.json or of its folder, or its contents. Of a multimodal model, the language model's.
        tp: degree of tensor parallelism; the specs are those of one of `tp` devices.
        dtype: instead of the config's; "bfloat16" where it has none.

        Raises SpecError where the config cannot be read, or not with certainty, and for a tp that does not divide.
        """
        from anyattn.attention.hf_config import specs_from_hf_config

        return specs_from_hf_config(config, tp, dtype=dtype, kv_dtype=kv_dtype)

    @classmethod
    def from_preset(
        cls, name: str, tp: int = 1, *, dtype: Any = None, kv_dtype: Any = "auto"
    ) -> tuple[AttentionSpec, ...]:
        """A spec for each layer of a well-known model; see `anyattn.attention.presets` and `from_hf_config`.

        Raises SpecError for an unknown name, with those that are known.
        """
        from anyattn.attention.presets import specs_from_preset

        return specs_from_preset(name, tp, dtype=dtype, kv_dtype=kv_dtype)

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_dtype"):
            value = getattr(self, name)
            if isinstance(value, int | float):  # what has no business here may be too long to be put into words
                raise SpecError(f"{name} must be one of {', '.join(DTYPE_BYTES)}, or torch's own, not a number.")
            object.__setattr__(self, name, dtype_name(value))
        self._check_sizes()
        self._check_graph()
        self._check_dtypes()
        self._check_masks()
        if self.kv_lora_rank is None:
            if self.qk_rope_head_dim is not None or self.qk_nope_head_dim is not None:
                raise SpecError("qk_rope_head_dim and qk_nope_head_dim belong to MLA: use AttentionSpec.mla(...).")
        else:
            self._check_mla(self.kv_lora_rank)
        if self.topk is not None:
            self._check_topk()

    def _check_sizes(self) -> None:
        optional = ("v_head_dim", "sliding_window", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "topk")
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SpecError(f"{name} must be a positive integer, not {value!r}.")
        if self.num_qo_heads % self.num_kv_heads:
            raise SpecError(
                f"num_qo_heads must be a multiple of num_kv_heads: {self.num_qo_heads} and {self.num_kv_heads} given."
            )
        if self.sliding_window is not None and self.sliding_window >= 1 << 31:
            raise SpecError(f"sliding_window must be less than 2**31, not {self.sliding_window}; None is no window.")
        for name in ("sm_scale", "logits_soft_cap"):
            value = getattr(self, name)
            if value is None:
                continue
            try:
                number = float(value)
            except (TypeError, ValueError, OverflowError):
                number = math.nan
            if not _SMALLEST < number < _LARGEST or isinstance(value, str):
                raise SpecError(f"{name} must be a number from {_SMALLEST} to {_LARGEST}, or None: {value!r} given.")
            object.__setattr__(self, name, number)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise SpecError(f"{name} must be True or False, not {getattr(self, name)!r}.")

    def _check_graph(self) -> None:
        if isinstance(self.graph, GraphLevel):
            return
        names = [level.name.lower() for level in GraphLevel]
        if self.graph not in names:
            raise SpecError(f"graph must be one of {', '.join(names)}, not {self.graph!r}.")
        object.__setattr__(self, "graph", GraphLevel[str(self.graph).upper()])

    def _check_dtypes(self) -> None:
        if self.dtype not in DTYPE_BYTES or self.dtype in FP8_DTYPES:
            computing = [name for name in DTYPE_BYTES if name not in FP8_DTYPES]
            raise SpecError(f"dtype must be one of {', '.join(computing)}, not {self.dtype!r}.")
        if self.kv_dtype not in _KV_DTYPES:
            raise SpecError(f"kv_dtype must be one of {', '.join(_KV_DTYPES)}, not {self.kv_dtype!r}.")
        if self.kv_dtype == self.dtype:  # one name for one thing, so that equal specs compare equal
            object.__setattr__(self, "kv_dtype", "auto")
        if self.kv_scale_per_head and self.kv_dtype not in FP8_DTYPES:
            raise SpecError(
                f"kv_scale_per_head needs a kv_dtype of {' or '.join(sorted(FP8_DTYPES))}, not {self.kv_dtype!r}: only "
                "fp8 has scales."
            )

    def _check_masks(self) -> None:
        if self.sliding_window is not None and not self.causal:
            raise SpecError("sliding_window needs causal=True: it reaches back from the token, (p - W, p].")
        if self.tree_mask and not self.causal:
            raise SpecError("tree_mask needs causal=True: it thins out what a causal mask would let a token see.")
        if self.tree_mask and (self.sliding_window is not None or self.alibi):
            raise SpecError(
                "tree_mask cannot be joined with sliding_window or alibi: a tree's tokens lie in the cache in an "
                "order that is not their position."
            )

    def _check_mla(self, kv_lora_rank: int) -> None:
        if self.num_kv_heads != 1 or self.qk_rope_head_dim is None or self.sm_scale is None:
            raise SpecError("MLA has one KV head, a qk_rope_head_dim and an sm_scale: use AttentionSpec.mla(...).")
        if self.head_dim != kv_lora_rank + self.qk_rope_head_dim:
            raise SpecError(
                f"head_dim must be kv_lora_rank + qk_rope_head_dim = {kv_lora_rank + self.qk_rope_head_dim} for MLA, "
                f"not {self.head_dim}."
            )
        if self.kv_scale_per_head:
            raise SpecError("kv_scale_per_head is not for MLA, which keeps one latent for all heads.")
        if (self.qk_nope_head_dim is None) != (self.v_head_dim is None):
            raise SpecError("qk_nope_head_dim and v_head_dim must be given together: bind_mla needs both.")

    def _check_topk(self) -> None:
        if (self.kv_lora_rank, self.head_dim) != (DSA_V_HEAD_DIM, DSA_HEAD_DIM):
            raise SpecError(
                f"topk needs MLA with a kv_lora_rank of {DSA_V_HEAD_DIM} and a qk_rope_head_dim of "
                f"{DSA_HEAD_DIM - DSA_V_HEAD_DIM}, which is what the rows of sparse attention hold."
            )
        if self.kv_dtype != "float8_e4m3fn":
            raise SpecError(
                f"topk needs kv_dtype='float8_e4m3fn', as the rows of sparse attention hold it, not {self.kv_dtype!r}."
            )
        for name, neutral in (("causal", True), ("sliding_window", None), ("alibi", False), ("tree_mask", False)):
            if getattr(self, name) != neutral:
                raise SpecError(f"topk needs {name}={neutral}: what a token sees is chosen among all before it.")

    @property
    def is_mla(self) -> bool:
        """Whether k holds latents that also serve as values."""
        return self.kv_lora_rank is not None

    @property
    def vo_head_dim(self) -> int:
        """Elements of a value and output head as the backend computes it; kv_lora_rank for MLA."""
        return self.kv_lora_rank or self.v_head_dim or self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def scale(self) -> float:
        """sm_scale, its default filled in."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def storage_dtype(self) -> str:
        """kv_dtype, "auto" filled in."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype

    def replace(self, **fields: Any) -> AttentionSpec:
        """A copy with these fields changed."""
        return dataclasses.replace(self, **fields)

    @property
    def cache_kind(self) -> CacheKind:
        """What the layers keep, as `CacheSpec` calls it."""
        if self.topk is not None:
            return "dsa"
        return "mla" if self.is_mla else "mha"

    def cache_spec(
        self, *, num_layers: int, page_size: int, layout: KVLayout, joined_layers: bool = False
    ) -> CacheSpec:
        """The KV cache that `num_layers` such layers need. Raises SpecError where the layout cannot hold it."""
        return CacheSpec(
            num_layers=num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.vo_head_dim,
            kv_dtype=self.storage_dtype,
            page_size=page_size,
            layout=layout,
            kind=self.cache_kind,
            joined_layers=joined_layers,
        )

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["graph"] = self.graph.name.lower()
        return fields

    def __str__(self) -> str:
        shown = [f"{self.num_qo_heads}/{self.num_kv_heads} heads of {self.head_dim}", self.dtype]
        for field in dataclasses.fields(self):
            if field.name not in ("num_qo_heads", "num_kv_heads", "head_dim", "dtype"):
                value = getattr(self, field.name)
                if value != field.default:
                    shown.append(f"{field.name}={value.name.lower() if field.name == 'graph' else value}")
        return ", ".join(shown)


def stretches(layers: Sequence[int]) -> str:
    """Layers by number, neighbours joined: "0-4, 6-10"."""
    firsts = [number for number in layers if number - 1 not in layers]
    lasts = [number for number in layers if number + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(firsts, lasts, strict=True))


def layer_kinds(specs: Iterable[AttentionSpec]) -> dict[AttentionSpec, list[int]]:
    """The layers of each distinct spec, by number, in order of appearance."""
    kinds: dict[AttentionSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        kinds.setdefault(spec, []).append(number)
    return kinds

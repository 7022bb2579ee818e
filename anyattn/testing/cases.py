"""Which specs and batches a backend must get right, derived from what it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.types import KVLayout

_HEAD_DIMS = (64, 128, 256, 16, 80, 72, 96, 192)
_GROUP_SIZES = (1, 2, 3, 5, 6, 7, 8, 16, 71)
_PAGE_SIZES = (1, 3, 16, 64, 128, 256)
_WINDOWS = (1, 2, 33, 64)

_STEPS = (
    (40, 0, 7, 129),  # prefill of odd lengths, one sequence still empty
    (5, 63, 1, 0),  # chunked prefill and a decode in one step, one sequence rests
    (1, 1, 1, 1),
    (1, 1, 1, 1),
    (0, 1, 0, 1),
    (0, 0, 0, 0),
    (2, 3, 4, 5),
    (1, 1, 1, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One spec and the steps it is driven through; tokens that each sequence gains in each step."""

    name: str
    spec: AttentionSpec
    page_size: int
    layout: KVLayout
    steps: tuple[tuple[int, ...], ...] = _STEPS
    scale_as_tensor: bool = False
    """For fp8: whether k_scale and v_scale are tensors or floats."""


def cases_for(capabilities: Capabilities) -> Iterator[Case]:
    """Every declared value at least once, each against one base case that is otherwise plain."""
    if capabilities.any_head_dim_pair or capabilities.head_dims is not None or capabilities.head_dim_pairs:
        yield from _cases(capabilities, _base_spec(capabilities))
    for rank, rope in sorted(capabilities.mla_dims) or ([(64, 16), (512, 64)] if capabilities.any_mla_dims else []):
        spec = AttentionSpec.mla(
            num_qo_heads=8,
            kv_lora_rank=rank,
            qk_rope_head_dim=rope,
            sm_scale=(rank + rope) ** -0.5,
            dtype=_base_dtype(capabilities),
        )
        yield from _cases(capabilities, spec, f"MLA {rank}+{rope} ")


def _base_dtype(capabilities: Capabilities) -> str:
    return next(d for d in ("bfloat16", "float16", "float32", "float64") if d in capabilities.dtypes)


def _base_spec(capabilities: Capabilities) -> AttentionSpec:
    qk, vo = next(_head_dims(capabilities))
    group = next(size for size in (4, *_GROUP_SIZES) if size in capabilities.group_sizes)
    return AttentionSpec(
        num_qo_heads=2 * group,
        num_kv_heads=2,
        head_dim=qk,
        v_head_dim=None if qk == vo else vo,
        dtype=_base_dtype(capabilities),
        causal=max(capabilities.causal),
    )


def _head_dims(capabilities: Capabilities) -> Iterator[tuple[int, int]]:
    yield from ((d, d) for d in _HEAD_DIMS if capabilities.any_head_dim_pair or d in (capabilities.head_dims or ()))
    yield from sorted(capabilities.head_dim_pairs)
    if capabilities.any_head_dim_pair:
        yield from ((192, 128), (32, 48))


def _cases(capabilities: Capabilities, spec: AttentionSpec, prefix: str = "") -> Iterator[Case]:
    page_sizes = [size for size in _PAGE_SIZES if size in capabilities.page_sizes]
    page_size = capabilities.preferred_page_size or page_sizes[0]
    layout = capabilities.layouts[0]

    def case(name: str, spec: AttentionSpec = spec, **fields: Any) -> Case:
        return Case(**{"name": prefix + name, "spec": spec, "page_size": page_size, "layout": layout, **fields})

    yield case("plain")
    for size in page_sizes:
        for name in capabilities.layouts:
            yield case(f"page size {size}, {name}", page_size=size, layout=name)
    for dtype in sorted(capabilities.dtypes - {spec.dtype}):
        yield case(dtype, spec.replace(dtype=dtype))
    for kv_dtype in sorted(capabilities.kv_dtypes - {spec.dtype}):
        for as_tensor in (False, True):
            kind = "tensor" if as_tensor else "float"
            yield case(f"KV {kv_dtype}, {kind} scales", spec.replace(kv_dtype=kv_dtype), scale_as_tensor=as_tensor)
    if not spec.is_mla:
        for qk, vo in _head_dims(capabilities):
            sized = spec.replace(head_dim=qk, v_head_dim=None if qk == vo else vo)
            yield case(f"head dim {qk}, {vo}", sized)
            if capabilities.sliding_window:  # kernels specialised by size have failed in the masks of one size only
                yield case(f"head dim {qk}, {vo}, sliding_window=33", sized.replace(sliding_window=33))
        for size in _GROUP_SIZES:
            if size in capabilities.group_sizes:
                yield case(f"{size} query heads a KV head", spec.replace(num_qo_heads=size * spec.num_kv_heads))
    for causal in sorted(capabilities.causal - {spec.causal}):
        yield case(f"causal {causal}", spec.replace(causal=causal))
    for fields in _features(capabilities):
        yield case(", ".join(f"{name}={value}" for name, value in fields.items()), spec.replace(**fields))


def _features(capabilities: Capabilities) -> Iterator[dict[str, Any]]:
    """Each declared feature by itself, with the LSE, and all that go together at once."""
    single: list[dict[str, Any]] = []
    if capabilities.sliding_window:
        single += [{"sliding_window": window} for window in _WINDOWS]
    if capabilities.logits_soft_cap:
        single.append({"logits_soft_cap": 3.0})
    if capabilities.sinks:
        single.append({"sinks": True})
    if capabilities.alibi:
        single.append({"alibi": True})
    if capabilities.tree_mask:
        single.append({"tree_mask": True})
    yield from single
    if capabilities.deterministic and capabilities.phases >= {"prefill", "decode", "mixed"}:  # one backend for all
        yield {"deterministic": True}
        yield from ({**fields, "deterministic": True} for fields in single)
    if capabilities.lse:
        yield {"return_lse": True}
        yield from ({**fields, "return_lse": True} for fields in single)
    together = {key: value for fields in single if "tree_mask" not in fields for key, value in fields.items()}
    if len(together) > 1:
        yield together

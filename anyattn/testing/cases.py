"""Which specs and batches a backend must get right, derived from what it declares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.pages import holds
from anyattn.attention.spec import AttentionSpec
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, KVLayout

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
    """One spec and the steps it is driven through; tokens that each sequence gains in each step.

    window_pages: where the spec has a window, whether its layer keeps the window's pages only, in a pool of their own,
        so that the tables name the null page for all pages that were let go.
    joined_layers: whether the pages are those of one layer among several that share a storage.
    scale_as_tensor: for fp8, whether k_scale and v_scale are tensors or floats; with `spec.kv_scale_per_head` they are
        tensors with a scale for each head.
    """

    name: str
    spec: AttentionSpec
    page_size: int
    layout: KVLayout
    steps: tuple[tuple[int, ...], ...] = _STEPS
    window_pages: bool = True
    joined_layers: bool = False
    scale_as_tensor: bool = False


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


def _cases(capabilities: Capabilities, base: AttentionSpec, prefix: str = "") -> Iterator[Case]:
    page_sizes = [size for size in _PAGE_SIZES if size in capabilities.page_sizes]
    usual = capabilities.preferred_page_size or next(iter(page_sizes), capabilities.page_sizes.example())
    sizes = tuple(dict.fromkeys([usual, *page_sizes]))

    def case(
        name: str,
        spec: AttentionSpec = base,
        *,
        layouts: tuple[KVLayout, ...] = capabilities.layouts,
        page_sizes: tuple[int, ...] = sizes,
        **fields: Any,
    ) -> Iterator[Case]:
        """One case, with the first of these pages that can hold it; none where none of them can."""
        for layout, size in product(layouts, page_sizes):
            if holds(spec, layout, size):
                yield Case(name=prefix + name, spec=spec, page_size=size, layout=layout, **fields)
                return

    yield from case("plain")
    for size, layout in product(page_sizes, capabilities.layouts):
        yield from case(f"page size {size}, {layout}", layouts=(layout,), page_sizes=(size,))
    for dtype in sorted(capabilities.dtypes - {base.dtype}):
        yield from case(dtype, base.replace(dtype=dtype))
    for kv_dtype in sorted(capabilities.kv_dtypes - {base.dtype}):
        stored = base.replace(kv_dtype=kv_dtype)
        for as_tensor in (False, True):
            kind = "tensor" if as_tensor else "float"
            yield from case(f"KV {kv_dtype}, {kind} scales", stored, scale_as_tensor=as_tensor)
        if capabilities.per_head_scales and kv_dtype in FP8_DTYPES and not base.is_mla:
            per_head = stored.replace(kv_scale_per_head=True)
            yield from case(f"KV {kv_dtype}, a scale for each head", per_head, scale_as_tensor=True)
        for layout in capabilities.layouts:
            if layout not in KV_LAYOUTS:  # cut by the size of an element
                yield from case(f"KV {kv_dtype}, {layout}", stored, layouts=(layout,))
    if capabilities.strided_pages:
        yield from _joined_cases(capabilities, base, case)
    if not base.is_mla:
        for qk, vo in _head_dims(capabilities):
            sized = base.replace(head_dim=qk, v_head_dim=None if qk == vo else vo)
            yield from case(f"head dim {qk}, {vo}", sized)
            if capabilities.sliding_window:  # kernels specialised by size have failed in the masks of one size only
                yield from case(f"head dim {qk}, {vo}, sliding_window=33", sized.replace(sliding_window=33))
        for size in _GROUP_SIZES:
            if size in capabilities.group_sizes:
                grouped = base.replace(num_qo_heads=size * base.num_kv_heads)
                yield from case(f"{size} query heads a KV head", grouped)
    for causal in sorted(capabilities.causal - {base.causal}):
        yield from case(f"causal {causal}", base.replace(causal=causal))
    for features in _features(capabilities):
        name = ", ".join(f"{name}={value}" for name, value in features.items())
        yield from case(name, base.replace(**features))
        if features.keys() == {"sliding_window"}:
            yield from case(f"{name}, in pages that are all kept", base.replace(**features), window_pages=False)


def _joined_cases(
    capabilities: Capabilities, base: AttentionSpec, case: Callable[..., Iterator[Case]]
) -> Iterator[Case]:
    """Pages of several layers in one storage: by layout, by element size, and where keys and values differ in size."""
    for layout in capabilities.layouts:
        yield from case(f"joined layers, {layout}", layouts=(layout,), joined_layers=True)
    for kv_dtype in sorted(capabilities.kv_dtypes & FP8_DTYPES):
        yield from case(f"joined layers, KV {kv_dtype}", base.replace(kv_dtype=kv_dtype), joined_layers=True)
    if not base.is_mla:
        for qk, vo in _head_dims(capabilities):
            if qk != vo:
                sized = base.replace(head_dim=qk, v_head_dim=vo)
                yield from case(f"joined layers, head dim {qk}, {vo}", sized, joined_layers=True)
    if capabilities.sliding_window:
        yield from case("joined layers, sliding_window=33", base.replace(sliding_window=33), joined_layers=True)


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

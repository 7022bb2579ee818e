"""Cases of what is stored: pages, layouts, dtypes, scales and the sizes of heads."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from anyattn.testing.numerics.case import Case, Section
from anyattn.testing.numerics.values import GROUP_SIZES, Fields, head_dims, serves
from anyattn.types import FP8_DTYPES, KV_LAYOUTS


def pages(section: Section) -> Iterator[Case]:
    """Each layout at the usual size or another that can hold it; each size in each layout, or in the first one."""
    layouts = section.declared.layouts
    for layout in layouts:
        yield from section.case(f"layout {layout}", "layouts", layouts=(layout,))
    for size, layout in product(sorted(section.sizes), layouts if section.depth == 2 else layouts[:1]):
        yield from section.case(f"page size {size}, {layout}", "page_sizes", layouts=(layout,), page_sizes=(size,))


def dtypes(section: Section) -> Iterator[Case]:
    declared, base = section.declared, section.base
    for dtype in sorted(declared.dtypes):
        yield from section.case(dtype, "dtypes", spec={"dtype": dtype})
    for kv_dtype in sorted(declared.kv_dtypes - {base.dtype}):
        stored = {"kv_dtype": kv_dtype}
        if kv_dtype not in FP8_DTYPES:
            yield from section.case(f"KV {kv_dtype}", "kv_dtypes", spec=stored)
            continue
        for as_tensor in (False, True):
            kind = "tensor" if as_tensor else "float"
            yield from section.case(
                f"KV {kv_dtype}, {kind} scales", "kv_dtypes", spec=stored, scale_as_tensor=as_tensor
            )
        for capability in ("quantizes_q", "quantizes_probs"):
            if getattr(declared, capability):
                text = "q" if capability == "quantizes_q" else "the softmax's numerators"
                yield from section.case(
                    f"KV {kv_dtype}, {text} rounded to it", capability, spec=stored, query_scale=3.0
                )
        if declared.per_head_scales and not base.is_mla:
            per_head = {**stored, "kv_scale_per_head": True}
            name = f"KV {kv_dtype}, a scale for each head"
            yield from section.case(name, "per_head_scales", spec=per_head, scale_as_tensor=True)
    for kv_dtype, dtype in product(sorted(declared.kv_dtypes), sorted(declared.dtypes - {base.dtype})):
        if section.depth and kv_dtype != dtype:  # any of the cache's with any of q's
            name, spec = f"{dtype}, KV {kv_dtype}", {"dtype": dtype, "kv_dtype": kv_dtype}
            yield from section.case(name, "kv_dtypes", spec=spec, scale_as_tensor=True)
    for kv_dtype, layout in product(sorted(declared.kv_dtypes - {base.dtype}), declared.layouts):
        if layout not in KV_LAYOUTS:  # cut by the size of an element
            name = f"KV {kv_dtype}, {layout}"
            yield from section.case(name, "layouts", spec={"kv_dtype": kv_dtype}, layouts=(layout,))


def joined_layers(section: Section) -> Iterator[Case]:
    """Pages of several layers in one storage: by layout, by element size, and where keys and values differ."""
    declared = section.declared
    if not declared.strided_pages:
        return
    joined: Fields = {"capability": "strided_pages", "joined_layers": True}
    for layout in declared.layouts:
        yield from section.case(f"joined layers, {layout}", layouts=(layout,), **joined)
    for kv_dtype in sorted(declared.kv_dtypes & FP8_DTYPES):
        yield from section.case(f"joined layers, KV {kv_dtype}", spec={"kv_dtype": kv_dtype}, **joined)
    if not section.base.is_mla:
        for qk, vo in head_dims(declared):
            if qk != vo:
                sized = {"head_dim": qk, "v_head_dim": vo}
                yield from section.case(f"joined layers, head dim {qk}, {vo}", spec=sized, **joined)
    if serves(declared, "sliding_window"):
        yield from section.case("joined layers, sliding_window=33", spec={"sliding_window": 33}, **joined)


def heads(section: Section) -> Iterator[Case]:
    """Their sizes, and how many query heads read a KV head."""
    if not section.base.is_mla:
        for qk, vo in head_dims(section.declared):
            capability = "head_dims" if qk == vo else "head_dim_pairs"
            sized = {"head_dim": qk, "v_head_dim": None if qk == vo else vo}
            yield from section.case(f"head dim {qk}, {vo}", capability, spec=sized)
            if serves(section.declared, "sliding_window"):  # a kernel made for a size can fail in its masks only
                windowed = {**sized, "sliding_window": 33}
                yield from section.case(f"head dim {qk}, {vo}, sliding_window=33", capability, spec=windowed)
    if not section.base.is_mla:
        for num_kv_heads in (1, 3, 8):  # 1 is multi-query attention
            grouped = {"num_kv_heads": num_kv_heads, "num_qo_heads": num_kv_heads * section.base.group_size}
            name = f"{grouped['num_qo_heads']} query heads, KV heads: {num_kv_heads}"
            yield from section.case(name, "group_sizes", spec=grouped)
    for size in GROUP_SIZES if section.depth == 2 else GROUP_SIZES[::4]:
        if size in section.declared.group_sizes:
            grouped = {"num_qo_heads": size * section.base.num_kv_heads}
            yield from section.case(f"{size} query heads a KV head", "group_sizes", spec=grouped)

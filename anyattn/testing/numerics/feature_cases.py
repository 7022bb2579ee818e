"""Cases of features: each by itself, at its edges, and together with others."""

from __future__ import annotations

from collections.abc import Iterator

from anyattn.testing.numerics.case import Case, Section, text_of
from anyattn.testing.numerics.values import (
    EXACT_WINDOW,
    Fields,
    declared_phases,
    features,
    head_dims,
    serves,
    window_sizes,
)
from anyattn.types import FP8_DTYPES


def single_features(section: Section) -> Iterator[Case]:
    """Each by itself, with the LSE, and all that go together at once."""
    declared = section.declared
    for causal in sorted(declared.causal - {section.base.causal}):
        yield from section.case(f"causal {causal}", "causal", spec={"causal": causal})
    single = list(features(declared))
    for capability, spec in single:
        yield from section.case(text_of(spec), capability, spec=spec)
    if declared.lse:
        for capability, spec in [("lse", {}), *single]:
            more = {**spec, "return_lse": True}
            yield from section.case(text_of(more), "lse" if not spec else capability, spec=more)
        for causal in sorted(declared.causal - {section.base.causal}):
            yield from section.case(
                f"causal {causal}, return_lse=True", "lse", spec={"causal": causal, "return_lse": True}
            )
    together: Fields = {}
    for _, spec in single:
        together |= {} if "tree_mask" in spec else spec
    if len(together) > 1:
        if "sliding_window" in together:
            together["sliding_window"] = 64
        yield from section.case(text_of(together), "combinations", spec=together)


def windows(section: Section) -> Iterator[Case]:
    """At every edge: of a page, of a sequence, of nothing but the token itself."""
    if not serves(section.declared, "sliding_window"):
        return
    page_size = section.sizes[0]
    for window in window_sizes(page_size) if section.depth == 2 else (1, page_size, EXACT_WINDOW):
        spec: Fields = {"sliding_window": window}
        yield from section.case(text_of(spec), "sliding_window", spec=spec)
        if window in (1, page_size, 33):
            name = f"{text_of(spec)}, in pages that are all kept"
            yield from section.case(name, "sliding_window", spec=spec, window_pages=False)


def trees_and_sinks(section: Section) -> Iterator[Case]:
    """Trees and sinks that are not the usual ones."""
    declared = section.declared
    lse: Fields = {"return_lse": True} if declared.lse else {}
    if serves(declared, "tree_mask"):
        tree: Fields = {"tree_mask": True}
        lens = ((3, 5, 7, 6), (9, 1, 2, 11), (1, 1, 1, 1))
        yield from section.case(
            "tree_mask=True, 3, 5, 6 and 7 tokens", "tree_mask", spec=tree, steps=lens, stored_before=(40, 1, 0, 63)
        )
        yield from section.case("tree_mask=True, for some sequences", "tree_mask", spec=tree, trees="some")
        yield from section.case("tree_mask=True, masks that are no trees", "tree_mask", spec=tree, trees="arbitrary")
        yield from section.case(
            "tree_mask=True, rows that see nothing", "tree_mask", spec={**tree, **lse}, trees="blind"
        )
    if declared.sinks:
        spec = {"sinks": True, **lse}
        yield from section.case(f"{text_of(spec)}, from -1e4 to 30", "sinks", spec=spec, extreme_sinks=True)
        yield from section.case(f"{text_of(spec)}, in bfloat16", "sinks", spec=spec, narrow_sinks=True)


def pairs_with_masks(section: Section) -> Iterator[Case]:
    """Trees, and what is not causal, with each feature that a spec allows beside them."""
    declared = section.declared
    masks: list[tuple[Fields, tuple[str, ...]]] = []
    if any(features(declared, "tree_mask")):
        masks.append(({"tree_mask": True}, ("logits_soft_cap", "sinks")))
    if len(declared.causal) > 1:
        masks.append(({"causal": False}, ("logits_soft_cap", "sinks", "alibi")))
    for mask, names in masks:
        for _, feature in features(declared, *names):
            spec = {**mask, **feature}
            yield from section.case(text_of(spec), "combinations", spec=spec)
        for kv_dtype in sorted(declared.kv_dtypes & FP8_DTYPES):
            spec = {**mask, "kv_dtype": kv_dtype}
            yield from section.case(f"{text_of(mask)}, KV {kv_dtype}", "combinations", spec=spec, scale_as_tensor=True)


def deterministic(section: Section) -> Iterator[Case]:
    """One backend fills both roles then."""
    declared = section.declared
    if not (declared.deterministic and declared_phases(declared, "prefill", "decode", "mixed")):
        return
    alike: Fields = {"deterministic": True}
    yield from section.case(text_of(alike), "deterministic", spec=alike)
    if not section.depth:
        return
    for _, feature in features(declared):
        spec = {**feature, **alike}
        yield from section.case(text_of(spec), "deterministic", spec=spec)
    for kv_dtype in sorted(declared.kv_dtypes & FP8_DTYPES):
        spec = {"kv_dtype": kv_dtype, **alike}
        yield from section.case(f"deterministic=True, KV {kv_dtype}", "deterministic", spec=spec)
    others: list[tuple[str, Fields]] = [(dtype, {"dtype": dtype}) for dtype in sorted(declared.dtypes)]
    if not section.base.is_mla:
        others.append(("1 KV head", {"num_kv_heads": 1, "num_qo_heads": section.base.group_size}))
    if declared.lse:
        others.append(("return_lse=True", {"return_lse": True}))
    for text, fields in others:
        if fields != {"dtype": section.base.dtype}:
            yield from section.case(f"deterministic=True, {text}", "deterministic", spec={**alike, **fields})
    for layout in declared.layouts[1:]:
        yield from section.case(f"deterministic=True, layout {layout}", "deterministic", spec=alike, layouts=(layout,))
    if section.depth == 2:  # where kernels split keys, by how many there are in the batch
        yield from section.case(
            "deterministic=True, 3000 tokens", "deterministic", spec=alike, steps=((1, 1, 1), (5, 1, 2), (1, 1, 1)),
            stored_before=(3000, 5, 1023),
        )  # fmt: skip
        for number in (33, 80):
            many = (tuple(1 + i % 33 for i in range(number)), (1,) * number)
            name = f"deterministic=True, {number} sequences"
            yield from section.case(name, "deterministic", spec=alike, steps=many)
        for qk, vo in [*head_dims(declared)][1:3] if not section.base.is_mla else ():
            sized = {**alike, "head_dim": qk, "v_head_dim": None if qk == vo else vo}
            yield from section.case(f"deterministic=True, head dim {qk}, {vo}", "deterministic", spec=sized)

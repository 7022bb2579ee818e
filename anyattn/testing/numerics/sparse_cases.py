"""The cases of sparse MLA, where each token sees keys that the engine chose for it."""

from __future__ import annotations

from collections.abc import Iterator

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.testing.numerics.case import Case, Section
from anyattn.testing.numerics.values import GROUP_SIZES, STEPS, Fields, declared_phases, group_sizes, page_sizes

_TOPKS = (64, 2048, 128, 1, 7)
"""Fewer keys than the longer sequences have, and more than any has."""
_MANY = 512
"""From here on, few tokens are tried: what plain code reads grows with both."""
_FEW_TOKENS: Fields = {"steps": ((1, 1, 1, 1), (0, 1, 0, 1), (2, 3, 0, 5)), "stored_before": (40, 0, 7, 129)}


def sparse_cases(declared: Capabilities) -> Iterator[Case]:
    """Every declared value that goes with sparse MLA at least once; nothing where no `topk` is declared."""
    if declared.topk is None or True not in declared.causal:
        return
    topks = [topk for topk in _TOPKS if topk in declared.topk]
    topks += sorted((declared.topk.values or frozenset()) - {*topks}) or ([] if topks else [declared.topk.example()])
    dtypes = [d for d in ("bfloat16", "float16", "float32", "float64") if d in declared.dtypes]
    groups = declared.group_sizes
    heads = next((size for size in (8, 16, 4, *GROUP_SIZES) if size in groups), groups.example())
    base = AttentionSpec.mla(
        num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=576**-0.5, dtype=dtypes[0],
        kv_dtype="float8_e4m3fn", topk=topks[0], may_quantize_q=declared.quantizes_q,
        may_quantize_probs=declared.quantizes_probs,
    )  # fmt: skip
    section = Section(declared, base, 0)
    yield from section.case("sparse", "topk")
    for topk in topks[1:]:
        steps = _FEW_TOKENS if topk > _MANY else {}
        yield from section.case(f"sparse, topk={topk}", "topk", spec={"topk": topk}, **steps)
    for dtype in dtypes[1:]:
        yield from section.case(f"sparse, dtype {dtype}", "dtypes", spec={"dtype": dtype})
    for size in group_sizes(declared, is_mla=True):
        if size != heads:
            yield from section.case(f"sparse, group {size}", "group_sizes", spec={"num_qo_heads": size})
    for size in page_sizes(declared)[1:]:
        yield from section.case(f"sparse, page size {size}", "page_sizes", page_sizes=(size,))
    if declared.strided_pages:
        yield from section.case("sparse, joined_layers", "strided_pages", joined_layers=True)
    lse: Fields = {"return_lse": True} if declared.lse else {}
    if declared.lse:
        yield from section.case("sparse, return_lse=True", "lse", spec=lse)
    if declared.logits_soft_cap:
        yield from section.case("sparse, soft cap", "logits_soft_cap", spec={"logits_soft_cap": 3.0})
    if declared.sinks:
        yield from section.case("sparse, sinks", "sinks", spec={"sinks": True})
        with_lse: Fields = {"sinks": True, **lse}
        yield from section.case("sparse, sinks of all sizes", "sinks", spec=with_lse, extreme_sinks=True)
        yield from section.case("sparse, bfloat16 sinks", "sinks", spec=with_lse, narrow_sinks=True)
    yield from section.case("sparse, odd strides", "contiguous_q", odd_strides=True)
    yield from section.case("sparse, for two layers", "contract", steps=STEPS[:3], num_layers=2)
    if declared.deterministic and declared_phases(declared, "prefill", "mixed", "decode"):  # which one backend fills
        yield from section.case("sparse, deterministic", "deterministic", spec={"deterministic": True, **lse})

"""Cases of batches: phases, numbers of sequences, lengths, and the tensors that come with them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from anyattn.testing.numerics.case import Case, Section, text_of
from anyattn.testing.numerics.values import declared_phases, features
from anyattn.types import FP8_DTYPES


def batches(section: Section) -> Iterator[Case]:
    declared = section.declared
    if declared_phases(declared, "prefill", "mixed"):
        yield from section.case("prefill", "phases", steps=((40, 1, 7, 129),))
        yield from section.case("prefill of 600 tokens", "phases", steps=((600,),))
        chunks = ((33, 5, 64, 1), (40, 17, 2, 66), (7, 64, 3, 5))
        yield from section.case("chunked prefill", "phases", steps=chunks)
        mixed = ((1, 33, 1, 5), (17, 1, 1, 1), (1, 1, 40, 1))
        yield from section.case("mixed", "phases", steps=mixed, stored_before=(40, 3, 17, 129))
        odd = ((2, 3, 5, 7), (9, 11, 13, 6))
        yield from section.case("2 to 13 new tokens", "phases", steps=odd, stored_before=(40, 0, 17, 129))
    before = (40, 1, 15, 129)
    if "decode" in declared.phases:
        yield from section.case("decode", "phases", steps=((1, 1, 1, 1),) * 3, stored_before=before)
        yield from section.case("decode of 33 sequences", "phases", steps=((1,) * 33,) * 2,
                              stored_before=tuple(5 * i % 83 for i in range(33)))  # fmt: skip
    most = declared.decode_qo_len
    if "decode" in declared.phases:
        for length in sorted({2, 3, most} & set(range(2, most + 1))):
            name = f"{length} new tokens for each sequence"
            steps = ((length,) * 4, (length - 1,) * 4, (length,) * 4)
            yield from section.case(name, "decode_qo_len", steps=steps, stored_before=(40, 1, 0, 129))
            if declared.lse:
                lse = {"return_lse": True}
                yield from section.case(f"{name}, {text_of(lse)}", "decode_qo_len", spec=lse, steps=steps)
    some = tuple((i * 7 + 3) % 12 for i in range(33))
    yield from section.case("33 sequences", "phases", steps=(some, (1,) * 33, some[::-1]))
    yield from section.case("1 sequence", "phases", steps=((50,), (1,), (3,), (1,)))
    empty = ((5, 0, 3, 0), (0, 0, 1, 0), (1, 0, 0, 0), (0, 0, 0, 0))
    yield from section.case("sequences without tokens", "phases", steps=empty)
    long = ((1, 1, 1), (5, 1, 2), (1, 1, 1))
    yield from section.case("3000 tokens", "phases", steps=long, stored_before=(3000, 5, 1023))
    for capability, spec in features(declared, "logits_soft_cap", "sinks", "alibi"):  # which a merge must not repeat
        yield from section.case(
            f"3000 tokens, {text_of(spec)}", capability, spec=spec, steps=long, stored_before=(3000, 5, 1023)
        )
    if declared.lse:
        yield from section.case(
            "3000 tokens, return_lse=True", "lse", spec={"return_lse": True}, steps=long,
            stored_before=(3000, 5, 1023),
        )  # fmt: skip


def inputs(section: Section) -> Iterator[Case]:
    scale = round(2.5 * section.base.scale, 4)
    yield from section.case(f"sm_scale={scale}", "contract", spec={"sm_scale": scale})
    yield from section.case("scores up to 50", "contract", query_scale=12.0)
    yield from section.case("scores beyond 100", "contract", query_scale=40.0)
    yield from section.case("q at odd strides", "contiguous_q", odd_strides=True)
    smallest = tuple(sorted(section.sizes))
    many = ((40, 3, 25), (1, 1, 1), (5, 0, 8))
    yield from section.case("pages in random order", "page_sizes", page_sizes=smallest, steps=many)
    short = ((section.sizes[0] + 1, 1, section.sizes[0] - 1 or 1), (1, 1, 1))
    yield from section.case("nothing behind a sequence's end is read", "contract", steps=short)
    yield from section.case("one plan for two layers", "contract", num_layers=2)
    declared = section.declared
    for capability, spec in features(declared, "sinks", "alibi"):  # which differ from layer to layer
        yield from section.case(f"one plan for two layers, {text_of(spec)}", capability, spec=spec, num_layers=2)
    for kv_dtype, as_tensor in product(sorted(declared.kv_dtypes & FP8_DTYPES), (False, True)):
        name = f"one plan for two layers, KV {kv_dtype}, {'tensor' if as_tensor else 'float'} scales"
        spec = {"kv_dtype": kv_dtype}
        yield from section.case(name, "kv_dtypes", spec=spec, num_layers=2, scale_as_tensor=as_tensor)

"""Which specs, batches and pages a backend must get right, derived from what it declares."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.pages import holds
from anyattn.attention.spec import AttentionSpec
from anyattn.testing.numerics.combinations import combinations
from anyattn.testing.numerics.inputs import Trees
from anyattn.testing.numerics.values import (
    EXACT_WINDOW,
    GROUP_SIZES,
    STEPS,
    Fields,
    base_specs,
    declared_phases,
    features,
    head_dims,
    page_sizes,
    steps_of_pages,
    window_sizes,
)
from anyattn.types import FP8_DTYPES, KV_LAYOUTS, KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One spec and the steps it is driven through; tokens that each sequence gains in each step.

    capability: the field of the declaration that it is about, or "contract", or "combinations" of several.
    stored_before: tokens that each sequence has before the first step, stored without being attended.
    window_pages: where the spec has a window, whether its layers keep the window's pages only, in a pool of their own,
        so that the tables name the null page for all pages that were let go.
    joined_layers: whether the pages are those of some layers among several that share a storage.
    num_layers: that run with each step's plan, each with inputs of its own.
    scale_as_tensor: for fp8, whether k_scale and v_scale are tensors or floats; with `spec.kv_scale_per_head` they are
        tensors with a scale for each head.
    query_scale: deviation of q's elements, and of the scores.
    extreme_sinks, trees: see `inputs`. odd_strides: of q, k and v; otherwise they are parts of fused projections.
    """

    name: str
    spec: AttentionSpec
    page_size: int
    layout: KVLayout
    capability: str = "contract"
    steps: tuple[tuple[int, ...], ...] = STEPS
    stored_before: tuple[int, ...] | None = None
    window_pages: bool = True
    joined_layers: bool = False
    num_layers: int = 1
    scale_as_tensor: bool = False
    query_scale: float = 1.0
    extreme_sinks: bool = False
    trees: Trees = "each"
    odd_strides: bool = False

    @property
    def num_seqs(self) -> int:
        """Sequences in each step's batch."""
        return len(self.steps[0])


def cases_for(capabilities: Capabilities) -> Iterator[Case]:
    """Every declared value at least once, against a case that is otherwise plain, and each two features together.

    Declared dims of MLA are each such a case. The first base has all cases, and the first of MLA most of them; the
    others are tried with dtypes and single features.
    """
    names = set()
    bases = list(base_specs(capabilities))
    first_mla = next((base for base in bases if base.is_mla), None)
    for base in bases:
        depth = 2 if base is bases[0] else 1 if base is first_mla else 0
        for case in _Section(capabilities, base, depth).cases():
            if case.name not in names:
                names.add(case.name)
                yield case


class _Section:
    """The cases against one base spec, which is plain. depth: 2 for all of them, 1 for most, 0 for few."""

    def __init__(self, capabilities: Capabilities, base: AttentionSpec, depth: int) -> None:
        self._declared, self._base, self._depth = capabilities, base, depth
        self._prefix = f"MLA {base.kv_lora_rank}+{base.qk_rope_head_dim} " if base.is_mla else ""
        self._sizes = page_sizes(capabilities)

    def cases(self) -> Iterator[Case]:
        yield from self._case("plain", "mla_dims" if self._base.is_mla else "contract")
        yield from self._dtypes()
        yield from self._features()
        if self._depth:
            yield from self._pages()
            yield from self._joined()
            yield from self._heads()
            yield from self._windows()
            yield from self._masks()
            yield from self._batches()
            yield from self._inputs()
            yield from self._combinations()
        yield from self._deterministic()

    def _case(
        self,
        name: str,
        capability: str,
        *,
        layouts: tuple[KVLayout, ...] | None = None,
        page_sizes: tuple[int, ...] | None = None,
        spec: Fields | None = None,
        **fields: Any,
    ) -> Iterator[Case]:
        """One case, with the first of these pages that can hold it; none where none of them can.

        spec: what is other than in the base.
        """
        asked = self._base.replace(**self._rounding(spec or {}))
        for layout, size in product(layouts or self._declared.layouts, page_sizes or self._sizes):
            if holds(asked, layout, size):
                if "steps" not in fields:
                    fields["steps"] = steps_of_pages(size)
                yield Case(
                    name=self._prefix + name, capability=capability, spec=asked, page_size=size, layout=layout, **fields
                )
                return

    def _rounding(self, spec: Fields) -> Fields:
        """With an fp8 cache, a backend that rounds has to be allowed to."""
        if spec.get("kv_dtype") not in FP8_DTYPES:
            return spec
        return {
            **spec,
            "may_quantize_q": self._declared.quantizes_q,
            "may_quantize_probs": self._declared.quantizes_probs,
        }

    def _pages(self) -> Iterator[Case]:
        """Each layout at the usual size or another that can hold it; each size in each layout, or in the first one."""
        layouts = self._declared.layouts
        for layout in layouts:
            yield from self._case(f"layout {layout}", "layouts", layouts=(layout,))
        for size, layout in product(sorted(self._sizes), layouts if self._depth == 2 else layouts[:1]):
            yield from self._case(f"page size {size}, {layout}", "page_sizes", layouts=(layout,), page_sizes=(size,))

    def _dtypes(self) -> Iterator[Case]:
        declared, base = self._declared, self._base
        for dtype in sorted(declared.dtypes):
            yield from self._case(dtype, "dtypes", spec={"dtype": dtype})
        for kv_dtype in sorted(declared.kv_dtypes - {base.dtype}):
            stored = {"kv_dtype": kv_dtype}
            if kv_dtype not in FP8_DTYPES:
                yield from self._case(f"KV {kv_dtype}", "kv_dtypes", spec=stored)
                continue
            for as_tensor in (False, True):
                kind = "tensor" if as_tensor else "float"
                yield from self._case(
                    f"KV {kv_dtype}, {kind} scales", "kv_dtypes", spec=stored, scale_as_tensor=as_tensor
                )
            for capability in ("quantizes_q", "quantizes_probs"):
                if getattr(declared, capability):
                    text = "q" if capability == "quantizes_q" else "the softmax's numerators"
                    yield from self._case(
                        f"KV {kv_dtype}, {text} rounded to it", capability, spec=stored, query_scale=3.0
                    )
            if declared.per_head_scales and not base.is_mla:
                per_head = {**stored, "kv_scale_per_head": True}
                name = f"KV {kv_dtype}, a scale for each head"
                yield from self._case(name, "per_head_scales", spec=per_head, scale_as_tensor=True)
        for kv_dtype, layout in product(sorted(declared.kv_dtypes - {base.dtype}), declared.layouts):
            if layout not in KV_LAYOUTS:  # cut by the size of an element
                name = f"KV {kv_dtype}, {layout}"
                yield from self._case(name, "layouts", spec={"kv_dtype": kv_dtype}, layouts=(layout,))

    def _joined(self) -> Iterator[Case]:
        """Pages of several layers in one storage: by layout, by element size, and where keys and values differ."""
        declared = self._declared
        if not declared.strided_pages:
            return
        joined: Fields = {"capability": "strided_pages", "joined_layers": True}
        for layout in declared.layouts:
            yield from self._case(f"joined layers, {layout}", layouts=(layout,), **joined)
        for kv_dtype in sorted(declared.kv_dtypes & FP8_DTYPES):
            yield from self._case(f"joined layers, KV {kv_dtype}", spec={"kv_dtype": kv_dtype}, **joined)
        if not self._base.is_mla:
            for qk, vo in head_dims(declared):
                if qk != vo:
                    sized = {"head_dim": qk, "v_head_dim": vo}
                    yield from self._case(f"joined layers, head dim {qk}, {vo}", spec=sized, **joined)
        if declared.sliding_window:
            yield from self._case("joined layers, sliding_window=33", spec={"sliding_window": 33}, **joined)

    def _heads(self) -> Iterator[Case]:
        if not self._base.is_mla:
            for qk, vo in head_dims(self._declared):
                capability = "head_dims" if qk == vo else "head_dim_pairs"
                sized = {"head_dim": qk, "v_head_dim": None if qk == vo else vo}
                yield from self._case(f"head dim {qk}, {vo}", capability, spec=sized)
                if self._declared.sliding_window:  # kernels made for a size have failed in the masks of that size only
                    windowed = {**sized, "sliding_window": 33}
                    yield from self._case(f"head dim {qk}, {vo}, sliding_window=33", capability, spec=windowed)
        for size in GROUP_SIZES if self._depth == 2 else GROUP_SIZES[::4]:
            if size in self._declared.group_sizes:
                grouped = {"num_qo_heads": size * self._base.num_kv_heads}
                yield from self._case(f"{size} query heads a KV head", "group_sizes", spec=grouped)

    def _features(self) -> Iterator[Case]:
        """Each by itself, with the LSE, and all that go together at once."""
        declared = self._declared
        for causal in sorted(declared.causal - {self._base.causal}):
            yield from self._case(f"causal {causal}", "causal", spec={"causal": causal})
        single = list(features(declared))
        for capability, spec in single:
            yield from self._case(_text(spec), capability, spec=spec)
        if declared.lse:
            for capability, spec in [("lse", {}), *single]:
                more = {**spec, "return_lse": True}
                yield from self._case(_text(more), "lse" if not spec else capability, spec=more)
            for causal in sorted(declared.causal - {self._base.causal}):
                yield from self._case(
                    f"causal {causal}, return_lse=True", "lse", spec={"causal": causal, "return_lse": True}
                )
        together: Fields = {}
        for _, spec in single:
            together |= {} if "tree_mask" in spec else spec
        if len(together) > 1:
            if "sliding_window" in together:
                together["sliding_window"] = 64
            yield from self._case(_text(together), "combinations", spec=together)

    def _windows(self) -> Iterator[Case]:
        """At every edge: of a page, of a sequence, of nothing but the token itself."""
        if not self._declared.sliding_window:
            return
        page_size = self._sizes[0]
        for window in window_sizes(page_size) if self._depth == 2 else (1, page_size, EXACT_WINDOW):
            spec: Fields = {"sliding_window": window}
            yield from self._case(_text(spec), "sliding_window", spec=spec)
            if window in (1, page_size, 33):
                name = f"{_text(spec)}, in pages that are all kept"
                yield from self._case(name, "sliding_window", spec=spec, window_pages=False)

    def _masks(self) -> Iterator[Case]:
        """Trees and sinks that are not the usual ones."""
        declared = self._declared
        lse: Fields = {"return_lse": True} if declared.lse else {}
        if declared.tree_mask and declared_phases(declared, "prefill", "mixed", "verify"):
            tree: Fields = {"tree_mask": True}
            lens = ((3, 5, 7, 6), (9, 1, 2, 11), (1, 1, 1, 1))
            yield from self._case(
                "tree_mask=True, 3, 5, 6 and 7 tokens", "tree_mask", spec=tree, steps=lens, stored_before=(40, 1, 0, 63)
            )
            yield from self._case("tree_mask=True, for some sequences", "tree_mask", spec=tree, trees="some")
            yield from self._case("tree_mask=True, masks that are no trees", "tree_mask", spec=tree, trees="arbitrary")
            yield from self._case(
                "tree_mask=True, rows that see nothing", "tree_mask", spec={**tree, **lse}, trees="blind"
            )
        if declared.sinks:
            spec = {"sinks": True, **lse}
            yield from self._case(f"{_text(spec)}, from -1e4 to 30", "sinks", spec=spec, extreme_sinks=True)

    def _batches(self) -> Iterator[Case]:
        declared = self._declared
        if declared_phases(declared, "prefill", "mixed"):
            yield from self._case("prefill", "phases", steps=((40, 1, 7, 129),))
            yield from self._case("prefill of 600 tokens", "phases", steps=((600,),))
            chunks = ((33, 5, 64, 1), (40, 17, 2, 66), (7, 64, 3, 5))
            yield from self._case("chunked prefill", "phases", steps=chunks)
            mixed = ((1, 33, 1, 5), (17, 1, 1, 1), (1, 1, 40, 1))
            yield from self._case("mixed", "phases", steps=mixed, stored_before=(40, 3, 17, 129))
            odd = ((2, 3, 5, 7), (9, 11, 13, 6))
            yield from self._case("2 to 13 new tokens", "phases", steps=odd, stored_before=(40, 0, 17, 129))
        before = (40, 1, 15, 129)
        if "decode" in declared.phases:
            yield from self._case("decode", "phases", steps=((1, 1, 1, 1),) * 3, stored_before=before)
            yield from self._case("decode of 33 sequences", "phases", steps=((1,) * 33,) * 2,
                                  stored_before=tuple(5 * i % 83 for i in range(33)))  # fmt: skip
        some = tuple((i * 7 + 3) % 12 for i in range(33))
        yield from self._case("33 sequences", "phases", steps=(some, (1,) * 33, some[::-1]))
        yield from self._case("1 sequence", "phases", steps=((50,), (1,), (3,), (1,)))
        empty = ((5, 0, 3, 0), (0, 0, 1, 0), (1, 0, 0, 0), (0, 0, 0, 0))
        yield from self._case("sequences without tokens", "phases", steps=empty)
        long = ((1, 1, 1), (5, 1, 2), (1, 1, 1))
        yield from self._case("3000 tokens", "phases", steps=long, stored_before=(3000, 5, 1023))
        if declared.lse:
            yield from self._case(
                "3000 tokens, return_lse=True", "lse", spec={"return_lse": True}, steps=long,
                stored_before=(3000, 5, 1023),
            )  # fmt: skip

    def _inputs(self) -> Iterator[Case]:
        scale = round(2.5 * self._base.scale, 4)
        yield from self._case(f"sm_scale={scale}", "contract", spec={"sm_scale": scale})
        yield from self._case("scores up to 50", "contract", query_scale=12.0)
        yield from self._case("scores beyond 100", "contract", query_scale=40.0)
        yield from self._case("q at odd strides", "contiguous_q", odd_strides=True)
        smallest = tuple(sorted(self._sizes))
        many = ((40, 3, 25), (1, 1, 1), (5, 0, 8))
        yield from self._case("pages in random order", "page_sizes", page_sizes=smallest, steps=many)
        short = ((self._sizes[0] + 1, 1, self._sizes[0] - 1 or 1), (1, 1, 1))
        yield from self._case("nothing behind a sequence's end is read", "contract", steps=short)
        yield from self._case("one plan for two layers", "contract", num_layers=2)

    def _combinations(self) -> Iterator[Case]:
        """Each two values of these together, in few cases."""
        declared = self._declared
        others = [size for size in (1, 3, 16, 64) if size in declared.page_sizes and size != self._sizes[0]]
        factors: list[list[Any]] = [
            [{}, *(spec for _, spec in features(declared, name))]
            for name in ("sliding_window", "logits_soft_cap", "sinks", "alibi")
        ]
        factors.append([{}, {"return_lse": True}] if declared.lse else [{}])
        factors.append([{}, *({"kv_dtype": dtype} for dtype in sorted(declared.kv_dtypes & FP8_DTYPES))])
        factors.append([self._sizes[0], *others[:1]])
        factors.append(list(declared.layouts))
        for chosen in combinations([len(values) for values in factors]):
            *parts, size, layout = (values[index] for values, index in zip(factors, chosen, strict=True))
            spec: Fields = {key: value for part in parts for key, value in part.items()}
            shown = f"KV {spec['kv_dtype']}" if "kv_dtype" in spec else ""
            text = _text({key: value for key, value in spec.items() if key != "kv_dtype"})
            name = ", ".join(part for part in (text, shown, f"page size {size}, {layout}") if part)
            yield from self._case(name, "combinations", spec=spec, page_sizes=(size,), layouts=(layout,))

    def _deterministic(self) -> Iterator[Case]:
        """One backend fills both roles then."""
        declared = self._declared
        if not (declared.deterministic and declared_phases(declared, "prefill", "decode", "mixed")):
            return
        alike: Fields = {"deterministic": True}
        yield from self._case(_text(alike), "deterministic", spec=alike)
        if not self._depth:
            return
        for _, feature in features(declared):
            spec = {**feature, **alike}
            yield from self._case(_text(spec), "deterministic", spec=spec)
        for kv_dtype in sorted(declared.kv_dtypes & FP8_DTYPES):
            spec = {"kv_dtype": kv_dtype, **alike}
            yield from self._case(f"deterministic=True, KV {kv_dtype}", "deterministic", spec=spec)
        if self._depth == 2:  # where kernels split keys, by how many there are in the batch
            yield from self._case(
                "deterministic=True, 3000 tokens", "deterministic", spec=alike, steps=((1, 1, 1), (5, 1, 2), (1, 1, 1)),
                stored_before=(3000, 5, 1023),
            )  # fmt: skip
            many = (tuple(range(1, 34)), (1,) * 33)
            yield from self._case("deterministic=True, 33 sequences", "deterministic", spec=alike, steps=many)


def _text(fields: Fields) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items())

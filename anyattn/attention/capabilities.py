"""What a backend can do, as data, and every reason why it cannot do what a spec asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.attention.spec import AttentionSpec
from anyattn.errors import ContractError, contained
from anyattn.platforms.base import Platform
from anyattn.types import (
    ALL_LAYOUTS,
    ANY_INT,
    DTYPE_BYTES,
    FP8_DTYPES,
    PHASES,
    GraphLevel,
    IntSet,
    KVLayout,
    Load,
    Phase,
    Reason,
    Role,
    Status,
    declared_json,
)

Priority = float | Callable[[Platform, AttentionSpec, Role, Load], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """A backend's declaration. Refusal is the default: what is not declared is refused with a reason.

    device_kinds: None means every kind.
    archs: of those devices; None means every one.
    features: instruction sets or units the device must have.
    packages: what must be installed, as requirement strings ("flashinfer-python>=0.6"), and `extra` the extra of
        anyattn that brings them. An entry may list alternatives, "a>=1 | module:b.c", of which one is enough; a build
        that several distributions bring is named by its module, which is looked for and not imported.
    programs: what must be on the PATH, by name; "$CXX|g++" is what the variable CXX names, g++ where it is not set.
    kv_dtypes: dtypes of the cache served besides the spec's own, any of them with any of `dtypes`; fp8 is read as
        value times scale. Leave it empty where the cache has q's dtype.
    per_head_scales: whether those scales may be tensors with one for each KV head.
    quantizes_q, quantizes_probs: whether it rounds q, or the softmax's numerators, to the dtype of an fp8 cache. It
        then serves such a cache only where the spec's `may_quantize_q` and `may_quantize_probs` allow that.
    head_dims: sizes served where query, key and value heads are of one size; `head_dim_pairs`: (qk, vo) pairs served
        besides; `any_head_dim_pair`: all of them.
    mla_dims: (kv_lora_rank, qk_rope_head_dim) pairs served; `any_mla_dims`: all of them.
    topk: numbers of keys for each token that sparse MLA is served with, `run` then taking slots (`AttentionSpec.topk`);
        None for none. What such a spec's latents and cache are is settled by that, so that `mla_dims` and `kv_dtypes`
        are about dense attention alone, and empty where there is none; all other fields are about both.
    group_sizes: query heads a KV head; `num_qo_heads`: all of them.
    decode_qo_len: in the role of decode, most new tokens of each sequence; more than 1 are asked for where all of a
        batch have as many, as in verification of speculated chains, and graphs of them where `graph` is uniform.
    not_together: pairs of features each of which is served, but not both of them in one spec; `feature_names` says what
        they are called. A pair with "graph" is about the role that has the graphs, as `graph` is.
    layouts: in order of preference; `preferred_page_size` likewise breaks the tie when nobody asked for a size.
    strided_pages: whether it reads pages that do not lie one behind the other: the stride of the first axis of `kv.k`
        and `kv.v` is then any number of elements, no less than a page's.
    contiguous_q: whether `run` wants a contiguous q; the runtime then copies a strided one.
    allocates_out: whether its kernels make the tensor that they write to, so that `run` returns it rather than copy it.
    needs_finite_tails: whether what lies behind a sequence's end in its last page must be finite, as kernels that read
        whole pages multiply it by 0; the runtime then zeroes it in pages that are new.
    priority: higher is chosen first; a number, or a function of facts, spec, role and load. A backend that is best for
        some batches only says so by the load: `plan` then picks among the valid ones (see `LoadTable`).
    run_on, emulated_on, contract_tested_on: archs or device kinds where it ran on hardware, ran in an emulator, or had
        its calls held against an emulation of the vendor's interface.
    contract_tested_with: the vendor's wheel whose declarations those calls are bound to, as "vendor-kernels 1.2".
    """

    device_kinds: frozenset[str] | None = None
    archs: frozenset[str] | None = None
    features: frozenset[str] = frozenset()
    packages: tuple[str, ...] = ()
    extra: str = ""
    programs: tuple[str, ...] = ()
    dtypes: frozenset[str]
    kv_dtypes: frozenset[str] = frozenset()
    per_head_scales: bool = False
    quantizes_q: bool = False
    quantizes_probs: bool = False
    head_dims: IntSet | None = None
    head_dim_pairs: frozenset[tuple[int, int]] = frozenset()
    any_head_dim_pair: bool = False
    mla_dims: frozenset[tuple[int, int]] = frozenset()
    any_mla_dims: bool = False
    topk: IntSet | None = None
    group_sizes: IntSet = ANY_INT
    num_qo_heads: IntSet = ANY_INT
    page_sizes: IntSet
    preferred_page_size: int | None = None
    layouts: tuple[KVLayout, ...]
    strided_pages: bool = False
    phases: frozenset[Phase]
    decode_qo_len: int = 1
    causal: frozenset[bool] = frozenset({True})
    sliding_window: bool = False
    logits_soft_cap: bool = False
    sinks: bool = False
    alibi: bool = False
    tree_mask: bool = False
    lse: bool = False
    graph: GraphLevel = GraphLevel.NEVER
    deterministic: bool = False
    contiguous_q: bool = False
    allocates_out: bool = False
    needs_finite_tails: bool = False
    not_together: tuple[tuple[str, str], ...] = ()
    priority: Priority = 0
    run_on: frozenset[str] = frozenset()
    emulated_on: frozenset[str] = frozenset()
    contract_tested_on: frozenset[str] = frozenset()
    contract_tested_with: str = ""

    def __post_init__(self) -> None:
        for name, kinds in _FIELD_TYPES.items():
            if not isinstance(getattr(self, name), kinds):
                wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
                raise ContractError(f"capabilities: {name} must be of type {wanted}, not {getattr(self, name)!r}.")
        for name, known in _KNOWN_MEMBERS.items():
            if unknown := set(getattr(self, name)) - known:
                raise ContractError(
                    f"capabilities: {name} holds {', '.join(map(repr, unknown))}; known are {_names(known)}."
                )
        for name in ("dtypes", "layouts", "phases", "causal"):
            if not getattr(self, name):
                raise ContractError(f"capabilities: {name} must not be empty.")
        for name in ("device_kinds", "archs"):
            if getattr(self, name) == frozenset():
                raise ContractError(f"capabilities: {name} must not be empty; None means every one.")
        for name in (
            "device_kinds",
            "archs",
            "features",
            "run_on",
            "emulated_on",
            "contract_tested_on",
            "packages",
            "programs",
        ):
            if not all(isinstance(member, str) and member for member in getattr(self, name) or ()):
                raise ContractError(f"capabilities: {name} must hold strings, not {getattr(self, name)!r}.")
        for name in ("head_dim_pairs", "mla_dims"):
            for pair in getattr(self, name):
                if not (isinstance(pair, tuple) and len(pair) == 2 and all(type(n) is int and n > 0 for n in pair)):
                    raise ContractError(f"capabilities: {name} must hold pairs of positive integers, not {pair!r}.")
        for pair in self.not_together:
            if not (isinstance(pair, tuple) and len({*pair}) == len(pair) == 2 and {*pair} <= FEATURES.keys()):
                raise ContractError(
                    f"capabilities: not_together must hold pairs of features, not {pair!r}; known are "
                    f"{_names(FEATURES)}."
                )
        if self.decode_qo_len < 1:
            raise ContractError(f"capabilities: decode_qo_len must be at least 1, not {self.decode_qo_len}.")
        if self.preferred_page_size is not None and self.preferred_page_size not in self.page_sizes:
            raise ContractError(f"capabilities: preferred_page_size {self.preferred_page_size} is not in page_sizes.")
        if isinstance(self.priority, bool) or not (isinstance(self.priority, int | float) or callable(self.priority)):
            raise ContractError(f"capabilities: priority must be a number or a function, not {self.priority!r}.")

    def priority_for(self, platform: Platform, spec: AttentionSpec, role: Role, load: Load) -> float:
        """The declared priority, evaluated. Raises ContractError where that fails or is no finite number."""
        value: Any = self.priority
        if callable(value):
            try:
                value = contained(value, platform, spec, role, load)
            except Exception as error:
                raise ContractError(f"{type(error).__name__}: {error}") from error
        if not isinstance(value, int | float) or isinstance(value, bool) or not -1e15 < value < 1e15:
            raise ContractError(f"a value of type {type(value).__name__} that is no finite number below 1e15")
        return float(value)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; see `types.declared_json`."""
        return declared_json(self)

    def status_on(self, platform: Platform) -> Status:
        """What stands behind this declaration on such a device."""
        names = {platform.arch, platform.kind}
        if names & self.run_on:
            return "run on hardware"
        if names & self.emulated_on:
            return "emulated"
        return "contract-tested" if names & self.contract_tested_on else "declared"

    def reject_reasons(
        self,
        spec: AttentionSpec,
        platform: Platform,
        role: Role,
        *,
        page_size: int | None = None,
        layout: KVLayout | None = None,
        joined_layers: bool = False,
    ) -> list[Reason]:
        """All reasons against this backend in this role, derived from the declaration; empty when it is valid.

        page_size, layout: checked when given; otherwise selection still has to settle them.
        joined_layers: whether the pool keeps all layers' parts of a page together, which needs `strided_pages`.
        """
        return [
            *self.device_reasons(platform),
            *self._phase_reasons(spec, role),
            *self._dtype_reasons(spec, platform),
            *self._head_reasons(spec),
            *self._topk_reasons(spec),
            *self._feature_reasons(spec),
            *self._pair_reasons(spec, role),
            *self._graph_reasons(spec, platform, role),
            *self._paging_reasons(page_size, layout, joined_layers),
            *_unknown_field_reasons(spec),
        ]

    def device_reasons(self, platform: Platform) -> Iterable[Reason]:
        """The reasons that hold on this device whatever the spec."""
        if self.device_kinds is not None and platform.kind not in self.device_kinds:
            kinds = _names(self.device_kinds)
            yield Reason(
                field="device_kind", wanted=platform.kind, supported=kinds, remedy=f"use a device of kind {kinds}"
            )
        elif self.archs is not None and platform.arch not in self.archs:
            archs = _names(self.archs)
            yield Reason(field="arch", wanted=platform.arch, supported=archs, remedy=f"use a device of arch {archs}")
        if missing := self.features - platform.features:
            needed = _names(self.features)
            yield Reason(
                field="features",
                wanted=_names(missing),
                supported=f"devices with {needed}",
                remedy=f"use a device with {needed}",
            )

    def _phase_reasons(self, spec: AttentionSpec, role: Role) -> Iterable[Reason]:
        wanted: set[Phase] = {"decode"} if role == "decode" else {"prefill", "mixed"}
        if spec.tree_mask and role == "prefill":
            wanted.add("verify")
        if missing := wanted - self.phases:
            yield Reason(
                field="phase",
                wanted=_names(missing),
                supported=_names(self.phases),
                remedy="name another backend",
                another=True,
            )

    def _dtype_reasons(self, spec: AttentionSpec, platform: Platform) -> Iterable[Reason]:
        """What torch has not on the device no backend can be given."""
        missing = platform.missing_dtypes
        dtypes, kv_dtypes = self.dtypes - missing, self.kv_dtypes - missing
        if spec.dtype not in dtypes:
            yield _dtype_reason("dtype", spec.dtype, sorted(dtypes), platform)
        if spec.topk is None and spec.storage_dtype != spec.dtype and spec.storage_dtype not in kv_dtypes:
            reason = _dtype_reason("kv_dtype", spec.storage_dtype, ["auto", *sorted(kv_dtypes)], platform)
            if spec.kv_scale_per_head:  # which the spec allows with fp8 only
                reason = dataclasses.replace(reason, remedy=f"{reason.remedy} and kv_scale_per_head=False")
            yield reason
        elif spec.topk is not None and spec.storage_dtype in missing:  # there is no other cache for it
            yield _dtype_reason("kv_dtype", spec.storage_dtype, [], platform)
        elif spec.storage_dtype in FP8_DTYPES:
            for name, quantizes in (
                ("may_quantize_q", self.quantizes_q),
                ("may_quantize_probs", self.quantizes_probs),
            ):
                if quantizes and not getattr(spec, name):
                    yield _replace_reason(name, False, [True])

    def _head_reasons(self, spec: AttentionSpec) -> Iterable[Reason]:
        if spec.kv_lora_rank is not None and spec.qk_rope_head_dim is not None:
            dims = (spec.kv_lora_rank, spec.qk_rope_head_dim)
            if spec.topk is None and not self.any_mla_dims and dims not in self.mla_dims:
                supported = "; ".join(f"rank {rank} + rope {rope}" for rank, rope in sorted(self.mla_dims))
                yield Reason(
                    field="kv_lora_rank",
                    wanted=f"MLA with rank {dims[0]} + rope {dims[1]}",
                    supported=supported or ("no MLA" if self.topk is None else "sparse MLA only"),
                    remedy="name another backend",
                    another=True,
                )
        elif not self._serves_heads(spec.head_dim, spec.vo_head_dim):
            pairs = [f"{qk} with values of {vo}" for qk, vo in sorted(self.head_dim_pairs)]
            supported = "; ".join([*([str(self.head_dims)] if self.head_dims else []), *pairs])
            wanted = str(spec.head_dim)
            if spec.vo_head_dim != spec.head_dim:
                wanted += f" with values of {spec.vo_head_dim}"
            yield Reason(
                field="head_dim",
                wanted=wanted,
                supported=supported or "MLA only",
                remedy="name another backend",
                another=True,
            )
        if spec.group_size not in self.group_sizes:
            yield Reason(
                field="num_qo_heads",
                wanted=f"{spec.group_size} query heads for each KV head",
                supported=str(self.group_sizes),
                remedy="name another backend",
                another=True,
            )
        if spec.num_qo_heads not in self.num_qo_heads:
            yield Reason(
                field="num_qo_heads",
                wanted=f"{spec.num_qo_heads} query heads",
                supported=str(self.num_qo_heads),
                remedy="name another backend",
                another=True,
            )

    def _topk_reasons(self, spec: AttentionSpec) -> Iterable[Reason]:
        if spec.topk is not None and (self.topk is None or spec.topk not in self.topk):
            yield Reason(
                field="topk",
                wanted=f"{spec.topk} keys for each token, chosen by the engine",
                supported="dense attention only" if self.topk is None else str(self.topk),
                remedy="name another backend",
                another=True,
            )

    def _serves_heads(self, qk: int, vo: int) -> bool:
        if self.any_head_dim_pair or (qk, vo) in self.head_dim_pairs:
            return True
        return qk == vo and self.head_dims is not None and qk in self.head_dims

    def _feature_reasons(self, spec: AttentionSpec) -> Iterable[Reason]:
        if spec.causal not in self.causal:
            yield _model_reason("causal", spec.causal, sorted(self.causal))
        for name, supported in (
            ("sliding_window", self.sliding_window),
            ("logits_soft_cap", self.logits_soft_cap),
            ("sinks", self.sinks),
            ("alibi", self.alibi),
        ):
            if getattr(spec, name) != _NEUTRAL[name] and not supported:
                yield _model_reason(name, getattr(spec, name), [_NEUTRAL[name]])
        for name, supported in (
            ("kv_scale_per_head", self.per_head_scales),
            ("tree_mask", self.tree_mask),
            ("return_lse", self.lse),
            ("deterministic", self.deterministic),
        ):
            if getattr(spec, name) != _NEUTRAL[name] and not supported:
                yield _replace_reason(name, getattr(spec, name), [_NEUTRAL[name]])

    def pairs_in(self, spec: AttentionSpec) -> list[tuple[str, str]]:
        """The pairs of `not_together` that a spec has both of."""
        return [pair for pair in self.not_together if {*pair} <= feature_names(spec)]

    def _pair_reasons(self, spec: AttentionSpec, role: Role) -> Iterable[Reason]:
        for first, second in self.pairs_in(spec):
            if "graph" in (first, second) and _graph_level(spec, role) == GraphLevel.NEVER:
                continue
            yield Reason(
                field=FEATURES[second],
                wanted=f"{second} together with {first}",
                supported=f"{first} and {second} each without the other",
                remedy="name another backend",
                another=True,
            )

    def _graph_reasons(self, spec: AttentionSpec, platform: Platform, role: Role) -> Iterable[Reason]:
        most = min(self.graph, platform.graph)
        if _graph_level(spec, role) > most:
            served = [level.name.lower() for level in reversed(GraphLevel) if level <= most]
            yield _replace_reason("graph", spec.graph.name.lower(), served)

    def _paging_reasons(self, page_size: int | None, layout: KVLayout | None, joined_layers: bool) -> Iterable[Reason]:
        if page_size is not None and page_size not in self.page_sizes:
            yield Reason(
                field="page_size",
                wanted=str(page_size),
                supported=str(self.page_sizes),
                remedy=f"set page_size={self.page_sizes.nearest(page_size)}",
            )
        if layout is not None and layout not in self.layouts:
            yield _replace_reason("layout", layout, self.layouts)
        if joined_layers and not self.strided_pages:
            yield Reason(
                field="joined_layers",
                wanted="pages of joined layers",
                supported="pages of one layer that lie one behind the other",
                remedy="set joined_layers=False",
            )


def _graph_level(spec: AttentionSpec, role: Role) -> GraphLevel:
    """Of steps with one new token each the decode backend has the graphs, of all others that of prefill."""
    if role == "decode":
        return min(spec.graph, GraphLevel.DECODE)
    return spec.graph if spec.graph > GraphLevel.DECODE else GraphLevel.NEVER


FEATURES = {
    "mla": "kv_lora_rank",
    "topk": "topk",
    "value_head_dim": "v_head_dim",
    "fp8": "kv_dtype",
    "non_causal": "causal",
    **{
        name: name
        for name in (
            "kv_scale_per_head", "sliding_window", "logits_soft_cap", "sinks", "alibi", "tree_mask", "return_lse",
            "graph", "deterministic",
        )
    },
    **dict.fromkeys((name for name in DTYPE_BYTES if name not in FP8_DTYPES), "dtype"),
}  # fmt: skip
"""What `Capabilities.not_together` calls features, and the spec's field that asks for each."""


def feature_names(spec: AttentionSpec) -> set[str]:
    """The features of a spec, as `Capabilities.not_together` calls them; "graph" is any level.

    Sparse MLA is "topk", and neither "mla" nor "fp8", so that a pair with these is about dense attention.
    """
    is_dense = spec.topk is None
    present = {
        "mla": spec.is_mla and is_dense,
        "value_head_dim": not spec.is_mla and spec.vo_head_dim != spec.head_dim,
        "fp8": spec.storage_dtype in FP8_DTYPES and is_dense,
        "non_causal": not spec.causal,
        spec.dtype: True,
    }
    asked = {name for name, field in FEATURES.items() if name == field and getattr(spec, name) != _NEUTRAL[name]}
    return asked | {name for name, is_there in present.items() if is_there}


_FIELD_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("device_kinds", "archs"), (frozenset, type(None))),
    **dict.fromkeys(("features", "dtypes", "kv_dtypes", "head_dim_pairs", "mla_dims", "phases", "causal"), frozenset),
    **dict.fromkeys(("run_on", "emulated_on", "contract_tested_on"), frozenset),
    **dict.fromkeys(("packages", "programs", "layouts", "not_together"), tuple),
    "decode_qo_len": int,
    **dict.fromkeys(("page_sizes", "group_sizes", "num_qo_heads"), IntSet),
    **dict.fromkeys(("head_dims", "topk"), (IntSet, type(None))),
    "preferred_page_size": (int, type(None)),
    "graph": GraphLevel,
    **dict.fromkeys(("extra", "contract_tested_with"), str),
    **dict.fromkeys(("any_head_dim_pair", "any_mla_dims", "sliding_window", "logits_soft_cap", "sinks", "alibi"), bool),
    **dict.fromkeys(("tree_mask", "lse", "deterministic", "contiguous_q", "per_head_scales", "strided_pages"), bool),
    **dict.fromkeys(("allocates_out", "needs_finite_tails"), bool),
    **dict.fromkeys(("quantizes_q", "quantizes_probs"), bool),
}

_KNOWN_MEMBERS: dict[str, set[str]] = {
    "dtypes": set(DTYPE_BYTES) - FP8_DTYPES,
    "kv_dtypes": set(DTYPE_BYTES),
    "phases": set(PHASES),
    "layouts": set(ALL_LAYOUTS),
}

_NEUTRAL = {field.name: field.default for field in dataclasses.fields(AttentionSpec)}

_JUDGED_FIELDS = frozenset(
    {
        "num_qo_heads", "num_kv_heads", "head_dim", "v_head_dim", "dtype", "kv_dtype", "kv_scale_per_head",
        "may_quantize_q", "may_quantize_probs", "sm_scale", "causal", "sliding_window", "logits_soft_cap", "sinks",
        "alibi", "tree_mask", "return_lse", "graph", "deterministic", "kv_lora_rank", "qk_rope_head_dim",
        "qk_nope_head_dim", "topk",
    }
)  # fmt: skip
"""The spec's fields that the reasons above judge. A field added to the spec joins this list with its own reason."""


def _unknown_field_reasons(spec: AttentionSpec) -> Iterable[Reason]:
    """A spec of a later version or of an engine's own subclass may ask for what no declaration here knows."""
    for field in dataclasses.fields(spec):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.name not in _JUDGED_FIELDS and getattr(spec, field.name) != default:
            yield Reason(
                field=field.name,
                wanted=str(getattr(spec, field.name)),
                supported=f"only {default!r}, as this field is not known here",
                remedy=f"set {field.name}={default!r}",
            )


def _names(values: Iterable[str]) -> str:
    return ", ".join(sorted(values))


def _model_reason(field: str, wanted: object, supported: Sequence[object]) -> Reason:
    """Of what the model computes, which nobody can set to another value."""
    return Reason(
        field=field,
        wanted=str(wanted),
        supported=", ".join(map(str, supported)),
        remedy="name another backend",
        another=True,
    )


def _dtype_reason(field: str, wanted: str, served: Sequence[str], platform: Platform) -> Reason:
    """served: what a backend takes on this device, by preference."""
    if served:
        reason = _replace_reason(field, wanted, served)
    else:
        reason = Reason(
            field=field, wanted=wanted, supported="none here", remedy="name another backend", another=True
        )
    if wanted not in platform.missing_dtypes:
        return reason
    lack = f"torch has no {wanted} on devices of kind {platform.kind}"
    return dataclasses.replace(reason, supported=f"{reason.supported} ({lack})")


def _replace_reason(field: str, wanted: object, supported: Sequence[object]) -> Reason:
    return Reason(
        field=field,
        wanted=str(wanted),
        supported=", ".join(map(str, supported)),
        remedy=f"set {field}={supported[0]!r}",
    )

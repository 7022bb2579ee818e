"""Specs, devices and roles that a backend's declaration covers: what refusals start from, and priorities are for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.errors import contained
from anyattn.platforms.base import Platform
from anyattn.plugins.isolation import describe
from anyattn.plugins.manager import PluginManager
from anyattn.testing.check import CheckFailedError
from anyattn.testing.numerics.values import num_kv_heads
from anyattn.types import ROLES, GraphLevel, Reason, Role

_HEAD_DIMS = (64, 128, 256, 80, 16, 32, 96, 192, 512)
_GROUP_SIZES = (4, 1, 2, 8, 16, 3)
_MLA_DIMS = ((512, 64), (64, 16))
_TOPKS = (64, 2048, 128, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Covered:
    """A plain spec that a declaration accepts on a device in these roles."""

    spec: AttentionSpec
    device: Platform
    roles: tuple[Role, ...]


def find_covered(capabilities: Capabilities) -> Covered:
    """Raises CheckFailedError where the declaration refuses every plain spec that it covers."""
    first = None
    for device in devices(capabilities):
        for spec in plain_specs(capabilities):
            refusals = {role: reasons(capabilities, spec, device, role) for role in ROLES}
            if roles := tuple(role for role in ROLES if not refusals[role]):
                return Covered(spec=spec, device=device, roles=roles)
            first = first or (spec, device, refusals["decode"])
    if first is None:
        raise CheckFailedError(
            "capabilities declare no size of heads: neither head_dims, head_dim_pairs, mla_dims nor topk."
        )
    spec, device, refusal = first
    raise CheckFailedError(
        f"no plain spec that is declared is accepted. [{spec}] on {device} is refused: {'; '.join(map(str, refusal))}."
    )


def reasons(
    capabilities: Capabilities, spec: AttentionSpec, device: Platform, role: Role, **paging: Any
) -> list[Reason]:
    """What `reject_reasons` gives, as a list. Raises CheckFailedError where it gives something else or raises."""
    try:
        given: list[Any] = contained(lambda: list(capabilities.reject_reasons(spec, device, role, **paging)))
    except Exception as error:
        raise CheckFailedError(
            f"reject_reasons raised {describe(error)} for {role} of [{spec}] on {device}: it returns reasons."
        ) from error
    for reason in given:
        if not isinstance(reason, Reason):
            raise CheckFailedError(f"reject_reasons gave {reason!r}, which is no anyattn.types.Reason.")
    return given


def devices(capabilities: Capabilities) -> list[Platform]:
    """The simulated devices that come with anyattn and that are declared; one made after the declaration where none is.

    Raises CheckFailedError where the declaration cannot be asked.
    """
    offers = PluginManager(entry_points=()).simulated_devices().values()
    try:
        found = [device for device in (offer.load() for offer in offers) if not _device_reasons(capabilities, device)]
    except Exception as error:
        raise CheckFailedError(f"device_reasons raised {describe(error)}: it returns reasons.") from error
    if found:
        return found
    kind = min(capabilities.device_kinds or {"cpu"})
    made = Platform(
        kind=kind,
        vendor="unknown",
        name=f"a device of kind {kind}",
        arch=min(capabilities.archs or {"unknown"}),
        torch_device=f"sim:{kind}",
        features=capabilities.features,
        simulated=True,
    )
    return [made]


def _device_reasons(capabilities: Capabilities, device: Platform) -> list[Reason]:
    given: list[Reason] = contained(lambda: list(capabilities.device_reasons(device)))
    return given


def on_a_graph_device(device: Platform) -> Platform:
    """The same device with every graph level."""
    return replace(device, graph=GraphLevel.ALWAYS)


def plain_specs(capabilities: Capabilities) -> Iterator[AttentionSpec]:
    """Specs without any feature that the declaration covers, the most usual one first."""
    dtypes = [d for d in ("bfloat16", "float16", "float32", "float64") if d in capabilities.dtypes]
    groups = [size for size in _GROUP_SIZES if size in capabilities.group_sizes] or [capabilities.group_sizes.example()]
    masks = sorted(capabilities.causal, reverse=True)
    dims = [(d, d) for d in _HEAD_DIMS if capabilities.any_head_dim_pair or d in (capabilities.head_dims or ())]
    if capabilities.head_dims is not None and not dims:
        dims.append((capabilities.head_dims.example(),) * 2)
    dims += sorted(capabilities.head_dim_pairs)
    for (qk, vo), group, dtype, causal in product(dims, groups, dtypes, masks):
        kv_heads = num_kv_heads(capabilities, group)
        yield AttentionSpec(
            num_qo_heads=kv_heads * group,
            num_kv_heads=kv_heads,
            head_dim=qk,
            v_head_dim=None if qk == vo else vo,
            dtype=dtype,
            causal=causal,
        )
    ranks = sorted(capabilities.mla_dims) or (_MLA_DIMS if capabilities.any_mla_dims else [])
    for (rank, rope), group, dtype, causal in product(ranks, groups, dtypes, masks):
        yield mla_spec(rank, rope, num_qo_heads=group, dtype=dtype, causal=causal)
    if capabilities.topk is not None and True in masks:
        topk = next((topk for topk in _TOPKS if topk in capabilities.topk), capabilities.topk.example())
        for group, dtype in product(groups, dtypes):
            yield sparse_spec(topk, num_qo_heads=group, dtype=dtype).replace(
                may_quantize_q=capabilities.quantizes_q, may_quantize_probs=capabilities.quantizes_probs
            )


def specs_with_features(capabilities: Capabilities, spec: AttentionSpec) -> Iterator[AttentionSpec]:
    """The spec, with each declared dtype and with each declared feature by itself."""
    yield spec
    for dtype in sorted(capabilities.dtypes - {spec.dtype}):
        yield spec.replace(dtype=dtype)
    dense = spec.topk is None  # which leaves the cache's dtype and the mask to the spec
    for dtype in sorted(capabilities.kv_dtypes - {spec.dtype}) if dense else ():
        yield spec.replace(kv_dtype=dtype, may_quantize_q=True, may_quantize_probs=True)
    for declared, field, value in (
        (capabilities.sliding_window and spec.causal and dense, "sliding_window", 128),
        (capabilities.logits_soft_cap, "logits_soft_cap", 30.0),
        (capabilities.sinks, "sinks", True),
        (capabilities.alibi and dense, "alibi", True),
        (capabilities.tree_mask and spec.causal and dense, "tree_mask", True),
        (capabilities.lse, "return_lse", True),
        (capabilities.deterministic, "deterministic", True),
        (capabilities.graph > GraphLevel.NEVER, "graph", capabilities.graph),
    ):
        if declared:
            yield spec.replace(**{field: value})


def mla_spec(rank: int, rope: int, *, num_qo_heads: int, dtype: str, causal: bool) -> AttentionSpec:
    """MLA of these dims; the scale is that of its heads before absorption in DeepSeek's models, or near it."""
    return AttentionSpec.mla(
        num_qo_heads=num_qo_heads,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        sm_scale=(rank + rope) ** -0.5,
        dtype=dtype,
        causal=causal,
    )


def sparse_spec(topk: int, *, num_qo_heads: int, dtype: str) -> AttentionSpec:
    """Sparse MLA with so many keys for each token."""
    dense = mla_spec(*_MLA_DIMS[0], num_qo_heads=num_qo_heads, dtype=dtype, causal=True)
    return dense.replace(kv_dtype="float8_e4m3fn", topk=topk)

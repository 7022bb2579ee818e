"""What a KV pool must hold to: its declaration, and its bytes in every dtype and layout that it declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from anyattn.mem_cache.base import KVPool, PoolCapabilities
from anyattn.mem_cache.spec import CACHE_KINDS, CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CannotRunError, Check, CheckFailedError
from anyattn.testing.contract import memory as memory_contract
from anyattn.testing.pools import far as pool_far
from anyattn.testing.pools import records as pool_records
from anyattn.testing.pools import scales as pool_scales
from anyattn.testing.pools import shapes as pool_shapes
from anyattn.testing.pools import stores as pool_stores
from anyattn.testing.pools.cases import PoolCase, base_dtype, cache_for, cases_for, fp8_dtypes
from anyattn.testing.pools.shapes import PoolCheck
from anyattn.testing.target import Target
from anyattn.types import DTYPE_BYTES, FP8_DTYPES, Reason

_UNKNOWN_ARCH = "no such arch"


def contract_checks(target: Target) -> Iterator[Check]:
    """What needs no device."""
    about = {
        "reject_reasons is about device_kinds as declared": ("device_kinds", _device_kinds),
        "reject_reasons is about archs as declared": ("archs", _archs),
        "reject_reasons is about kind as declared": ("kind", _kind),
        "reject_reasons is about kv_dtypes as declared": ("kv_dtypes", _kv_dtypes),
        "reject_reasons is about per_head_scales as declared": ("per_head_scales", _per_head_scales),
        "reject_reasons is about joined_layers as declared": ("joined_layers", _joined_layers),
        "a cache of its kind can have each of its dtypes": ("kv_dtypes", _possible_dtypes),
        "a cache of its kind can have each of its layouts": ("layouts", _possible_layouts),
    }
    yield from memory_contract.checks(target, KVPool, PoolCapabilities, about)


def checks(tested: type[KVPool], device: Platform) -> Iterator[Check]:
    """What needs one; nothing for a class without a declaration, which the contract tier is about."""
    capabilities = getattr(tested, "capabilities", None)
    if not isinstance(capabilities, PoolCapabilities):
        return

    def made(table: Mapping[str, PoolCheck], case: PoolCase) -> Iterator[Check]:
        for name, function in table.items():
            yield _check(f"{name}, {case.name}", case.capability, function, tested, device, case.cache)

    kind = capabilities.kind
    for case in cases_for(capabilities):
        yield from made(pool_shapes.SHAPE_CHECKS, case)
        yield from made(pool_stores.STORE_CHECKS, case)
        if kind == "mla":
            yield from made(pool_shapes.MLA_CHECKS, case)
        if kind in ("mla", "dsa") and case.cache.head_dim > case.cache.v_head_dim:
            yield from made(pool_stores.APART_CHECKS, case)
        if case.thorough:
            yield from made(pool_stores.THOROUGH_STORE_CHECKS, case)
            yield from made(pool_records.RECORD_CHECKS, case)
        if case.thorough and case.cache.joined_layers:
            yield from made(pool_records.JOINED_CHECKS, case)
    yield from _scale_checks(tested, device, capabilities)
    smallest = min(capabilities.kv_dtypes, key=lambda dtype: (DTYPE_BYTES[dtype], dtype))
    for layout in capabilities.layouts:
        cache = cache_for(capabilities, smallest, layout)
        if cache is not None:
            case = PoolCase(name=layout, capability="layouts", cache=cache)
            yield from made(pool_far.FAR_CHECKS, case)


def _scale_checks(tested: type[KVPool], device: Platform, capabilities: PoolCapabilities) -> Iterator[Check]:
    cases = [
        PoolCase(name=f"{dtype}, {layout}", capability="kv_dtypes", cache=cache)
        for dtype in fp8_dtypes(capabilities)
        for layout in capabilities.layouts
        if (cache := cache_for(capabilities, dtype, layout)) is not None
    ]
    for case in cases:
        for name, function in pool_scales.FLOAT_SCALE_CHECKS.items():
            yield _check(f"{name}, {case.name}", case.capability, function, tested, device, case.cache)
        if capabilities.per_head_scales and capabilities.kind == "mha":
            for name, function in pool_scales.PER_HEAD_CHECKS.items():
                yield _check(f"{name}, {case.name}", "per_head_scales", function, tested, device, case.cache)
    for case in cases[:1]:
        for name, function in pool_scales.REFUSAL_CHECKS.items():
            yield _check(name, "per_head_scales", function, tested, device, case.cache)
    scaled = fp8_dtypes(capabilities)
    for dtype in sorted(capabilities.kv_dtypes.difference(scaled))[:1]:
        for layout in capabilities.layouts[:1]:
            cache = cache_for(capabilities, dtype, layout)
            if cache is not None:
                for name, function in pool_scales.NO_SCALE_CHECKS.items():
                    yield _check(name, "kv_dtypes", function, tested, device, cache)


def _check(
    name: str, capability: str, function: PoolCheck, tested: type[KVPool], device: Platform, cache: CacheSpec
) -> Check:
    def run(seed: int) -> None:
        kinds = tested.capabilities.device_kinds
        if kinds is not None and device.kind not in kinds:
            raise CannotRunError(f"{tested.__name__} serves devices of kind {', '.join(sorted(kinds))}, not {device}.")
        function(tested, device, cache, seed)

    return Check(tier="memory", name=name, capability=capability, run=run)


def _reasons(capabilities: PoolCapabilities, **asked: object) -> list[Reason]:
    """Against what is declared, but for what is asked otherwise."""
    wanted = {
        "device_kind": memory_contract.some_device_kind(capabilities.device_kinds),
        "kind": capabilities.kind,
        "kv_dtype": base_dtype(capabilities),
        **asked,
    }
    return capabilities.reject_reasons(wanted.pop("device_kind"), **wanted)  # type: ignore[arg-type]


def _device_kinds(capabilities: PoolCapabilities) -> None:
    memory_contract.check_device_kinds(capabilities.device_kinds, lambda kind: _reasons(capabilities, device_kind=kind))


def _archs(capabilities: PoolCapabilities) -> None:
    for arch in sorted(capabilities.archs or {_UNKNOWN_ARCH}):
        memory_contract.must_accept(_reasons(capabilities, arch=arch), f"arch {arch!r}")
    if capabilities.archs is not None:
        memory_contract.must_refuse(_reasons(capabilities, arch=_UNKNOWN_ARCH), "arch", f"arch {_UNKNOWN_ARCH!r}")


def _kind(capabilities: PoolCapabilities) -> None:
    for kind in CACHE_KINDS:
        reasons = _reasons(capabilities, kind=kind)
        if kind == capabilities.kind:
            memory_contract.must_accept(reasons, f"kind {kind!r}")
        else:
            memory_contract.must_refuse(reasons, "kind", f"kind {kind!r}")


def _kv_dtypes(capabilities: PoolCapabilities) -> None:
    for dtype in DTYPE_BYTES:
        reasons = _reasons(capabilities, kv_dtype=dtype)
        if dtype in capabilities.kv_dtypes:
            memory_contract.must_accept(reasons, f"kv_dtype {dtype!r}")
        else:
            memory_contract.must_refuse(reasons, "kv_dtype", f"kv_dtype {dtype!r}")


def _per_head_scales(capabilities: PoolCapabilities) -> None:
    for dtype in sorted(capabilities.kv_dtypes & FP8_DTYPES):
        reasons = _reasons(capabilities, kv_dtype=dtype, kv_scale_per_head=True)
        if capabilities.per_head_scales:
            memory_contract.must_accept(reasons, "a scale for each head")
        else:
            memory_contract.must_refuse(reasons, "kv_scale_per_head", "a scale for each head")


def _joined_layers(capabilities: PoolCapabilities) -> None:
    reasons = _reasons(capabilities, joined_layers=True)
    if capabilities.joined_layers:
        memory_contract.must_accept(reasons, "joined_layers")
    else:
        memory_contract.must_refuse(reasons, "joined_layers", "joined layers")


def _possible_dtypes(capabilities: PoolCapabilities) -> None:
    for dtype in sorted(capabilities.kv_dtypes):
        if all(cache_for(capabilities, dtype, layout) is None for layout in capabilities.layouts):
            _impossible(capabilities, dtype, capabilities.layouts[0])


def _possible_layouts(capabilities: PoolCapabilities) -> None:
    for layout in capabilities.layouts:
        if all(cache_for(capabilities, dtype, layout) is None for dtype in sorted(capabilities.kv_dtypes)):
            _impossible(capabilities, base_dtype(capabilities), layout)


def _impossible(capabilities: PoolCapabilities, dtype: str, layout: str) -> None:
    raise CheckFailedError(f"no cache of kind {capabilities.kind!r} can have kv_dtype {dtype!r} in layout {layout}.")

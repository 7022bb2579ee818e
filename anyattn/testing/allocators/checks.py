"""What a KV allocator must hold to: its declaration, and its books in every situation that an engine brings it into."""

from __future__ import annotations

import random
from collections.abc import Iterator

from anyattn.errors import ContractError
from anyattn.mem_cache.base import AllocatorCapabilities, KVAllocator
from anyattn.platforms.base import Platform
from anyattn.testing.allocators.books import Lab, LabCheck
from anyattn.testing.allocators.debug import DEBUG_CHECKS, PARTIAL_PAGE_CHECKS
from anyattn.testing.allocators.growth import GROWTH_CHECKS
from anyattn.testing.allocators.pages import PAGE_CHECKS, PAGE_SIZE_CHECKS
from anyattn.testing.allocators.references import REFERENCE_CHECKS
from anyattn.testing.allocators.table import TABLE_CHECKS
from anyattn.testing.allocators.use import USE_CHECKS
from anyattn.testing.check import CannotRunError, Check, CheckFailedError
from anyattn.testing.contract import memory as memory_contract
from anyattn.testing.target import Target

_PAGE_SIZES = (1, 2, 3, 16, 64, 128, 256, 1000, 1024)
_USUAL = 16
_LARGE = 4096


def contract_checks(target: Target) -> Iterator[Check]:
    """What needs no device."""
    about = {
        "reject_reasons is about device_kinds as declared": ("device_kinds", _device_kinds),
        "reject_reasons is about page_sizes as declared": ("page_sizes", _page_sizes),
    }
    yield from memory_contract.checks(target, KVAllocator, AllocatorCapabilities, about)


def checks(tested: type[KVAllocator], device: Platform) -> Iterator[Check]:
    """What needs one; nothing for a class without a declaration, which the contract tier is about."""
    capabilities = getattr(tested, "capabilities", None)
    if not isinstance(capabilities, AllocatorCapabilities):
        return
    usual, *others = page_sizes(capabilities)

    def check(name: str, function: LabCheck, page_size: int, capability: str) -> Check:
        def run(seed: int) -> None:
            reasons = capabilities.reject_reasons(device.kind, page_size)
            if reasons:
                raise CannotRunError(f"{tested.__name__} does not serve {device}: {'; '.join(map(str, reasons))}.")
            lab = Lab(tested=tested, device=device, page_size=page_size, rng=random.Random(seed))
            function(lab)

        return Check(tier="memory", name=name, capability=capability, run=run)

    for name, function in (PAGE_CHECKS | REFERENCE_CHECKS | DEBUG_CHECKS).items():
        yield check(name, function, usual, "contract")
    if usual > 1:
        for name, function in PARTIAL_PAGE_CHECKS.items():
            yield check(name, function, usual, "contract")
    for name, function in PAGE_SIZE_CHECKS.items():
        yield check(name, function, usual, "page_sizes")
    for page_size in sorted((usual, *others)):
        for name, function in (GROWTH_CHECKS | USE_CHECKS | TABLE_CHECKS).items():
            yield check(f"{name}, page size {page_size}", function, page_size, "page_sizes")


def page_sizes(capabilities: AllocatorCapabilities) -> tuple[int, ...]:
    """The declared page sizes that are tried, the one for all that does not depend on it first."""
    declared = capabilities.page_sizes
    found = {size for size in _PAGE_SIZES if size in declared}
    found |= {declared.example(), declared.nearest(_LARGE)}
    usual = declared.nearest(_USUAL)
    return (usual, *sorted(found - {usual}))


def _device_kinds(capabilities: AllocatorCapabilities) -> None:
    size = page_sizes(capabilities)[0]
    for reasons in (capabilities.reject_reasons, lambda kind: capabilities.reject_reasons(kind, size)):
        memory_contract.check_device_kinds(capabilities.device_kinds, reasons)


def _page_sizes(capabilities: AllocatorCapabilities) -> None:
    kind = memory_contract.some_device_kind(capabilities.device_kinds)
    for size in page_sizes(capabilities):
        memory_contract.must_accept(capabilities.reject_reasons(kind, size), f"page size {size}")
    for size in range(1, 2 * _LARGE):
        if size not in capabilities.page_sizes:
            memory_contract.must_refuse(capabilities.reject_reasons(kind, size), "page_size", f"page size {size}")
            break
    try:
        capabilities.require(1, page_sizes(capabilities)[0])
    except ContractError as error:
        raise CheckFailedError(f"require refuses a page size that is declared: {error}") from error

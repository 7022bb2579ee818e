"""Which checks a target has to pass."""

from __future__ import annotations

from collections.abc import Iterator

from anyattn.platforms.base import Platform
from anyattn.testing.check import Check
from anyattn.testing.target import Target


def checks_for(target: Target, device: Platform | None) -> Iterator[Check]:
    """All checks of a target, tier by tier.

    device: where those run that need one; None for the contract tier alone.
    """
    if target.kind == "backend":
        from anyattn.testing.contract import backends as backend_contract
        from anyattn.testing.graphs import checks as graphs
        from anyattn.testing.numerics import checks as numerics
        from anyattn.testing.numerics import determinism

        yield from backend_contract.checks(target)
        if device is not None:
            yield from numerics.checks(target.loaded, device)
            yield from graphs.checks(target.loaded, device)
            yield from determinism.checks(target.loaded, device)
    elif target.kind == "allocator":
        from anyattn.testing.allocators import checks as allocators

        yield from allocators.contract_checks(target)
        if device is not None:
            yield from allocators.checks(target.loaded, device)
    elif target.kind == "pool":
        from anyattn.testing.pools import checks as pools

        yield from pools.contract_checks(target)
        if device is not None:
            yield from pools.checks(target.loaded, device)
    else:
        from anyattn.testing.contract import platforms

        yield from platforms.checks(target)

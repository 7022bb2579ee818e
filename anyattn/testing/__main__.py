"""`python -m anyattn.testing PKG.MODULE:Backend [--device cuda] [--seed N]`: what a backend declares, checked."""

from __future__ import annotations

import argparse
import importlib
import platform as host
import secrets
import sys
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.discovery import usable_device
from anyattn.errors import AnyattnError, ContractError
from anyattn.platforms.base import Platform
from anyattn.testing.cases import Case, cases_for
from anyattn.testing.numerics import Result, check_case


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table of the cases. Returns 0 only when all of them passed."""
    parser = argparse.ArgumentParser(prog="python -m anyattn.testing", description=__doc__)
    parser.add_argument("backend", help="package.module:Class of the backend")
    parser.add_argument("--device", help="a device kind or torch device; by default the first usable one")
    parser.add_argument("--seed", type=int, help="of the random inputs; by default a new one each time")
    parser.add_argument("--only", default="", metavar="TEXT", help="just the cases whose name holds this text")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    try:
        backend = _load(options.backend)
        device = usable_device(options.device)
        if wrong := _device_reasons(backend, device):
            raise ContractError(f"{options.backend} does not run on {device}: {'; '.join(wrong)}")
    except AnyattnError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{options.backend} on {device}, torch {torch.__version__}, Python {host.python_version()}, seed {seed}")
    cases = [case for case in cases_for(backend.capabilities) if options.only.lower() in case.name.lower()]
    if not cases:
        print(f"error: no case's name holds {options.only!r}; run without --only to see them.", file=sys.stderr)
        return 1
    results = [_checked(backend, case, device, seed) for case in cases]
    _print_table(results)
    failed = sum(result.failure is not None for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 0 if failed == 0 else 1


def _load(target: str) -> type[AttentionBackend]:
    module, _, name = target.partition(":")
    if not (module and name):
        raise ContractError(f"{target!r} is not package.module:Class; a file's folder must be on PYTHONPATH.")
    try:
        backend = getattr(importlib.import_module(module), name)
    except AnyattnError:
        raise
    except Exception as error:
        raise ContractError(f"{target} cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, AttentionBackend)):
        raise ContractError(f"{target} is no subclass of anyattn.AttentionBackend.")
    if not isinstance(getattr(backend, "capabilities", None), Capabilities):
        raise ContractError(
            f"{target} declares no capabilities: set its class attribute capabilities = anyattn.Capabilities(...)."
        )
    return backend


def _device_reasons(backend: type[AttentionBackend], device: Platform) -> list[str]:
    case = next(iter(cases_for(backend.capabilities)))
    reasons = backend.capabilities.reject_reasons(case.spec, device, "decode")
    return [str(reason) for reason in reasons if reason.field in ("device_kind", "arch", "features")]


def _checked(backend: type[AttentionBackend], case: Case, device: Platform, seed: int) -> Result:
    """The case's result; what a backend raises is a failure of the case, not of the run."""
    try:
        return check_case(backend, case, device, seed)
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
        return Result(case=case, error=float("nan"), allowed=float("nan"), failure=failure)


def _print_table(results: Sequence[Result]) -> None:
    table = Table("case", "error", "allowed", "result")
    for result in results:
        verdict = "passed" if result.failure is None else f"FAILED: {result.failure}"
        table.add_row(result.case.name, f"{result.error:.2e}", f"{result.allowed:.2e}", verdict)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    sys.exit(main())

"""The compliance kit, thinned, as the interpreter is slow: a few checks of each kind."""

import importlib.util
import sys
from pathlib import Path

import pytest

from anyattn.testing.check import CannotRunError
from anyattn.testing.suite import checks_for
from anyattn.testing.target import Target

_spec = importlib.util.spec_from_file_location("triton_interpreted", Path(__file__).with_name("interpreted.py"))
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
CPU, InterpretedTriton = _module.CPU, _module.InterpretedTriton

LARGE = ("3000 tokens", "600 tokens", "4096", "512+64", "33 sequences", "80 sequences", "256, 256", "192, ", "71 query")


def chosen():
    target = Target(kind="backend", name="triton", place="conftest:InterpretedTriton", loaded=InterpretedTriton)
    checks = [check for check in checks_for(target, CPU) if check.tier != "contract"]
    small = [check for check in checks if not any(size in check.id for size in LARGE)]
    combinations = [check for check in small if "matrix" in check.id]
    others = [check for check in small if "matrix" not in check.id]
    numerics = [check for check in others if check.tier == "numerics"]
    rest = [check for check in others if check.tier != "numerics"]
    return [*numerics[::12], *rest[::60], *combinations[::60]]


@pytest.mark.parametrize("check", [pytest.param(check, id=check.id) for check in chosen()])
def test_the_kit_passes(check):
    try:
        check.run(20)
    except CannotRunError as reason:
        pytest.skip(str(reason))

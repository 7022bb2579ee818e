"""Runs tests/mem_cache/triton with Triton's interpreter; Triton reads the variable when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

MODULES = sorted(Path(__file__).with_name("triton").glob("test_*.py"))


@pytest.mark.parametrize("module", MODULES, ids=[module.stem for module in MODULES])
def test_the_kernels_are_right_when_interpreted(module):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(module)]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr

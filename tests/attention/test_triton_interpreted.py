"""Runs tests/attention/triton_interpreted with Triton's interpreter; Triton reads the variable when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).with_name("triton_interpreted")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_work", "test_attend", "test_graphs", "test_kit"])
def test_the_triton_backend_is_right_when_interpreted(name):
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [*command, str(FOLDER / f"{name}.py")], env=environ, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]

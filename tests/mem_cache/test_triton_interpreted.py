"""Runs tests/mem_cache/triton with Triton's interpreter; Triton reads the variable when it is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).with_name("triton")


@pytest.mark.slow
def test_the_kernels_are_right_when_interpreted():
    """In one process for all files, as it takes seconds to start."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER)]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr

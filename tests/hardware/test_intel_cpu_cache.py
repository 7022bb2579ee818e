"""What `intel_cpu` has compiled is on disk, and found there: by the next process, and by none as another's.

Each process compiles heads of 8 for steps of one new token and of several.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba"),
]
PROGRAM = """
from anyattn.hardware_backend.intel.paged_kernel import Shape, kernel

sizes = {"num_heads": 1, "group_size": 1, "head_dim": 8, "vo_head_dim": 8, "capped": False, "lanes": 8}
for num_tokens in (1, 4):
    assert kernel(Shape(num_tokens=num_tokens, dtype="float32", kv_dtype="float32", **sizes))
"""


@pytest.fixture
def kept(tmp_path):
    """Runs the program in a process of its own; the files that are there then, with their times."""

    def run():
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", PROGRAM]
        done = subprocess.run(
            command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        return {path.name: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    return run


def test_the_next_process_compiles_nothing_and_each_kernel_has_an_index_of_its_own(kept):
    """numba reads an index, adds to it and writes it without a lock. In one of several kernels, two processes that
    compile different ones at once would leave one's number with the other's code."""
    files = kept()
    assert kept() == files
    assert len([name for name in files if name.endswith(".nbc")]) == 2
    assert len([name for name in files if name.endswith(".nbi")]) == 2

"""The benchmark of `intel_cpu` runs, small: rows have figures, and a target that is missed is told by the exit code.

Nothing is timed here: a target is one that nothing can meet, or that nothing can miss.
"""

import importlib.util
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anyattn.platforms.cpu import probe

ROOT = Path(__file__).parents[1]
LACKING = sorted({"avx2", "f16c", "fma"} - probe().devices[0].features)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(LACKING), reason=f"needs a CPU with {', '.join(LACKING)}"),
    pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba"),
]


@pytest.fixture
def run(tmp_path):
    """Runs rows of the benchmark where each target is the given one; the exit code, and the JSON document."""

    def call(rows, share):
        source = (ROOT / "benchmarks/cpu.py").read_text()
        source, count = re.subn(r"share=1 / 1\.1\b", f"share={share}", source)
        source, more = re.subn(r"\(specs\(\), 0\.\d+\)", f"(specs(), {share})", source)
        assert (count, more) == (2, 1), "targets are stated otherwise"
        copy, file = tmp_path / "cpu.py", tmp_path / "rows.json"
        copy.write_text(source)
        arguments = ["--scale", "64", "--rounds", "1", "--pool-gib", "0.01", "--rows", rows, "--json", str(file)]
        done = subprocess.run(
            [sys.executable, str(copy), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(file.read_text())

    return call


def assert_figures(result):
    figures = [result["ms"], result["ratio"], *result["spread"], *result["times"]]
    assert all(math.isfinite(figure) and figure > 0 for figure in figures), result
    assert result["peak_bytes"] is None or result["peak_bytes"] >= 0
    assert result["spread"][0] <= result["ratio"] <= result["spread"][1]


def test_rows_of_prefill_have_figures_of_both_backends_and_their_peer(run):
    code, document = run("prefill", 0.0)
    assert code == 0
    found = [(result["row"], result["who"]) for result in document["results"]]
    assert found == [
        (row, who)
        for row in ("prefill 32", "prefill 32 on 32")
        for who in ("intel_cpu", "torch_native", "sdpa, contiguous")
    ]
    for result in document["results"]:
        assert_figures(result)
        assert result["met"] is (True if result["who"] == "intel_cpu" else None)
    assert document["device"]["kind"] == "cpu"


def test_rows_of_decode_have_the_share_of_the_bandwidth_and_a_target_that_is_missed_fails(run):
    code, document = run(", bfloat16", 1e9)
    assert code == 1
    ours, native = document["results"]
    assert (ours["who"], native["who"]) == ("intel_cpu", "torch_native")
    assert (ours["met"], native["met"]) == (False, None)
    assert_figures(ours)
    assert_figures(native)

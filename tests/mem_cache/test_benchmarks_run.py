"""The benchmarks of mem_cache run, small, on the CPU: every section gives figures, and nothing in it is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

EXPECTED = {
    "allocator": {
        "ours: host engine, page ids",
        "ours: host engine, slots",
        "peer: one program a request",
        "peer: slices",
        "just one launch",
    },
    "indices": {"ours", "plain copy", "peer: one program a request", "peer: gather of rows"},
    "store": {"ours", "plain copy", "peer: two index_put"},
    "tier": {"ours", "plain copy"},
    "big": {"ours"},
}
SHAPES = {
    "nothing_shared",
    "system_prompts",
    "growing_conversations",
    "regenerated_conversations",
    "branch_at_every_page",
}


def run_benchmark(file, *arguments):
    command = [sys.executable, str(file), *map(str, arguments)]
    return subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=300)


def test_the_benchmark_runs_on_the_cpu_and_every_section_has_figures(tmp_path):
    file = tmp_path / "rows.json"
    arguments = ("--quick", "--device", "cpu", "--json", file, "--sections", ",".join(EXPECTED))
    run = run_benchmark(BENCHMARKS / "mem_cache.py", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [row for row in rows if "error" in row] == []
    for section in EXPECTED:
        found = {row["what"] for row in rows if row["section"] == section}
        assert found >= EXPECTED[section], f"section {section} has just {found}"


@pytest.fixture
def impossible(tmp_path):
    """A copy of the prefix cache's benchmark with a limit that nothing can meet."""
    source = (BENCHMARKS / "prefix_cache.py").read_text()
    assert source.count("\nLIMIT_US = 50.0\n") == 1
    copy = tmp_path / "prefix_cache.py"
    copy.write_text(source.replace("\nLIMIT_US = 50.0\n", "\nLIMIT_US = 0.0\n"))
    return copy


def test_the_prefix_cache_s_quick_benchmark_has_figures_of_every_shape_and_no_limits(impossible, tmp_path):
    file = tmp_path / "rows.json"
    run = run_benchmark(impossible, "--quick", "--pages", 600, "--repeats", 10, "--json", file)
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(file.read_text())["rows"]
    found = [(row["shape"], row["policy"], row["what"]) for row in rows]
    expected = [(shape, policy, what) for shape in SHAPES for policy in ("lru", "lfu") for what in ("match", "insert")]
    assert sorted(found) == sorted(expected)
    assert all(row["ours_us"] > 0 and row["chained_hash_us"] > 0 for row in rows)


def test_the_prefix_cache_s_benchmark_fails_where_a_limit_is_missed(impossible):
    run = run_benchmark(impossible, "--pages", 600, "--repeats", 10, "--policies", "lru")
    assert run.returncode == 1, run.stdout + run.stderr
    assert "Traceback" not in run.stderr

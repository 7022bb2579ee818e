"""The threads that `intel_cpu` computes with are torch's, as many and where the environment puts them.

No kernel is compiled: what runs on the threads here is a function of Python's.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import anyattn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's affinity and OpenMP's threads")

PROGRAM = """
import ctypes, json, os, sys, threading
allowed = json.loads(sys.argv[1])
os.sched_setaffinity(0, allowed)  # as taskset and numactl do before they start a program
import torch
from anyattn.hardware_backend.intel import openmp

torch.ones(1 << 20).exp_()  # torch's threads are there from now on
before = set(os.listdir("/proc/self/task"))
ran, where = [], ctypes.CDLL(None).sched_getcpu

@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def compute(data):
    ran.append([threading.get_native_id(), where(), sorted(os.sched_getaffinity(0))])

openmp.run_on_threads(ctypes.cast(compute, ctypes.c_void_p).value, 0, torch.get_num_threads())
new = sorted(set(os.listdir("/proc/self/task")) - before)
print(json.dumps({"threads": torch.get_num_threads(), "ran": ran, "new": new}))
"""


def run(allowed, **environ):
    """What each thread that computed was: its id, the CPU that it ran on, and those that it may run on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "GOMP_", "KMP_"))}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(sorted(allowed))],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**kept, **environ, "PYTHONPATH": str(Path(anyattn.__file__).parents[1])},
    )
    found = json.loads(ended.stdout)
    ids, on, may = zip(*found["ran"], strict=True)
    assert found["new"] == []  # no thread beside torch's
    assert len(ids) == len(set(ids)) == found["threads"]
    return on, may


@pytest.fixture
def cpus():
    pytest.importorskip("torch", reason="needs torch")
    return sorted(os.sched_getaffinity(0))


def test_one_thread_where_one_is_set(cpus):
    on, may = run(cpus, OMP_NUM_THREADS="1")
    assert len(on) == 1
    assert list(may) == [cpus]


def test_all_threads_are_on_the_cpu_that_taskset_leaves(cpus):
    on, may = run(cpus[-1:], MKL_DYNAMIC="FALSE", OMP_NUM_THREADS="3")
    assert list(on) == [cpus[-1]] * 3
    assert list(may) == [cpus[-1:]] * 3


def test_each_thread_is_at_its_place_where_openmp_binds_them(cpus):
    if len(cpus) < 2:
        pytest.skip("needs two CPUs")
    on, may = run(cpus, MKL_DYNAMIC="FALSE", OMP_NUM_THREADS="2", OMP_PROC_BIND="close", OMP_PLACES="threads")
    assert sorted(may) == [[cpu] for cpu in sorted(on)]
    assert len(set(on)) == 2

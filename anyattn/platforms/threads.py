"""The threads that torch will compute with on the CPU, and what puts them where: told without importing torch."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from anyattn.platforms import host
from anyattn.platforms.base import Platform

_COUNTS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")  # the first that is set is heeded
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """count: None where it cannot be told. counted_by: what says so. pinned_by: what puts them where, each in words.

    hints: what slows them down as this process was started, and what mends that.
    """

    count: int | None
    counted_by: str
    pinned_by: tuple[str, ...]
    hints: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        facts = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in facts.items()}


def torch_threads(device: Platform, environ: Mapping[str, str] = os.environ) -> Threads:
    """Of a process with this environment. device: the CPU as its probe found it."""
    count, counted_by = _count(device, environ)
    pinned_by = [f"{name}={environ[name]}" for name in _PLACES if name in environ]
    online = host.read("sys/devices/system/cpu/online")
    if _numbers(device.cpus) < _numbers(online) and device.cpus:
        pinned_by.append(f"taskset, numactl or a cpuset: CPUs {device.cpus} of {online}")
    return Threads(
        count=count,
        counted_by=counted_by,
        pinned_by=tuple(pinned_by),
        hints=tuple(_hints(device, environ, count)),
    )


def _count(device: Platform, environ: Mapping[str, str]) -> tuple[int | None, str]:
    """As torch 2.13 does (aten/src/ATen/ParallelOpenMP.cpp).

    Its x86 wheels ask MKL: what is set, but no more than the machine has cores, else one for each core of the CPUs that
    this process may run on. Others take what is set, or all cores of the machine.
    """
    most = device.num_cores
    for name in _COUNTS:
        first = environ.get(name, "").split(",")[0].strip()  # OMP_NUM_THREADS may have one for each level
        if first.isdecimal() and int(first):
            wanted = int(first)
            dynamic = environ.get("MKL_DYNAMIC", "true").strip().lower() not in ("false", "0")
            if device.arch == "x86_64" and dynamic and most is not None and most < wanted:
                return most, f"one for each core, where {name} is {wanted}"
            return wanted, name
    return (_num_cores(device) if device.arch == "x86_64" else most), "one for each core"


def _num_cores(device: Platform) -> int | None:
    """Physical cores of the CPUs that this process may run on."""
    if device.cpus is None:
        return device.num_cores
    cores = set()
    for cpu in _numbers(device.cpus):
        siblings = host.read(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        if siblings is None:
            return device.num_cores
        cores.add(siblings)
    return len(cores)


def _numbers(text: str | None) -> frozenset[int]:
    """Of a list as Linux writes them; none where there is no such list."""
    try:
        return host.numbers(text or "")
    except ValueError:
        return frozenset()


def _hints(device: Platform, environ: Mapping[str, str], count: int | None) -> list[str]:
    hints = []
    if count is not None and device.num_threads is not None and count > device.num_threads:
        hints.append(
            f"torch takes {count} threads, and the affinity or CPU quota of this process gives it {device.num_threads} "
            f"CPUs, so that threads wait for each other: set OMP_NUM_THREADS={device.num_threads}"
        )
    nodes, memory = _numbers(device.numa_nodes), _numbers(device.memory_nodes)
    with_memory = _numbers(host.read("sys/devices/system/node/has_memory")) or nodes
    if memory and (far := (nodes & with_memory) - memory):
        node = min(memory)
        hints.append(
            f"threads run on NUMA node {host.number_list(far)}, where this process may not take memory (only from "
            f"{device.memory_nodes}), so that what they read is on another node: start it with `numactl "
            f"--cpunodebind={node} --membind={node}`"
        )
    elif len(nodes) > 1 and count != 1:
        node = min(nodes)
        hints.append(
            f"threads run on NUMA nodes {device.numa_nodes}, and read slower what is on another node than theirs: one "
            f"process for each node, started with `numactl --cpunodebind={node} --membind={node}` and so on, reads "
            "what is on its own"
        )
    if "KMP_AFFINITY" in environ and not any(name in environ.get("LD_PRELOAD", "") for name in ("libiomp", "libomp")):
        hints.append(
            "KMP_AFFINITY is for Intel's and LLVM's OpenMP, and GNU's, which torch's Linux wheels bring, does not read "
            "it: set OMP_PROC_BIND and OMP_PLACES, or preload libiomp5.so"
        )
    return hints

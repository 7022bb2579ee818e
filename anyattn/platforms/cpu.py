"""The CPU as a platform: instruction sets, cores, and the threads and memory that this process may really use."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from anyattn.platforms import host
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.types import GraphLevel

_ARCH_NAMES = {"amd64": "x86_64", "arm64": "aarch64"}
_VENDOR_IDS = {
    "GenuineIntel": "intel", "AuthenticAMD": "amd", "0x41": "arm", "0x46": "fujitsu", "0x48": "huawei",
    "0x4e": "nvidia", "0x51": "qualcomm", "0x61": "apple", "0xc0": "ampere",
}
"""x86 vendor strings, and Arm implementer codes (MIDR_EL1; arch/arm64/include/asm/cputype.h in Linux)."""
_ARM_PARTS = {
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x41", "0xd8e"): "Arm Neoverse N3",
    ("0x46", "0x001"): "Fujitsu A64FX",
    ("0x48", "0xd01"): "HiSilicon TSV110 (Kunpeng 920)",
    ("0xc0", "0xac3"): "AmpereOne",
    ("0xc0", "0xac4"): "AmpereOne",
}
"""By implementer and part, from the same header; /proc/cpuinfo gives no model name on Arm."""

_FEATURES = frozenset(
    {"avx", "avx2", "fma", "f16c", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"}
    | {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_fp16", "avx512_vnni"}
    | {"amx_tile", "amx_bf16", "amx_fp16", "amx_int8"}
    | {"asimd", "asimdhp", "asimddp", "fphp", "bf16", "i8mm", "sve", "sve2", "svebf16", "svei8mm", "sme", "sme2"}
)
"""What attention and GEMM kernels branch on, by the names of Linux's /proc/cpuinfo."""
_SYSCTL_FEATURES = {
    "hw.optional.AdvSIMD": ("asimd",),
    "hw.optional.arm.FEAT_FP16": ("fphp", "asimdhp"),
    "hw.optional.arm.FEAT_DotProd": ("asimddp",),
    "hw.optional.arm.FEAT_BF16": ("bf16",),
    "hw.optional.arm.FEAT_I8MM": ("i8mm",),
    "hw.optional.arm.FEAT_SME": ("sme",),
    "hw.optional.arm.FEAT_SME2": ("sme2",),
    "hw.optional.avx512vnni": ("avx512_vnni",),
}
"""macOS's flags under Linux's names (Apple, "Determining Instruction Set Characteristics")."""

_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),  # cgroup v2
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # cgroup v1
)

_DEEPEST_CGROUP = 64  # folders that are looked into: no container nests deeper

Fact = TypeVar("Fact")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    vendor: str
    name: str
    features: frozenset[str] = frozenset()


def probe() -> ProbeResult:
    """The CPU: always one device. Imports no torch; never raises, what could not be told is a problem text."""
    problems: list[str] = []

    def attempt(what: str, ask: Callable[[], Fact], otherwise: Fact) -> Fact:
        try:
            return ask()
        except Exception as error:
            problems.append(f"the CPU's {what} could not be told: {error}")
            return otherwise

    arch = platform.machine().lower()
    arch = _ARCH_NAMES.get(arch, arch) or "unknown"
    model = attempt("instruction sets", _model, _Model(vendor="unknown", name=platform.processor() or arch))
    unknown: tuple[int | None, int | None] = (None, None)
    total_bytes, available_bytes = attempt("memory", _memory_bytes, unknown)
    cpus = attempt("usable CPUs", _cpus, None)
    numa_nodes = attempt("NUMA nodes", lambda: _numa_nodes(cpus), None)
    memory_nodes = attempt("memory's NUMA nodes", _memory_nodes, None)
    device = Platform(
        kind="cpu",
        vendor=model.vendor,
        name=model.name or platform.processor() or arch,
        arch=arch,
        torch_device="cpu",
        features=model.features,
        memory_total_bytes=total_bytes,
        memory_free_bytes=available_bytes,
        num_cores=attempt("number of physical cores", lambda: _psutil().cpu_count(logical=False), None),
        num_threads=attempt("number of usable CPUs", lambda: _num_threads(cpus), None),
        cpus=None if cpus is None else host.number_list(cpus),
        numa_nodes=None if numa_nodes is None else host.number_list(numa_nodes),
        memory_nodes=None if memory_nodes is None else host.number_list(memory_nodes),
        collective="gloo",
        graph=GraphLevel.NEVER,
        triton=False,
        status="run on hardware" if (platform.system(), arch) == ("Linux", "x86_64") else "contract-tested",
        torch_remedy=host.TORCH_REMEDIES["cpu"],
        problems=host.torch_problems("cpu"),
    )
    return ProbeResult(devices=(device,), problems=tuple(problems))


def _psutil() -> ModuleType:
    return importlib.import_module("psutil")


def _model() -> _Model:
    system = platform.system()
    if system == "Linux":
        return _model_from_cpuinfo()
    if system == "Darwin":
        return _model_from_sysctl()
    raise NotImplementedError(f"not implemented on {system or 'this system'}")


def _model_from_cpuinfo() -> _Model:
    facts: dict[str, str] = {}
    with (host.ROOT / "proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:  # the first processor is enough: Linux shows the same flags for all of them
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
            if not line.strip() and ("flags" in facts or "Features" in facts):
                break
    flags = facts.get("flags") or facts.get("Features")
    if not flags:
        raise ValueError("/proc/cpuinfo lists none")
    implementer, part = facts.get("CPU implementer"), facts.get("CPU part", "")
    name = facts.get("model name", "")
    if not name and implementer is not None:
        maker = _VENDOR_IDS.get(implementer, f"implementer {implementer}")
        name = _ARM_PARTS.get((implementer, part), f"{maker.capitalize()} part {part}")
    vendor = _VENDOR_IDS.get(facts.get("vendor_id") or implementer or "", "unknown")
    return _Model(vendor=vendor, name=name, features=_FEATURES & set(flags.split()))


def _model_from_sysctl() -> _Model:
    command = ["sysctl", "machdep.cpu", "hw.optional"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    facts = dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)
    flags = f"{facts.get('machdep.cpu.features', '')} {facts.get('machdep.cpu.leaf7_features', '')}".lower().split()
    features = _FEATURES & set(flags)  # Intel Macs: capital letters, otherwise mostly Linux's names
    features |= {name for key, names in _SYSCTL_FEATURES.items() if facts.get(key) == "1" for name in names}
    if not features:
        raise ValueError("sysctl lists none")
    name = facts.get("machdep.cpu.brand_string", "").strip()
    vendor = next((word for word in ("apple", "intel", "amd") if word in name.lower()), "unknown")
    return _Model(vendor=vendor, name=name, features=features)


def _cpus() -> frozenset[int] | None:
    """The CPUs that the scheduler may give this process; None where the system does not say.

    They are those of the thread that asks: once OMP_PROC_BIND or the like has put a thread in its place (GNU's OpenMP
    does that to the one that loads it, with torch), that is all of its CPUs.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    return None if affinity is None else frozenset(affinity(0))


def _nodes() -> dict[int, frozenset[int]]:
    """The NUMA nodes and the CPUs of each; empty where the system has no such thing."""
    nodes = {}
    with contextlib.suppress(OSError):
        for folder in (host.ROOT / "sys/devices/system/node").iterdir():
            if re.fullmatch(r"node[0-9]+", folder.name):
                nodes[int(folder.name[4:])] = host.numbers(host.read(folder / "cpulist") or "")
    return nodes


def _numa_nodes(cpus: frozenset[int] | None) -> frozenset[int] | None:
    """The nodes that these CPUs are on."""
    nodes = _nodes()
    return frozenset(node for node in nodes if nodes[node] & cpus) if nodes and cpus else None


def _memory_nodes() -> frozenset[int] | None:
    """The nodes that the cpuset and the policy (man 2 set_mempolicy, which numactl calls) let memory come from."""
    nodes = frozenset(_nodes())
    allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", host.read("proc/self/status") or "", re.MULTILINE)
    if not nodes or allowed is None:
        return None
    nodes &= host.numbers(host.read("sys/devices/system/node/has_memory") or host.number_list(nodes))
    nodes &= host.numbers(allowed.group(1))
    policy = _POLICY.match(_memory_policy())
    return nodes & host.numbers(policy.group(1)) if policy else nodes


_POLICY = re.compile(r"[0-9a-f]+ (?:bind|interleave|weighted interleave)(?:=[a-z|]+)?:([0-9,-]+)")
"""What a line of numa_maps begins with: an address and a policy, of which these have no memory from other nodes."""


def _memory_policy() -> str:
    """The first line of numa_maps (man 7 numa), where the program lies, which has no policy of its own."""
    try:  # no more than it takes: for each line the kernel looks at all pages
        with (host.ROOT / "proc/self/numa_maps").open("rb", buffering=0) as file:
            return file.read(160).decode(errors="replace")
    except OSError:
        return ""


def _num_threads(cpus: frozenset[int] | None) -> int | None:
    """Logical CPUs that the scheduler may give this process, no more than its CPU quota pays for."""
    num_threads = os.cpu_count() if cpus is None else len(cpus)
    if num_threads is None:
        return None
    for folder in _cgroup_folders("cpu"):
        quota = (host.read(folder / "cpu.max") or "").split()  # v2: "200000 100000", or "max 100000"
        quota = quota or [(host.read(folder / f"cpu.cfs_{part}_us") or "") for part in ("quota", "period")]
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit() and int(quota[1]):
            # Rounded up, as the JDK and Go do: the last thread runs for part of the period, and none is wasted.
            num_threads = min(num_threads, max(1, math.ceil(int(quota[0]) / int(quota[1]))))
    return num_threads


def _memory_bytes() -> tuple[int | None, int | None]:
    """Memory in bytes, total and available, of the machine or of the tightest cgroup around this process."""
    memory = _psutil().virtual_memory()
    total, available = int(memory.total), int(memory.available)
    for folder in _cgroup_folders("memory"):
        for limit_file, usage_file, reclaimable_key in _MEMORY_FILES:
            limit = host.read(folder / limit_file) or ""
            if not limit.isdigit() or not 0 < int(limit) < memory.total:
                continue  # "max", and v1's huge number, mean no limit
            total = min(total, int(limit))
            usage = host.read(folder / usage_file) or ""
            if usage.isdigit():
                stat = dict(line.split(" ", 1) for line in (host.read(folder / "memory.stat") or "").splitlines())
                used = int(usage) - int(stat.get(reclaimable_key, 0))  # page cache goes before memory runs out
                available = min(available, max(0, int(limit) - used))
    return total, min(total, available)


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """Folders of the cgroups that bound this process, innermost first: a limit on any of them holds.

    In a container without a cgroup namespace the path that /proc shows is the host's and does not exist below
    the mount; the walk then ends at the mount's root, which is the container's own cgroup (man 7 cgroups).
    """
    mounts = host.ROOT / "sys/fs/cgroup"
    for line in (host.read("proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            bases = [mounts, mounts / "unified"]  # v2, alone or beside v1
        elif controller in controllers.split(","):
            bases = [mounts / controllers, mounts / controller]
        else:
            continue
        parts = [] if ".." in path else [part for part in path.split("/") if part][:_DEEPEST_CGROUP]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                yield base.joinpath(*parts[:depth])

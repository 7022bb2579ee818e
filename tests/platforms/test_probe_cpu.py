"""The CPU probe, with the machine faked at its edges: /proc and /sys trees, psutil, the scheduler."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from anyattn.platforms import cpu, host
from anyattn.platforms.base import Platform
from anyattn.platforms.threads import torch_threads
from anyattn.types import GraphLevel

GIB = 1 << 30

XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8480+
flags\t\t: fpu sse4_2 fma f16c avx avx2 avx512f avx512dq avx512bw avx512vl avx_vnni avx512_bf16 avx512_vnni \
amx_bf16 avx512_fp16 amx_tile amx_int8

processor\t: 1
vendor_id\t: GenuineIntel
flags\t\t: fpu
"""
ZEN4 = """\
processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9654 96-Core Processor
flags\t\t: fpu sse4_2 fma f16c avx avx2 avx512f avx512dq avx512bw avx512vl avx512_bf16 avx512_vnni
"""
GRAVITON3 = """\
processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd aes crc32 fphp asimdhp asimddp sve i8mm bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU part\t: 0xd40
"""
MAC = """\
machdep.cpu.brand_string: Apple M3
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_SME: 0
"""


class Machine:
    """A Linux machine of 8 usable CPUs and 64 GiB, 48 of them free."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        monkeypatch.setattr(host, "ROOT", root)
        monkeypatch.setattr(platform, "system", lambda: "Linux")
        monkeypatch.setattr(platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB, available=48 * GIB))
        monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 4)
        self.write("proc/cpuinfo", XEON)

    def write(self, name: str, text: str | int) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")

    def probe(self) -> Platform:
        (device,) = cpu.probe().devices
        return device


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_a_xeon_with_amx_shows_its_instruction_sets(machine: Machine) -> None:
    device = machine.probe()
    assert (device.kind, device.vendor, device.arch) == ("cpu", "intel", "x86_64")
    assert device.name == "Intel(R) Xeon(R) Platinum 8480+"
    flags = XEON.partition("sse4_2 ")[2].partition("\n")[0]
    assert device.features == set(flags.split())


def test_an_amd_zen_4_has_avx512_bf16_and_no_amx(machine: Machine) -> None:
    machine.write("proc/cpuinfo", ZEN4)
    device = machine.probe()
    assert (device.vendor, device.name) == ("amd", "AMD EPYC 9654 96-Core Processor")
    assert {"avx2", "avx512_bf16", "avx512_vnni"} <= device.features
    assert not any(feature.startswith("amx") for feature in device.features)


def test_a_graviton_is_named_by_its_arm_core(machine: Machine) -> None:
    machine.write("proc/cpuinfo", GRAVITON3)
    machine.monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    device = machine.probe()
    assert (device.vendor, device.name, device.arch) == ("arm", "Arm Neoverse V1", "aarch64")
    assert device.features == {"asimd", "fphp", "asimdhp", "asimddp", "sve", "i8mm", "bf16"}


def test_an_arm_core_that_the_table_lacks_is_named_by_its_part_number(machine: Machine) -> None:
    machine.write("proc/cpuinfo", GRAVITON3.replace("0xd40", "0xdff"))
    assert machine.probe().name == "Arm part 0xdff"


def test_a_mac_is_asked_through_sysctl(machine: Machine) -> None:
    machine.monkeypatch.setattr(platform, "system", lambda: "Darwin")
    machine.monkeypatch.setattr(platform, "machine", lambda: "arm64")
    machine.monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=MAC))
    device = machine.probe()
    assert (device.vendor, device.name, device.arch) == ("apple", "Apple M3", "aarch64")
    assert device.features == {"asimd", "fphp", "asimdhp", "bf16", "i8mm"}


@pytest.mark.parametrize(("machine_name", "arch"), [("AMD64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")])
def test_the_arch_has_one_name_on_every_system(machine: Machine, machine_name: str, arch: str) -> None:
    machine.monkeypatch.setattr(platform, "machine", lambda: machine_name)
    assert machine.probe().arch == arch


@pytest.mark.parametrize("system", ["Windows", "Linux", "Darwin"])
def test_instruction_sets_that_cannot_be_told_are_a_problem_and_not_a_crash(machine: Machine, system: str) -> None:
    (machine.root / "proc/cpuinfo").unlink()
    machine.monkeypatch.setattr(platform, "system", lambda: system)
    machine.monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=""))
    result = cpu.probe()
    assert result.devices[0].features == frozenset()
    assert result.devices[0].name
    assert "instruction sets could not be told" in result.problems[0]


def test_a_machine_without_psutil_still_gives_its_instruction_sets(machine: Machine) -> None:
    machine.monkeypatch.setitem(sys.modules, "psutil", None)
    result = cpu.probe()
    (device,) = result.devices
    assert (device.memory_total_bytes, device.num_cores, device.num_threads) == (None, None, 8)
    assert "amx_bf16" in device.features
    assert all("psutil" in problem for problem in result.problems)
    assert len(result.problems) == 2


def test_without_cgroup_limits_the_whole_machine_counts(machine: Machine) -> None:
    device = machine.probe()
    assert (device.num_cores, device.num_threads) == (4, 8)
    assert (device.memory_total_bytes, device.memory_free_bytes) == (64 * GIB, 48 * GIB)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu,cpuacct"


@pytest.mark.parametrize(("quota", "threads"), [("max", 8), (200_000, 2), (150_000, 2), (20_000, 1), (3_200_000, 8)])
def test_a_cgroup_v2_quota_bounds_the_threads(machine: Machine, quota: str | int, threads: int) -> None:
    machine.write("proc/self/cgroup", "0::/job")
    machine.write(f"{V2}/job/cpu.max", f"{quota} 100000")
    assert machine.probe().num_threads == threads


@pytest.mark.parametrize(("quota", "threads"), [(-1, 8), (200_000, 2), (150_000, 2)])
def test_a_cgroup_v1_quota_bounds_the_threads(machine: Machine, quota: int, threads: int) -> None:
    machine.write("proc/self/cgroup", "4:cpu,cpuacct:/job\n0::/")
    machine.write(f"{V1}/job/cpu.cfs_quota_us", quota)
    machine.write(f"{V1}/job/cpu.cfs_period_us", 100_000)
    assert machine.probe().num_threads == threads


def test_a_quota_on_an_outer_cgroup_holds_as_well(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/slice/job")
    machine.write(f"{V2}/slice/cpu.max", "300000 100000")
    machine.write(f"{V2}/slice/job/cpu.max", "max 100000")
    assert machine.probe().num_threads == 3


@pytest.mark.parametrize(
    ("implementer", "part", "vendor", "name"),
    [
        ("0x41", "0xd49", "arm", "Arm Neoverse N2"),
        ("0x48", "0xd01", "huawei", "HiSilicon TSV110 (Kunpeng 920)"),
        ("0xc0", "0xac3", "ampere", "AmpereOne"),
        ("0x46", "0x001", "fujitsu", "Fujitsu A64FX"),
        ("0x4e", "0x010", "nvidia", "Nvidia part 0x010"),
        ("0x99", "0x001", "unknown", "Implementer 0x99 part 0x001"),
    ],
)
def test_an_arm_cpu_is_named_by_its_makers_code(machine: Machine, implementer, part, vendor, name) -> None:
    machine.monkeypatch.setattr("platform.machine", lambda: "aarch64")
    lines = ("Features\t: fp asimd sve bf16", f"CPU implementer\t: {implementer}", f"CPU part\t: {part}", "")
    machine.write("proc/cpuinfo", "\n".join(lines))
    device = machine.probe()
    assert (device.vendor, device.name, device.arch) == (vendor, name, "aarch64")
    assert {"asimd", "sve", "bf16"} <= device.features
    assert device.status == "contract-tested"


@pytest.mark.parametrize("path", ["/docker/4f2a", "/../../job"])
def test_in_a_container_the_mounts_root_holds_the_limits(machine: Machine, path: str) -> None:
    machine.write("proc/self/cgroup", f"7:memory:{path}\n4:cpu,cpuacct:{path}")
    machine.write(f"{V1}/cpu.cfs_quota_us", 400_000)
    machine.write(f"{V1}/cpu.cfs_period_us", 100_000)
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 8 * GIB)
    device = machine.probe()
    assert (device.num_threads, device.memory_total_bytes) == (4, 8 * GIB)


def test_a_cgroup_v2_memory_limit_bounds_total_and_available(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job")
    machine.write(f"{V2}/job/memory.max", 16 * GIB)
    machine.write(f"{V2}/job/memory.current", 10 * GIB)
    machine.write(f"{V2}/job/memory.stat", f"anon {6 * GIB}\ninactive_file {4 * GIB}")
    device = machine.probe()
    assert (device.memory_total_bytes, device.memory_free_bytes) == (16 * GIB, 10 * GIB)


def test_a_cgroup_v1_memory_limit_bounds_total_and_available(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "7:memory:/job")
    machine.write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", 16 * GIB)
    machine.write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", 10 * GIB)
    machine.write("sys/fs/cgroup/memory/job/memory.stat", f"cache 1\ntotal_inactive_file {1 * GIB}")
    machine.write("sys/fs/cgroup/memory/memory.limit_in_bytes", 9223372036854771712)  # v1's "no limit"
    device = machine.probe()
    assert (device.memory_total_bytes, device.memory_free_bytes) == (16 * GIB, 7 * GIB)


def test_available_memory_is_never_more_than_the_machine_has_free(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job")
    machine.write(f"{V2}/job/memory.max", 60 * GIB)
    machine.write(f"{V2}/job/memory.current", 1 * GIB)
    assert machine.probe().memory_free_bytes == 48 * GIB


def test_available_memory_is_never_more_than_a_limit_without_a_usage_file(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job")
    machine.write(f"{V2}/job/memory.max", 16 * GIB)
    assert machine.probe().memory_free_bytes == 16 * GIB


def two_nodes(machine: Machine, allowed: str = "0-1", policy: str = "default") -> None:
    """Two sockets of 8 CPUs and memory each, and a node that has memory alone."""
    for node, cpus in enumerate(["0-7", "8-15", ""]):
        machine.write(f"sys/devices/system/node/node{node}/cpulist", cpus)
    machine.write("sys/devices/system/node/has_memory", "0-2")
    machine.write("proc/self/status", f"Name:\tpython\nMems_allowed:\t3\nMems_allowed_list:\t{allowed}")
    machine.write("proc/self/numa_maps", f"563d28390000 {policy} file=/usr/bin/python3 mapped=1 N0=1")


def run_on(machine: Machine, *cpus: int) -> None:
    machine.monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cpus), raising=False)


def test_the_cpus_of_the_process_are_told_and_the_nodes_that_they_are_on(machine: Machine) -> None:
    two_nodes(machine, allowed="0-2")
    device = machine.probe()
    assert (device.num_threads, device.cpus) == (8, "0-7")
    assert (device.numa_nodes, device.memory_nodes) == ("0", "0-2")
    run_on(machine, 2, 3, 9)
    device = machine.probe()
    assert (device.num_threads, device.cpus, device.numa_nodes) == (3, "2-3,9", "0-1")


@pytest.mark.parametrize(
    ("allowed", "policy", "nodes"),
    [
        ("0-1", "default", "0-1"),
        ("1", "default", "1"),  # a cpuset
        ("0-1", "bind:1", "1"),  # numactl --membind=1
        ("0-1", "bind=static:1", "1"),
        ("0-2", "interleave:0,2", "0,2"),
        ("0-1", "weighted interleave:0-1", "0-1"),
        ("0-1", "prefer:1", "0-1"),  # others where that one is full
        ("0-1", "local", "0-1"),
        ("0-63", "default", "0-2"),  # nodes that could be plugged in
    ],
)
def test_memory_comes_from_where_the_cpuset_and_the_policy_allow(machine, allowed, policy, nodes) -> None:
    two_nodes(machine, allowed, policy)
    assert machine.probe().memory_nodes == nodes


def test_a_quota_pays_for_fewer_cpus_than_the_process_may_run_on(machine: Machine) -> None:
    machine.write("proc/self/cgroup", "0::/job")
    machine.write(f"{V2}/job/cpu.max", "200000 100000")
    device = machine.probe()
    assert (device.num_threads, device.cpus) == (2, "0-7")


def test_where_the_system_does_not_tell_cpus_and_nodes_they_are_unknown(machine: Machine) -> None:
    device = machine.probe()
    assert (device.numa_nodes, device.memory_nodes) == (None, None)
    machine.monkeypatch.setattr(platform, "system", lambda: "Darwin")
    machine.monkeypatch.delattr(os, "sched_getaffinity")
    machine.monkeypatch.setattr(os, "cpu_count", lambda: 8)
    result = cpu.probe()
    (device,) = result.devices
    assert (device.num_threads, device.cpus, device.numa_nodes, device.memory_nodes) == (8, None, None, None)
    assert not any("NUMA" in problem for problem in result.problems)


def test_nodes_that_cannot_be_read_are_a_problem_and_not_a_crash(machine: Machine) -> None:
    two_nodes(machine)
    machine.write("sys/devices/system/node/node1/cpulist", "8-x")
    result = cpu.probe()
    assert (result.devices[0].cpus, result.devices[0].numa_nodes) == ("0-7", None)
    assert "NUMA nodes could not be told" in result.problems[0]


def cores_of_two(machine: Machine) -> None:
    """8 cores: CPUs 0 and 8 are the threads of one, 1 and 9 those of the next."""
    machine.monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 16 if logical else 8)
    machine.write("sys/devices/system/cpu/online", "0-15")
    for number in range(16):
        machine.write(
            f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list", f"{number % 8},{number % 8 + 8}"
        )


@pytest.mark.parametrize(
    ("environ", "count", "counted_by"),
    [
        ({}, 4, "one for each core"),
        ({"OMP_NUM_THREADS": "3"}, 3, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "2,4"}, 2, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "2"}, 2, "MKL_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "none"}, 3, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "0"}, 4, "one for each core"),
        ({"OMP_NUM_THREADS": "7"}, 7, "OMP_NUM_THREADS"),
        ({"OMP_NUM_THREADS": "9"}, 8, "one for each core, where OMP_NUM_THREADS is 9"),
        ({"OMP_NUM_THREADS": "9", "MKL_DYNAMIC": "FALSE"}, 9, "OMP_NUM_THREADS"),
    ],
    ids=str,
)
def test_torch_takes_the_threads_that_are_set_or_one_for_each_core_of_the_cpus(machine, environ, count, counted_by):
    cores_of_two(machine)
    run_on(machine, 0, 1, 2, 3, 8, 9)
    told = torch_threads(machine.probe(), environ)
    assert (told.count, told.counted_by) == (count, counted_by)


def test_torch_on_arm_takes_what_is_set_or_all_cores(machine: Machine) -> None:
    machine.write("proc/cpuinfo", GRAVITON3)
    machine.monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    run_on(machine, 0)
    assert torch_threads(machine.probe(), {}).count == 4
    told = torch_threads(machine.probe(), {"OMP_NUM_THREADS": "64"})
    assert (told.count, told.counted_by) == (64, "OMP_NUM_THREADS")
    assert "set OMP_NUM_THREADS=1" in told.hints[0]


def test_what_puts_threads_where_is_told(machine: Machine) -> None:
    cores_of_two(machine)
    environ = {"OMP_PLACES": "cores", "OMP_PROC_BIND": "close", "GOMP_CPU_AFFINITY": "0-3"}
    told = torch_threads(machine.probe(), environ)
    set_here = ("OMP_PROC_BIND=close", "OMP_PLACES=cores", "GOMP_CPU_AFFINITY=0-3")
    assert told.pinned_by == (*set_here, "taskset, numactl or a cpuset: CPUs 0-7 of 0-15")
    run_on(machine, *range(16))
    assert torch_threads(machine.probe(), {}).pinned_by == ()


def test_intels_variable_is_for_intels_openmp(machine: Machine) -> None:
    (hint,) = torch_threads(machine.probe(), {"KMP_AFFINITY": "compact"}).hints
    assert "OMP_PROC_BIND" in hint
    environ = {"KMP_AFFINITY": "compact", "LD_PRELOAD": "/opt/lib/libiomp5.so"}
    assert torch_threads(machine.probe(), environ).hints == ()


def test_more_threads_than_a_quota_pays_for_are_told(machine: Machine) -> None:
    cores_of_two(machine)
    machine.write("proc/self/cgroup", "0::/job")
    machine.write(f"{V2}/job/cpu.max", "200000 100000")
    (hint,) = torch_threads(machine.probe(), {}).hints
    assert "torch takes 8 threads" in hint
    assert hint.endswith("set OMP_NUM_THREADS=2")
    assert torch_threads(machine.probe(), {"OMP_NUM_THREADS": "2"}).hints == ()


@pytest.mark.parametrize(
    ("cpus", "policy", "hint"),
    [
        (range(8), "default", None),
        (range(16), "default", "one process for each node, started with `numactl --cpunodebind=0 --membind=0`"),
        (range(8), "bind:1", "on NUMA node 0, where this process may not take memory (only from 1)"),
        (range(16), "bind:1", "on NUMA node 0, where this process may not take memory (only from 1)"),
        (range(8, 16), "bind:1", None),
    ],
)
def test_threads_away_from_their_memory_are_told_and_what_mends_it(machine, cpus, policy, hint) -> None:
    two_nodes(machine, policy=policy)
    run_on(machine, *cpus)
    hints = torch_threads(machine.probe(), {}).hints
    assert len(hints) == (hint is not None)
    if hint is not None:
        assert hint in hints[0]
        assert "numactl --cpunodebind=" in hints[0]


def test_one_thread_is_on_one_node(machine: Machine) -> None:
    two_nodes(machine)
    run_on(machine, *range(16))
    assert torch_threads(machine.probe(), {"OMP_NUM_THREADS": "1"}).hints == ()


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's affinity")
@pytest.mark.parametrize(
    "environ", [{}, {"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "999"}, {"OMP_NUM_THREADS": "2", "pin": "1"}], ids=str
)
def test_torch_here_takes_as_many_threads_as_is_told(environ: dict[str, str]) -> None:
    pytest.importorskip("torch", reason="needs torch")
    code = (
        "import os\n"
        "if 'pin' in os.environ: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from anyattn.platforms import cpu, threads\n"
        "told = threads.torch_threads(*cpu.probe().devices)\n"
        "import torch\n"
        "print(told.count, torch.get_num_threads())\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_", "KMP_"))}
    root = Path(cpu.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**kept, **environ, "PYTHONPATH": str(root)},
    )
    told, taken = ended.stdout.split()
    assert told == taken


def test_a_machine_without_torch_says_what_to_install(machine: Machine) -> None:
    machine.monkeypatch.setitem(sys.modules, "torch", None)
    assert machine.probe().problems == ('torch is not installed; run `pip install "anyattn[cpu]"`',)


def test_an_installed_torch_is_no_problem(machine: Machine) -> None:
    machine.write("torch/__init__.py", "")
    machine.write("torch/version.py", "__version__ = '2.13.0+cpu'")
    machine.monkeypatch.delitem(sys.modules, "torch", raising=False)
    machine.monkeypatch.syspath_prepend(machine.root)
    assert machine.probe().problems == ()


@pytest.mark.parametrize("version_py", [None, "__version__ = = 3", "x = " + "-" * 100_000])
def test_a_torch_that_cannot_even_tell_its_version_is_damaged(machine: Machine, version_py: str | None) -> None:
    machine.write("torch/__init__.py", "")
    if version_py is not None:
        machine.write("torch/version.py", version_py)
    machine.monkeypatch.delitem(sys.modules, "torch", raising=False)
    machine.monkeypatch.syspath_prepend(machine.root)
    (problem,) = machine.probe().problems
    assert "the installed torch is damaged" in problem


def test_the_cpu_takes_no_graph_no_triton_and_gloo(machine: Machine) -> None:
    device = machine.probe()
    assert (device.torch_device, device.collective, device.graph) == ("cpu", "gloo", GraphLevel.NEVER)
    assert device.triton is False


def test_this_machine_is_told_as_it_is() -> None:
    result = cpu.probe()
    (device,) = result.devices
    assert device.num_threads is not None
    assert 1 <= device.num_threads <= (os.cpu_count() or 1)
    assert device.memory_total_bytes is not None
    assert device.memory_free_bytes is not None
    assert 0 < device.memory_free_bytes <= device.memory_total_bytes <= psutil.virtual_memory().total
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        words = set(cpuinfo.read_text().split())
        for feature in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"):
            assert (feature in device.features) == (feature in words)


def test_the_probes_import_no_torch_and_load_no_cuda_runtime() -> None:
    code = (
        "import sys, pathlib\n"
        "import anyattn.platforms.cpu, anyattn.platforms.cuda\n"
        "assert 'pynvml' not in sys.modules and 'psutil' not in sys.modules\n"
        "anyattn.platforms.cpu.probe(), anyattn.platforms.cuda.probe()\n"
        "assert not {'torch', 'triton', 'numpy'} & set(sys.modules), sys.modules.keys()\n"
        "maps = pathlib.Path('/proc/self/maps')\n"
        # NVML itself may map libcuda (driver 580 does), without starting it; the runtime's libraries are torch's.
        "assert not maps.exists() or 'libcudart' not in maps.read_text()\n"
    )
    root = Path(cpu.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root)})

"""The AMD probe, with the machine faked at its edges: a tree of /sys, /proc, /dev and /usr, the environment, torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anyattn.platforms import host, rocm
from anyattn.platforms.base import ProbeResult
from anyattn.types import GraphLevel

GIB = 1 << 30
MI300X_BYTES = 196288 << 20
NODES = "sys/class/kfd/kfd/topology/nodes"
VARIABLES = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
OVERRIDES = ("HSA_OVERRIDE_GFX_VERSION", "HSA_OVERRIDE_GFX_VERSION_1", "HSA_OVERRIDE_GFX_VERSION_2")

MI300X = {"gfx_target_version": 90402, "simd_count": 1216, "simd_per_cu": 4, "device_id": 0x74A1}
MI250 = {"gfx_target_version": 90010, "simd_count": 416, "simd_per_cu": 4, "device_id": 0x740C}
RX_7900_XTX = {"gfx_target_version": 110000, "simd_count": 192, "simd_per_cu": 2, "device_id": 0x744C}
RYZEN_GRAPHICS = {"gfx_target_version": 100306, "simd_count": 4, "simd_per_cu": 2, "device_id": 0x164E}

AMDGPU_IDS = (
    "# List of AMDGPU IDs\n1.0.0\n73BF,\tC1,\tAMD Radeon RX 6800 XT\n740C,\t01,\tAMD Instinct MI250X / MI250\n"
    "744C,\tC8,\tAMD Radeon RX 7900 XTX\n744C,\tCC,\tAMD Radeon RX 7900 XT\n"
)


class Machine:
    """A machine with KFD and one CPU node, torch for ROCm 7, and no variable set. GPUs are added by tests."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch, self.num_nodes, self.num_cards = root, monkeypatch, 0, 0
        monkeypatch.setattr(host, "ROOT", root)
        for variable in (*VARIABLES, *OVERRIDES):
            monkeypatch.delenv(variable, raising=False)
        self.write("site/torch/__init__.py", "raise ImportError('a probe must not import torch')")
        self.torch("__version__ = '2.9.1+rocm7.0'\ncuda: Optional[str] = None\nhip: Optional[str] = '7.0.51831'\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(root / "site")
        self.write("proc/sys/kernel/osrelease", "6.8.0-64-generic\n")
        self.cpu()

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    def torch(self, version_py: str) -> None:
        self.write("site/torch/version.py", f"from typing import Optional\n{version_py}")

    def node(self, **facts: int) -> str:
        folder = f"{NODES}/{self.num_nodes}"
        self.num_nodes += 1
        self.write(f"{folder}/properties", "".join(f"{name} {value}\n" for name, value in facts.items()))
        return folder

    def cpu(self) -> None:
        folder = self.node(cpu_cores_count=64, simd_count=0, mem_banks_count=1, gfx_target_version=0)
        self.write(f"{folder}/mem_banks/0/properties", f"heap_type 0\nsize_in_bytes {512 * GIB}\n")

    def gpu(
        self,
        model: dict[str, int],
        *,
        unique_id: int = 0,
        local_bytes: int = 0,
        card: dict[str, Any] | None = None,
        partition: int = 0,
        revision: int = 0,
    ) -> str:
        """One KFD node; returns its folder. Partitions above 0 belong to the card that was added last."""
        self.num_cards += partition == 0
        minor = 128 + self.num_nodes
        folder = self.node(
            cpu_cores_count=0,
            mem_banks_count=1,
            location_id=self.num_cards << 8 | partition,
            domain=0,
            drm_render_minor=minor,
            unique_id=unique_id,
            **model,
        )
        self.write(f"{folder}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {local_bytes}\nflags 0\n")
        self.write("dev/kfd")
        self.write(f"dev/dri/renderD{minor}")
        if partition == 0:
            facts = {"device": f"{model['device_id']:#06x}", "revision": f"{revision:#04x}", **(card or {})}
            for name, value in facts.items():
                self.write(f"{self.card}/{name}", f"{value}\n")
        return folder

    @property
    def card(self) -> str:
        """The PCI folder of the card that was added last."""
        return f"sys/bus/pci/devices/0000:{self.num_cards:02x}:00.0"

    def probe(self, **variables: str) -> ProbeResult:
        for variable, value in variables.items():
            self.monkeypatch.setenv(variable, value)
        return rocm.probe()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def uuids(result: ProbeResult) -> list[str | None]:
    return [device.uuid for device in result.devices]


def test_eight_mi300x_are_eight_devices_in_the_order_of_the_kernels_numbers(machine: Machine) -> None:
    machine.cpu()
    memory = {"mem_info_vram_total": MI300X_BYTES, "mem_info_vram_used": 300 << 20}
    for number in range(1, 9):  # nodes 2 to 9
        card = {"product_name": "AMD Instinct MI300X OAM", **memory}
        machine.gpu(MI300X, unique_id=0xAB00 + number, local_bytes=MI300X_BYTES, card=card)
    machine.gpu(MI300X, unique_id=0xCD, local_bytes=MI300X_BYTES, card=memory)  # node 10 comes after node 9
    machine.write("sys/module/amdgpu/version", "6.14.14\n")
    result = machine.probe()
    assert uuids(result) == [f"GPU-{0xAB00 + number:016x}" for number in range(1, 9)] + ["GPU-00000000000000cd"]
    assert result.problems == ()
    first, second = result.devices[:2]
    assert (first.kind, first.vendor, first.name) == ("rocm", "amd", "AMD Instinct MI300X OAM")
    assert (first.arch, first.num_cores, first.compute_capability) == ("gfx942", 304, None)
    assert (first.memory_total_bytes, first.memory_free_bytes) == (MI300X_BYTES, MI300X_BYTES - (300 << 20))
    assert (first.driver_version, first.runtime_version) == ("6.14.14", "7.0.51831")
    assert (first.collective, first.graph, first.triton) == ("rccl", GraphLevel.ALWAYS, True)
    assert (first.status, first.problems) == ("contract-tested", ())
    assert (second.index, second.torch_device) == (1, "cuda:1")


def test_an_mi250_is_two_devices_named_by_libdrms_table(machine: Machine) -> None:
    machine.write("opt/amdgpu/share/libdrm/amdgpu.ids", AMDGPU_IDS)
    for unique_id in (1, 2):
        machine.gpu(MI250, unique_id=unique_id, local_bytes=64 * GIB, revision=1)
    result = machine.probe()
    assert [device.name for device in result.devices] == ["AMD Instinct MI250X / MI250"] * 2
    assert [(device.arch, device.num_cores, device.triton) for device in result.devices] == [("gfx90a", 104, True)] * 2


def test_a_radeon_and_a_ryzens_graphics_are_two_devices(machine: Machine) -> None:
    machine.write("usr/share/libdrm/amdgpu.ids", AMDGPU_IDS)
    memory = {"mem_info_vram_total": 24 * GIB, "mem_info_vram_used": 1 * GIB}
    machine.gpu(RX_7900_XTX, unique_id=0xA200000000000001, local_bytes=24 * GIB, revision=0xC8, card=memory)
    machine.gpu(RYZEN_GRAPHICS, local_bytes=512 << 20)
    radeon, ryzen = machine.probe().devices
    assert (radeon.name, radeon.arch, radeon.num_cores) == ("AMD Radeon RX 7900 XTX", "gfx1100", 96)
    assert (radeon.memory_total_bytes, radeon.memory_free_bytes) == (24 * GIB, 23 * GIB)
    assert radeon.driver_version == "Linux 6.8.0-64-generic"  # the driver is Linux's own
    assert (ryzen.name, ryzen.arch, ryzen.num_cores) == ("AMD GPU", "gfx1036", 2)  # the table has no such line
    assert (ryzen.uuid, ryzen.torch_device) == (None, "cuda:1")
    assert (ryzen.memory_total_bytes, ryzen.memory_free_bytes) == (512 << 20, None)


def test_compute_partitions_are_devices_of_their_own_with_the_cards_name(machine: Machine) -> None:
    partition = {**MI300X, "simd_count": 152}
    memory = {"mem_info_vram_total": MI300X_BYTES, "mem_info_vram_used": 8 * GIB}
    for number in range(8):
        card = {"product_name": "AMD Instinct MI300X OAM", **memory}
        machine.gpu(partition, unique_id=0xAB, local_bytes=MI300X_BYTES // 8, card=card, partition=number)
    devices = machine.probe().devices
    assert [(device.name, device.num_cores) for device in devices] == [("AMD Instinct MI300X OAM", 38)] * 8
    assert {device.memory_total_bytes for device in devices} == {MI300X_BYTES // 8}
    assert {device.memory_free_bytes for device in devices} == {None}  # the card tells of all partitions together


APU = {"mem_info_vram_total": 512 << 20, "mem_info_vram_used": 100 << 20, "mem_info_gtt_used": 2 * GIB}


@pytest.mark.parametrize(
    ("available_kib", "free_bytes"),
    [
        pytest.param(60 << 20, 46 * GIB, id="what its own limit leaves"),
        pytest.param(10 << 20, 10 * GIB, id="no more than what the host has available"),
        pytest.param(None, None, id="unknown without the host's answer"),
    ],
)
def test_an_apu_that_uses_the_hosts_memory_has_its_total_from_kfd_and_its_free_from_the_host(
    machine: Machine, available_kib: int | None, free_bytes: int | None
) -> None:
    machine.gpu({**RYZEN_GRAPHICS, "gfx_target_version": 110501}, local_bytes=48 * GIB, card=APU)
    if available_kib is not None:
        machine.write("proc/meminfo", f"MemTotal:       98304000 kB\nMemAvailable:   {available_kib} kB\n")
    (device,) = machine.probe().devices
    assert (device.arch, device.triton) == ("gfx1151", True)
    assert (device.memory_total_bytes, device.memory_free_bytes) == (48 * GIB, free_bytes)


@pytest.mark.parametrize(
    ("version", "arch", "triton"),
    [
        (80003, "gfx803", False),
        (90000, "gfx900", False),
        (90006, "gfx906", False),
        (90008, "gfx908", True),
        (90010, "gfx90a", True),
        (90012, "gfx90c", False),
        (90500, "gfx950", True),
        (100103, "gfx1013", True),
        (100300, "gfx1030", True),
        (110003, "gfx1103", True),
        (110503, "gfx1153", True),
        (120001, "gfx1201", True),
        (120500, "gfx1250", True),
        (0, "unknown", False),
    ],
)
def test_the_arch_is_llvms_name_and_triton_is_true_where_its_compiler_knows_it(
    machine: Machine, version: int, arch: str, triton: bool
) -> None:
    machine.gpu({**MI300X, "gfx_target_version": version})
    (device,) = machine.probe().devices
    assert (device.arch, device.triton) == (arch, triton)


@pytest.mark.parametrize(
    ("variables", "archs"),
    [
        ({"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}, ["gfx1030", "gfx1030"]),
        ({"HSA_OVERRIDE_GFX_VERSION": "9.0.10"}, ["gfx90a", "gfx90a"]),
        ({"HSA_OVERRIDE_GFX_VERSION_2": "10.3.0"}, ["gfx1100", "gfx1030"]),
        ({"HSA_OVERRIDE_GFX_VERSION": "11.0.2", "HSA_OVERRIDE_GFX_VERSION_1": "11.0.1"}, ["gfx1101", "gfx1102"]),
        ({"HSA_OVERRIDE_GFX_VERSION": "1030"}, ["gfx1100", "gfx1036"]),
    ],
)
def test_an_override_is_what_the_runtime_takes_a_gpu_for(
    machine: Machine, variables: dict[str, str], archs: list[str]
) -> None:
    machine.gpu(RX_7900_XTX)
    machine.gpu(RYZEN_GRAPHICS)
    assert [device.arch for device in machine.probe(**variables).devices] == archs


A, B, C = (f"GPU-{digit}b7c2df3a2c0d10{digit}" for digit in "abc")


def three(machine: Machine) -> None:
    for uuid in (A, B, C):
        machine.gpu(MI300X, unique_id=int(uuid.removeprefix("GPU-"), 16))


# Rules of ROCR-Runtime's RvdFilter (amd_filter_device.h and .cpp). These and HIP's, below, were held against the two
# loops themselves, transcribed and compiled, with 200,000 random settings.
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param("1", [B], id="an index chooses one"),
        pytest.param("2,0", [C, A], id="the order of the list is the order of the devices"),
        pytest.param("", [], id="empty hides all"),
        pytest.param("-1", [], id="minus one hides all"),
        pytest.param("GPU-XX", [], id="GPU-XX hides all"),
        pytest.param("0,-1,1", [A], id="minus one ends the list"),
        pytest.param("0,3,1", [A], id="an index out of range ends the list"),
        pytest.param("1,0,1,2", [B, A], id="a repeat ends the list"),
        pytest.param("0,x,1", [A], id="a word ends the list"),
        pytest.param("1gpu", [], id="letters after the digits are no index"),
        pytest.param(" 1 , 0 ", [B, A], id="spaces around an entry are trimmed"),
        pytest.param("0,", [A], id="a comma at the end begins no entry"),
        pytest.param("0,,1", [], id="an empty entry stops the runtime"),
        pytest.param(" ", [], id="blank stops the runtime"),
        pytest.param(",0", [], id="a comma at the beginning stops the runtime"),
        pytest.param("2,1,0,,", [C, B, A], id="nothing is read beyond as many entries as there are GPUs"),
        pytest.param("0x1,+2,00", [B, C, A], id="hexadecimal, signed and octal indices"),
        pytest.param("08", [], id="eight is no octal digit"),
        pytest.param("-0", [A], id="minus zero is zero"),
        pytest.param(B, [B], id="a UUID chooses one"),
        pytest.param(f"{C},0", [C, A], id="UUIDs and indices may be mixed"),
        pytest.param(C[:5], [C], id="a beginning of a UUID that is unique"),
        pytest.param(B.lower(), [B], id="case does not matter"),
        pytest.param("GPU-", [], id="the prefix alone is none"),
        pytest.param(B[4:], [], id="a UUID without its prefix is none"),
        pytest.param(f"{A}0", [], id="a UUID that is too long is none"),
        pytest.param(f"0,{A}", [A], id="a repeat under another name ends the list"),
        pytest.param(f"{A},GPU-ffff,{B}", [A], id="an unknown UUID ends the list"),
    ],
)
def test_the_roc_runtimes_variable_follows_its_rules(machine: Machine, setting: str, expected: list[str]) -> None:
    three(machine)
    result = machine.probe(ROCR_VISIBLE_DEVICES=setting)
    assert uuids(result) == expected
    assert [device.torch_device for device in result.devices] == [f"cuda:{i}" for i in range(len(expected))]


def test_a_beginning_that_several_uuids_share_ends_the_roc_runtimes_list(machine: Machine) -> None:
    for unique_id in (0xAB00000000000001, 0xAB00000000000002):
        machine.gpu(MI300X, unique_id=unique_id)
    result = machine.probe(ROCR_VISIBLE_DEVICES="1,GPU-AB")
    assert uuids(result) == ["GPU-ab00000000000002"]
    assert "GPU-AB" in result.problems[0]


# Rules of HIP: Flag::init in flags.cpp, and Device::init in rocdevice.cpp, of ROCm/clr.
@pytest.mark.parametrize("variable", ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"])
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param("1", [B], id="an index chooses one"),
        pytest.param("2,0", [C, A], id="the order of the list is the order of the devices"),
        pytest.param("", [], id="empty hides all"),
        pytest.param(" ", [], id="blank hides all"),
        pytest.param("-1", [], id="minus one hides all"),
        pytest.param("0,-1,1", [A], id="minus one ends the list"),
        pytest.param("0,3,1", [A], id="an index out of range ends the list"),
        pytest.param("1,0,1,2", [B, A, C], id="a repeat is skipped"),
        pytest.param("0,,1", [A], id="an empty entry ends the list"),
        pytest.param("0,", [A], id="a comma at the end begins no entry"),
        pytest.param("0, 1", [A], id="a space before an index ends the list"),
        pytest.param("01", [], id="a leading zero is no index"),
        pytest.param("0x1", [], id="hexadecimal is no index"),
        pytest.param("+1", [], id="a sign is no index"),
        pytest.param("1gpu", [], id="letters after the digits are no index"),
        pytest.param('"1,0"', [B, A], id="quotes are dropped"),
        pytest.param(' "1" ', [B], id="and so are blanks around them"),
        pytest.param('"1', [], id="a lone quote stays"),
        pytest.param('""', [A, B, C], id="quoted nothing is no filter"),
        pytest.param(B, [B], id="a UUID chooses one"),
        pytest.param(f"{C},0", [C, A], id="UUIDs and indices may be mixed"),
        pytest.param("GPU-c", [C], id="a part of a UUID"),
        pytest.param("GPU-", [A], id="the first match counts"),
        pytest.param(B.upper(), [], id="capital digits match none"),
        pytest.param(f"{A},GPU-ffff,{B}", [A], id="an unknown UUID ends the list"),
    ],
)
def test_hips_variables_follow_hips_rules(machine: Machine, variable: str, setting: str, expected: list[str]) -> None:
    three(machine)
    assert uuids(machine.probe(**{variable: setting})) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "2"}, [B], id="HIP's name goes first"),
        pytest.param({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "2"}, [], id="also where it is empty"),
        pytest.param({"HIP_VISIBLE_DEVICES": '""', "CUDA_VISIBLE_DEVICES": "2"}, [C], id="but not quoted nothing"),
        pytest.param(
            {"ROCR_VISIBLE_DEVICES": "2,0", "HIP_VISIBLE_DEVICES": "1"}, [A], id="HIP counts what ROCr leaves"
        ),
        pytest.param({"ROCR_VISIBLE_DEVICES": "2,0", "CUDA_VISIBLE_DEVICES": "0"}, [C], id="under either name"),
        pytest.param({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, [], id="nothing is left of nothing"),
        pytest.param({"GPU_DEVICE_ORDINAL": "1"}, [A, B, C], id="OpenCL's variable is not HIP's"),
    ],
)
def test_the_variables_have_an_order(machine: Machine, variables: dict[str, str], expected: list[str]) -> None:
    three(machine)
    assert uuids(machine.probe(**variables)) == expected


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize("setting", ["", "-1", "1,0", "0,-1,1", A])
def test_a_setting_that_hides_devices_on_purpose_is_no_problem(machine: Machine, variable: str, setting: str) -> None:
    three(machine)
    assert machine.probe(**{variable: setting}).problems == ()


@pytest.mark.parametrize(
    ("variable", "setting", "text"),
    [
        ("ROCR_VISIBLE_DEVICES", "0,7", 'no device "7"'),
        ("ROCR_VISIBLE_DEVICES", "0,0", '"0" again'),
        ("ROCR_VISIBLE_DEVICES", "0,,1", "does not start"),
        ("HIP_VISIBLE_DEVICES", "0,7", 'no device "7", so the list ends before it'),
        ("CUDA_VISIBLE_DEVICES", "GPU-ffff", '"GPU-ffff"'),
    ],
)
def test_a_setting_that_names_the_wrong_devices_is_a_problem(
    machine: Machine, variable: str, setting: str, text: str
) -> None:
    three(machine)
    (problem,) = machine.probe(**{variable: setting}).problems
    assert text in problem
    assert f'{variable}="{setting}"' in problem


def test_an_index_that_counts_what_rocr_took_away_is_told_so(machine: Machine) -> None:
    three(machine)
    result = machine.probe(ROCR_VISIBLE_DEVICES="1,2", HIP_VISIBLE_DEVICES="1,2")
    assert uuids(result) == [C]
    assert 'no device "2" of the 2 that ROCR_VISIBLE_DEVICES leaves' in result.problems[0]


def unreadable(machine: Machine, file: str) -> None:
    """Reading fails, as the kernel has it fail where a cgroup denies the device."""
    machine.remove(file)
    (machine.root / file).mkdir()


@pytest.mark.parametrize("sign", ["properties", "render device"])
def test_gpus_that_the_container_does_not_have_are_not_counted(machine: Machine, sign: str) -> None:
    three(machine)
    for node in (1, 3):
        if sign == "properties":
            unreadable(machine, f"{NODES}/{node}/properties")
        else:
            machine.remove(f"dev/dri/renderD{128 + node}")
    result = machine.probe(HSA_OVERRIDE_GFX_VERSION_1="9.5.0")  # the runtime's number of what is left
    assert [(device.uuid, device.torch_device, device.arch) for device in result.devices] == [(B, "cuda:0", "gfx950")]
    assert result.problems == ()


def test_a_container_without_the_device_files_is_told_what_it_lacks(machine: Machine) -> None:
    three(machine)
    for node in (1, 2, 3):
        unreadable(machine, f"{NODES}/{node}/properties")
    machine.remove("dev/kfd")
    result = machine.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert "3 AMD GPUs are here" in problem
    assert "--device=/dev/kfd --device=/dev/dri" in problem


def test_without_the_compute_device_file_the_devices_cannot_be_driven(machine: Machine) -> None:
    three(machine)
    machine.remove("dev/kfd")
    result = machine.probe()
    assert uuids(result) == [A, B, C]
    assert [len(device.problems) for device in result.devices] == [1, 1, 1]
    assert "/dev/kfd is missing" in result.devices[0].problems[0]
    assert "--device=/dev/kfd" in result.devices[0].problems[0]


@pytest.mark.parametrize("file", ["dev/kfd", "dev/dri/renderD130"])
def test_a_device_file_that_this_user_may_not_open_stops_the_runtime_for_all(machine: Machine, file: str) -> None:
    three(machine)
    may_open = os.access
    machine.monkeypatch.setattr(
        os, "access", lambda path, mode: path != machine.root / file and may_open(path, mode)
    )  # root may open anything, so that a file mode would not do
    for device in machine.probe().devices:
        (problem,) = device.problems
        assert f"may not open /{file}" in problem
        assert "usermod -a -G render,video" in problem
        assert "--group-add" in problem


def test_a_machine_without_any_amd_gpu_is_silent(machine: Machine) -> None:
    assert machine.probe(HIP_VISIBLE_DEVICES="7") == ProbeResult()  # KFD with a CPU only


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ([], None),
        (["dev/kfd"], None),
        (["dev/dxg"], None),  # WSL, perhaps with an NVIDIA GPU
        (["opt/rocm/lib/libamdhip64.so"], None),
        (["dev/dxg", "dev/kfd", "opt/rocm/lib/libamdhip64.so"], None),
        (["dev/dxg", "opt/rocm/lib/libamdhip64.so"], "WSL"),  # ROCm before 7
        (["dev/dxg", "opt/rocm/lib/librocdxg.so"], "WSL (/dev/dxg and /opt/rocm/lib/librocdxg.so exist)"),
    ],
    ids=str,
)
def test_without_the_kernels_topology_only_wsl_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str], text: str | None
) -> None:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    result = rocm.probe()
    assert result.devices == ()
    assert [text in problem for problem in result.problems if text] == ([True] if text else [])
    assert bool(result.problems) == bool(text)


@pytest.mark.parametrize(
    ("pci_class", "is_told"),
    [
        ("0x120000", True),  # MI300X
        ("0x038000", True),  # MI250
        ("0x030000", False),  # a display: perhaps a server's old ATI chip
        ("0x040300", False),
    ],
)
def test_an_accelerator_without_its_driver_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pci_class: str, is_told: bool
) -> None:
    monkeypatch.setattr(host, "ROOT", tmp_path)
    folder = tmp_path / "sys/bus/pci/devices/0000:05:00.0"
    folder.mkdir(parents=True)
    for name, value in (("vendor", "0x1002"), ("device", "0x74a1"), ("class", pci_class)):
        (folder / name).write_text(f"{value}\n")
    problems = rocm.probe().problems
    assert ["modprobe amdgpu" in problem and "0000:05:00.0" in problem for problem in problems] == [True] * is_told


def test_files_that_are_broken_leave_facts_unknown(machine: Machine) -> None:
    folder = machine.gpu({"gfx_target_version": 90402, "simd_count": 1216, "device_id": 0x74A1})
    machine.write(
        f"{folder}/properties", "simd_count 1216\ngfx_target_version\nunique_id -5\ndrm_render_minor 129\n\0\n"
    )
    machine.write(f"{folder}/mem_banks/0/properties", "heap_type one\n")
    machine.write(f"{folder}/mem_banks/1/properties", "\xff\xfe")
    unreadable(machine, f"{machine.card}/device")
    machine.write("usr/share/libdrm/amdgpu.ids", "744C\n,,\n")
    machine.remove("proc/sys/kernel/osrelease")
    (device,) = machine.probe().devices
    assert (device.name, device.arch, device.uuid) == ("AMD GPU", "unknown", None)
    assert (device.memory_total_bytes, device.memory_free_bytes) == (None, None)
    assert (device.num_cores, device.triton, device.driver_version) == (None, False, None)


def test_the_cards_memory_stands_in_where_the_topology_tells_none(machine: Machine) -> None:
    machine.gpu(RX_7900_XTX, card={"mem_info_vram_total": 24 * GIB, "mem_info_vram_used": 4 * GIB})
    (device,) = machine.probe().devices
    assert (device.memory_total_bytes, device.memory_free_bytes) == (24 * GIB, 20 * GIB)


def test_a_topology_that_is_no_folder_is_no_crash(machine: Machine) -> None:
    three(machine)
    (machine.root / NODES).rename(machine.root / "elsewhere")
    machine.write(NODES)
    assert machine.probe() == ProbeResult()


def test_a_failure_that_was_not_foreseen_is_a_problem_and_not_a_crash(machine: Machine) -> None:
    three(machine)

    def fail(path: object, mode: int) -> bool:
        raise RuntimeError("an unforeseen failure")

    machine.monkeypatch.setattr(os, "access", fail)
    assert machine.probe() == ProbeResult(problems=("the probe of AMD GPUs failed: an unforeseen failure",))


def test_without_torch_it_says_what_to_install(machine: Machine) -> None:
    three(machine)
    machine.monkeypatch.setitem(sys.modules, "torch", None)
    (device, *_) = machine.probe().devices
    (problem,) = device.problems
    assert problem.startswith("torch is not installed; see ")
    assert '"Install PyTorch for ROCm"' in problem
    assert 'pip install "anyattn[rocm]"' in problem
    assert device.runtime_version is None


@pytest.mark.parametrize("assignment", ["hip: Optional[str] = None", "hip = None"])
def test_a_torch_built_without_rocm_is_a_problem_of_the_device(machine: Machine, assignment: str) -> None:
    three(machine)
    machine.torch(f"__version__ = '2.13.0+cu130'\ncuda = '13.0'\n{assignment}\n")
    (device, *_) = machine.probe().devices
    assert device.runtime_version is None
    (problem,) = device.problems
    assert "torch 2.13.0+cu130 was built without ROCm" in problem
    assert "pip uninstall torch" in problem
    assert '"Install PyTorch for ROCm"' in problem


def test_a_torch_whose_version_file_cannot_be_read_is_damaged(machine: Machine) -> None:
    three(machine)
    machine.torch("hip = (")
    (device, *_) = machine.probe().devices
    (problem,) = device.problems
    assert device.runtime_version is None
    assert "the installed torch is damaged" in problem


def test_the_probe_may_be_called_again_and_sees_what_changed(machine: Machine) -> None:
    three(machine)
    assert uuids(machine.probe(HIP_VISIBLE_DEVICES="0")) == [A]
    assert uuids(machine.probe(HIP_VISIBLE_DEVICES="2,1")) == [C, B]


@pytest.mark.rocm
def test_torch_agrees_with_the_probe() -> None:
    devices = rocm.probe().devices
    if not devices or devices[0].problems:
        pytest.skip("no AMD GPU" if not devices else devices[0].problems[0])
    code = (
        "from anyattn.platforms.rocm import probe\n"
        "devices = probe().devices\n"
        "import torch\n"
        "assert torch.cuda.device_count() == len(devices)\n"
        "for device in devices:\n"
        "    facts = torch.cuda.get_device_properties(device.index)\n"
        "    assert facts.gcnArchName.split(':')[0] == device.arch\n"
        "    assert facts.total_memory == device.memory_total_bytes\n"
        "    assert torch.ones(2, device=device.torch_device).sum().item() == 2\n"
    )
    root = Path(rocm.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root)})

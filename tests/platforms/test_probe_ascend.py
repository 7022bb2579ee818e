"""The Ascend probe, with the machine faked at its edges: libdcmi.so, /dev, /sys and version files, environment, pip."""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from anyattn.platforms import ascend, host
from anyattn.platforms.base import ProbeResult
from anyattn.types import FP8_DTYPES, GraphLevel

GIB = 1 << 30
NOT_SUPPORTED = -8255
"""DCMI's error code of a function that this product has not."""
INSTALL = 'run `pip install "anyattn[ascend]"`'


@dataclass
class Npu:
    """An NPU as DCMI tells of it; without HBM or DDR where these are None, silent with an error code."""

    card: int
    chip: int = 0
    logic_id: int | None = None
    chip_type: str = "Ascend"
    chip_name: str = "910B3"
    npu_name: str = "910B3"
    cores: int = 20
    hbm: tuple[int, int] | None = (65536, 3072)
    """MiB: size, used."""
    ddr: tuple[int, int] | None = None
    """MiB: size, available."""
    error: int = 0
    logic_error: int = 0


class FakeDcmi:
    """libdcmi.so. It writes bytes as the driver's C structures lie in memory, whatever the probe thinks of them."""

    def __init__(self, *npus: Npu, init: int = 0, missing: tuple[str, ...] = ()) -> None:
        self.npus, self.init, self.missing = npus, init, missing

    def __getattr__(self, name: str) -> Callable[..., int]:
        function = getattr(type(self), name.replace("dcmi_", "_", 1), None)
        if not name.startswith("dcmi_") or name in self.missing or function is None:
            raise AttributeError(f"undefined symbol: {name}")
        return lambda *arguments: function(self, *arguments)

    def find(self, card: int, chip: int) -> Npu:
        return next(npu for npu in self.npus if (npu.card, npu.chip) == (card, chip))

    def _init(self) -> int:
        return self.init

    def _get_driver_version(self, version: Any, length: Any) -> int:
        assert len(version) == length.value == 64
        version.value = b"25.2.0"
        return 0

    def _get_card_list(self, count: Any, cards: Any, length: int) -> int:
        found = sorted({npu.card for npu in self.npus})
        assert len(cards) == length == 64
        count._obj.value = len(found)
        cards[: len(found)] = found
        return 0

    def _get_device_id_in_card(self, card: int, num_chips: Any, mcu_id: Any, cpu_id: Any) -> int:
        num_chips._obj.value = sum(npu.card == card for npu in self.npus)
        mcu_id._obj.value, cpu_id._obj.value = num_chips._obj.value, -1
        return 0

    def _get_device_logic_id(self, logic_id: Any, card: int, chip: int) -> int:
        npu = self.find(card, chip)
        logic_id._obj.value = card if npu.logic_id is None else npu.logic_id
        return npu.logic_error

    def _get_device_chip_info(self, card: int, chip: int, info: Any, more: bytes = b"") -> int:
        npu = self.find(card, chip)
        names = (text.encode() for text in (npu.chip_type, npu.chip_name, "V1"))
        return npu.error or fill(info, struct.pack("@32s32s32sI", *names, npu.cores) + more)

    def _get_device_chip_info_v2(self, card: int, chip: int, info: Any) -> int:
        name = struct.pack("32s", self.find(card, chip).npu_name.encode())
        return self._get_device_chip_info(card, chip, info, name)

    def _get_device_hbm_info(self, card: int, chip: int, info: Any) -> int:
        hbm = self.find(card, chip).hbm
        return NOT_SUPPORTED if hbm is None else fill(info, struct.pack("@QIQiI", hbm[0], 1600, hbm[1], 45, 3))

    def _get_device_memory_info_v3(self, card: int, chip: int, info: Any) -> int:
        ddr = self.find(card, chip).ddr
        return NOT_SUPPORTED if ddr is None else fill(info, struct.pack("@QQILLLI60s", *ddr, 2133, 2048, 0, 0, 5, b""))


class FakeDcmiOf950(FakeDcmi):
    """The library where the NPUs are Ascend 950: the older interface refuses, and NPUs go by their logic ids."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("dcmiv2_"):
            return super().__getattr__(name.replace("dcmiv2_", "dcmi_v2_"))
        return lambda *arguments: NOT_SUPPORTED

    def _v2_init(self) -> int:
        return 0

    def _v2_get_device_list(self, devices: Any, count: Any, length: int) -> int:
        count._obj.value = len(self.npus)
        devices[: len(self.npus)] = [npu.card for npu in self.npus]
        return 0

    def _v2_get_driver_version(self, version: Any, length: Any) -> int:
        return self._get_driver_version(version, length)

    def _v2_get_device_chip_info(self, device: int, info: Any) -> int:
        return self._get_device_chip_info_v2(device, 0, info)

    def _v2_get_device_hbm_info(self, device: int, info: Any) -> int:
        return self._get_device_hbm_info(device, 0, info)


def fill(target: Any, data: bytes) -> int:
    assert ctypes.sizeof(target._obj) >= len(data), "the library would write past the end"
    ctypes.memmove(target, data, len(data))
    return 0


class Machine:
    """A server with eight 910B3, driver, CANN 8.3, torch-npu for the torch that is here, and no variable set."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        monkeypatch.setattr(host, "ROOT", root)
        for variable in ("ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "ASCEND_HOME_PATH"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.delenv("ASCEND_TOOLKIT_HOME", raising=False)
        for package in ("torch", "torch_npu"):
            self.write(f"site/{package}/__init__.py", "raise ImportError('a probe must not import it')")
            monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.syspath_prepend(root / "site")
        self.torch("2.9.0+cpu")
        self.torch_npu("torch==2.9.0+cpu")
        self.write("usr/local/Ascend/driver/version.info", "Version=25.2.0\nascendhal_version=7.35.23\n")
        self.cann("aarch64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=8.3.RC1\n")
        self.write("usr/local/dcmi/libdcmi.so")
        self.nodes(range(8))
        self.pci(*[0xD802] * 8)
        self.loaded: list[str] = []
        self.dcmi(*(Npu(card) for card in range(8)))

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def remove(self, name: str) -> None:
        (self.root / name).rename(self.root / f"removed-{name.replace('/', '-')}")

    def nodes(self, numbers: Any) -> None:
        for file in (self.root / "dev").glob("davinci*"):
            file.unlink()
        for file in ["davinci_manager", *(f"davinci{number}" for number in numbers)]:
            self.write(f"dev/{file}")

    def pci(self, *device_ids: int) -> None:
        self.write("sys/bus/pci/devices/0000:01:00.0/vendor", "0x19e5")  # the maker's network card, on all its servers
        self.write("sys/bus/pci/devices/0000:01:00.0/device", "0x1822")
        self.write("sys/bus/pci/devices/0000:01:00.0/class", "0x020000")
        for number, device_id in enumerate(device_ids):
            folder = f"sys/bus/pci/devices/0000:{0x81 + number:02x}:00.0"
            self.write(f"{folder}/vendor", "0x19e5")
            self.write(f"{folder}/device", hex(device_id))
            self.write(f"{folder}/class", "0x120000")

    def torch(self, version: str) -> None:
        self.write("site/torch/version.py", f"__version__ = '{version}'\n")

    def torch_npu(self, *requirements: str) -> None:
        lines = [
            "Metadata-Version: 2.1",
            "Name: torch-npu",
            "Version: 2.9.0",
            *(f"Requires-Dist: {r}" for r in requirements),
        ]
        self.write("site/torch_npu-2.9.0.dist-info/METADATA", "\n".join(lines) + "\n")

    def cann(self, file: str, text: str, home: str = "usr/local/Ascend/ascend-toolkit/latest") -> None:
        self.write(f"{home}/{file}", text)

    def library(self, library: FakeDcmi | OSError) -> None:
        def load(file: str) -> FakeDcmi:
            self.loaded.append(file)
            if isinstance(library, OSError):
                raise library
            return library

        self.monkeypatch.setattr(ctypes, "CDLL", load)

    def dcmi(self, *npus: Npu) -> None:
        self.library(FakeDcmi(*npus))

    def probe(self, visible: str | None = None) -> ProbeResult:
        if visible is not None:
            self.monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", visible)
        return ascend.probe()


def run(code: str, *arguments: str) -> None:
    root = Path(ascend.__file__).parents[2]
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(root)})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def test_each_of_eight_910b3_is_one_device_with_its_facts(machine: Machine) -> None:
    result = machine.probe()
    assert result.problems == ()
    assert [device.torch_device for device in result.devices] == [f"npu:{number}" for number in range(8)]
    assert machine.loaded == [str(machine.root / "usr/local/dcmi/libdcmi.so")]
    device = result.devices[7]
    assert (device.kind, device.vendor, device.name, device.arch) == ("ascend", "huawei", "Ascend 910B3", "ascend910b")
    assert (device.index, device.num_cores) == (7, 20)
    assert (device.memory_total_bytes, device.memory_free_bytes) == (64 * GIB, 61 * GIB)
    assert (device.driver_version, device.runtime_version) == ("25.2.0", "8.3.RC1")
    assert (device.collective, device.graph, device.triton) == ("hccl", GraphLevel.ALWAYS, True)
    assert (device.status, device.problems) == ("contract-tested", ())


def test_both_dies_of_an_a3_card_are_devices_in_the_order_of_their_logic_ids(machine: Machine) -> None:
    # The order in which DCMI lists the cards need not be that of the logic ids.
    a3 = {"chip_name": "Ascend910", "npu_name": "9392", "cores": 24}
    npus = [Npu(card, die, 2 * (7 - card) + die, hbm=(65536, card), **a3) for card in range(8) for die in range(2)]
    machine.dcmi(*npus)
    result = machine.probe()
    assert result.problems == ()
    assert len(result.devices) == 16
    assert {(device.name, device.arch) for device in result.devices} == {("Ascend 910_9392", "ascend910_93")}
    used = [64 * GIB - (device.memory_free_bytes or 0) for device in result.devices]
    assert used == [card * (1 << 20) for card in range(7, -1, -1) for _ in range(2)]
    assert (result.devices[15].torch_device, result.devices[15].num_cores) == ("npu:15", 24)
    assert (result.devices[0].graph, result.devices[0].triton) == (GraphLevel.NEVER, True)
    assert result.devices[0].missing_dtypes == FP8_DTYPES


def test_a_310p_has_ddr_memory_and_neither_graphs_nor_triton_nor_bfloat16_nor_fp8(machine: Machine) -> None:
    machine.dcmi(Npu(3, 0, 0, chip_name="310P3", npu_name="310P3", cores=8, hbm=None, ddr=(44280, 41216)))
    (device,) = machine.probe().devices
    assert (device.name, device.arch, device.num_cores) == ("Ascend 310P3", "ascend310p", 8)
    assert (device.memory_total_bytes, device.memory_free_bytes) == (44280 << 20, 41216 << 20)
    assert (device.graph, device.triton) == (GraphLevel.NEVER, False)
    assert device.missing_dtypes == FP8_DTYPES | {"bfloat16"}


def test_an_ascend_950_answers_through_the_second_interface(machine: Machine) -> None:
    machine.library(FakeDcmiOf950(*(Npu(number, chip_name="Ascend950PR", npu_name="9579") for number in (1, 0))))
    result = machine.probe()
    assert result.problems == ()
    assert [device.arch for device in result.devices] == ["ascend950", "ascend950"]
    device = result.devices[0]
    assert (device.name, device.driver_version, device.memory_total_bytes) == ("Ascend 950PR_9579", "25.2.0", 64 * GIB)
    assert (device.graph, device.triton, device.missing_dtypes) == (GraphLevel.NEVER, False, frozenset())


@pytest.mark.parametrize(
    ("chip_type", "chip_name", "npu_name", "name", "arch"),
    [
        ("Ascend", "910B4-1", "910B4-1", "Ascend 910B4-1", "ascend910b"),
        ("Alan", "A2G3", "", "Alan A2G3", "ascend910b"),
        ("Ascend", "910A", "", "Ascend 910A", "ascend910"),
        ("Ascend", "910ProB", "", "Ascend 910ProB", "ascend910"),
        ("Ascend", "910B", "", "Ascend 910B", "ascend910"),
        ("Ascend", "Ascend910", "", "Ascend 910", "ascend910_93"),
        ("Ascend", "310P1", "310P1", "Ascend 310P1", "ascend310p"),
        ("Ascend", "310B1", "", "Ascend 310B1", "ascend310b"),
        ("Ascend", "310", "", "Ascend 310", "ascend310"),
        ("", "710", "", "Ascend 710", "unknown"),
        ("", "", "", "Ascend", "unknown"),
    ],
)
def test_name_and_architecture_follow_from_the_chips_name(
    machine: Machine, chip_type: str, chip_name: str, npu_name: str, name: str, arch: str
) -> None:
    machine.dcmi(Npu(0, chip_type=chip_type, chip_name=chip_name, npu_name=npu_name))
    (device,) = machine.probe().devices
    assert (device.name, device.arch) == (name, arch)


def test_facts_that_an_npu_does_not_tell_are_unknown(machine: Machine) -> None:
    machine.dcmi(Npu(0, chip_name="310B4", npu_name="", cores=0, hbm=None))
    (device,) = machine.probe().devices
    assert (device.num_cores, device.memory_total_bytes, device.memory_free_bytes) == (None, None, None)


def test_a_driver_from_before_the_second_chip_info_and_the_driver_version_will_do(machine: Machine) -> None:
    missing = ("dcmi_get_device_chip_info_v2", "dcmi_get_driver_version", "dcmi_get_device_memory_info_v3")
    machine.library(FakeDcmi(Npu(0), missing=missing))
    machine.write("usr/local/Ascend/driver/version.info", "Version=21.0.2\n")
    (device,) = machine.probe().devices
    assert (device.name, device.num_cores, device.driver_version) == ("Ascend 910B3", 20, "21.0.2")


def test_an_npu_that_does_not_answer_is_a_problem_and_the_others_keep_their_numbers(machine: Machine) -> None:
    machine.dcmi(Npu(0), Npu(1, error=-8012), Npu(2))
    result = machine.probe()
    assert [device.torch_device for device in result.devices] == ["npu:0", "npu:2"]
    (problem,) = result.problems
    assert "npu:1" in problem
    assert "dcmi_get_device_chip_info returned -8012" in problem


def test_a_card_that_cannot_be_reached_is_a_problem_and_the_others_are_found(machine: Machine) -> None:
    machine.dcmi(Npu(0), Npu(1, logic_error=-8008), Npu(2))
    result = machine.probe()
    assert [device.torch_device for device in result.devices] == ["npu:0", "npu:1"]
    (problem,) = result.problems
    assert "card 1" in problem
    assert "dcmi_get_device_logic_id returned -8008" in problem


def test_a_container_with_two_of_eight_npus_numbers_them_from_zero(machine: Machine) -> None:
    machine.nodes([4, 6])
    machine.dcmi(Npu(4, logic_id=0), Npu(6, logic_id=1))
    machine.monkeypatch.setenv("ASCEND_VISIBLE_DEVICES", "4,6")  # what the container runtime was told; not CANN's
    result = machine.probe()
    assert result.problems == ()
    assert [device.torch_device for device in result.devices] == ["npu:0", "npu:1"]
    assert [device.torch_device for device in machine.probe("1").devices] == ["npu:0"]


def test_a_container_without_the_management_library_counts_its_device_nodes(machine: Machine) -> None:
    machine.remove("usr/local/dcmi/libdcmi.so")
    machine.library(OSError("libdcmi.so: cannot open shared object file: No such file or directory"))
    machine.nodes([4, 6])
    result = machine.probe()
    assert machine.loaded == ["libdcmi.so"]
    assert [(device.torch_device, device.name) for device in result.devices] == [
        ("npu:0", "Ascend 910B"),
        ("npu:1", "Ascend 910B"),
    ]
    device = result.devices[0]
    assert (device.arch, device.graph, device.triton) == ("ascend910b", GraphLevel.ALWAYS, True)
    assert (device.memory_total_bytes, device.memory_free_bytes, device.num_cores) == (None, None, None)
    assert (device.driver_version, device.runtime_version, device.problems) == ("25.2.0", "8.3.RC1", ())
    (problem,) = result.problems
    assert "No such file or directory" in problem
    assert "/usr/local/dcmi" in problem


def test_without_the_management_library_visible_devices_hold_as_well(machine: Machine) -> None:
    machine.library(OSError("no"))
    assert [device.torch_device for device in machine.probe("2,5,6").devices] == ["npu:0", "npu:1", "npu:2"]


@pytest.mark.parametrize(
    ("library", "text"),
    [
        pytest.param(
            OSError("libascend_hal.so: cannot open shared object file"), "libascend_hal.so", id="half mounted"
        ),
        pytest.param(PermissionError(13, "Permission denied"), "Permission denied", id="not readable"),
        pytest.param(OSError("libdcmi.so: invalid ELF header"), "invalid ELF header", id="broken"),
        pytest.param(FakeDcmi(init=-8005), "dcmi_init returned -8005", id="does not start"),
        pytest.param(FakeDcmi(missing=("dcmi_init",)), "dcmi_init is not in this driver", id="another library"),
        pytest.param(FakeDcmi(missing=("dcmi_get_card_list",)), "dcmi_get_card_list", id="too old"),
    ],
)
def test_a_management_library_that_does_not_work_is_a_problem_and_the_nodes_are_counted(
    machine: Machine, library: FakeDcmi | OSError, text: str
) -> None:
    machine.library(library)
    result = machine.probe()
    assert len(result.devices) == 8
    (problem,) = result.problems
    assert text in problem
    assert "npu-smi info" in problem


@pytest.mark.parametrize(
    ("device_ids", "name", "arch"),
    [
        ([0xD803] * 16, "Ascend 910_93", "ascend910_93"),
        ([0xD500], "Ascend 310P", "ascend310p"),
        ([0xD100] * 4, "Ascend 310", "ascend310"),
        ([0xD801], "Ascend 910", "ascend910"),
        ([0xD806], "Ascend 950", "ascend950"),
        ([0xD802, 0xD500], "Ascend NPU", "unknown"),  # which of the two the node is, nobody tells
        ([0xDEAD], "Ascend NPU", "unknown"),
        ([], "Ascend NPU", "unknown"),  # a virtual machine need not show the bus
    ],
    ids=str,
)
def test_without_the_management_library_the_pci_bus_tells_the_architecture(
    machine: Machine, device_ids: list[int], name: str, arch: str
) -> None:
    machine.remove("sys")
    machine.pci(*device_ids)
    machine.nodes([0])
    machine.library(OSError("no"))
    (device,) = machine.probe().devices
    assert (device.name, device.arch) == (name, arch)


def test_the_drivers_own_folder_is_tried_where_dcmis_is_not_there(machine: Machine) -> None:
    machine.remove("usr/local/dcmi/libdcmi.so")
    machine.write("usr/local/Ascend/driver/lib64/driver/libdcmi.so")
    assert len(machine.probe().devices) == 8
    assert machine.loaded == [str(machine.root / "usr/local/Ascend/driver/lib64/driver/libdcmi.so")]


def test_a_machine_without_an_ascend_npu_is_silent_and_loads_nothing(machine: Machine) -> None:
    machine.remove("dev")
    machine.remove("sys")
    machine.pci()  # only the network card
    assert machine.probe("0,0") == ProbeResult()
    assert machine.loaded == []


def test_a_card_on_the_bus_without_a_driver_is_a_problem(machine: Machine) -> None:
    machine.remove("dev")
    result = machine.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert "0000:81:00.0" in problem
    assert "install the driver" in problem


def test_a_container_that_was_given_no_npu_is_told_how(machine: Machine) -> None:
    machine.nodes([])
    result = machine.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert "/dev/davinci_manager exists" in problem
    assert "--device /dev/davinci0" in problem
    assert machine.loaded == []


def test_a_driver_that_shows_no_npu_is_a_problem(machine: Machine) -> None:
    machine.dcmi()
    result = machine.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert "npu-smi info" in problem


# CANN "Environment Variable Reference" and the runtime's own unit tests, for every rule named here.
@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param("1", [1], id="an index chooses one"),
        pytest.param("0,2", [0, 2], id="several indices in ascending order"),
        pytest.param("", [], id="empty hides all"),
        pytest.param(" ", [], id="blank hides all"),
        pytest.param("-1", [], id="minus one hides all"),
        pytest.param("2,0", [], id="an order that descends voids the list"),
        pytest.param("1,1", [], id="a repeat voids the list"),
        pytest.param("0,1,0", [], id="a repeat later on voids the list"),
        pytest.param("0,1,1", [], id="a repeat at the end voids the list"),
        pytest.param("3", [], id="an index out of range is none"),
        pytest.param("0,1,5,2", [0, 1], id="an index out of range ends the list"),
        pytest.param("0,5,5", [0], id="a repeat after the end is not seen"),
        pytest.param("99999999999", [], id="an index of any length may be out of range"),
        pytest.param("0,1,2,0", [0, 1, 2], id="no more entries are read than there are devices"),
        pytest.param("1,", [1], id="a comma at the end does not matter"),
        pytest.param("0,,1", [0], id="an empty entry ends the list"),
        pytest.param(",0", [], id="an empty entry at the beginning is none"),
        pytest.param("0, 1", [0], id="a space ends the list"),
        pytest.param(" 1", [], id="a space at the beginning is none"),
        pytest.param("0,1 ,2", [0, 1], id="the index before a space counts"),
        pytest.param("1*", [1], id="the index before any other sign counts"),
        pytest.param("0,1$0,", [0, 1], id="what follows another sign is not read"),
        pytest.param("0,x,1", [0], id="a word ends the list"),
        pytest.param("-1,1", [], id="what follows minus one is hidden"),
        pytest.param("0,-1,1", [0], id="minus one ends the list"),
        pytest.param("01", [1], id="leading zeros do not matter"),
        pytest.param("0" * 126 + "1,2", [1], id="only 128 characters are read"),
    ],
)
def test_visible_devices_follows_the_rules_of_cann(machine: Machine, setting: str, expected: list[int]) -> None:
    machine.dcmi(*(Npu(number, chip_name=f"910B{number + 1}") for number in range(3)))
    result = machine.probe(setting)
    assert [device.name for device in result.devices] == [f"Ascend 910B{number + 1}" for number in expected]
    assert [device.torch_device for device in result.devices] == [f"npu:{i}" for i in range(len(expected))]


@pytest.mark.parametrize("setting", ["", " ", "-1", "1,", "0,1", "7", "0,1,2,3,4,5,6,7"])
def test_a_setting_that_hides_devices_on_purpose_is_no_problem(machine: Machine, setting: str) -> None:
    assert machine.probe(setting).problems == ()


@pytest.mark.parametrize(
    ("setting", "text"),
    [("0,8", "no device 8"), ("1,0", "ascending"), ("3,3", "twice"), ("0, 1", "without spaces"), ("npu:0", '"npu:0"')],
)
def test_a_setting_that_names_the_wrong_devices_is_a_problem(machine: Machine, setting: str, text: str) -> None:
    (problem,) = machine.probe(setting).problems
    assert text in problem
    assert f'ASCEND_RT_VISIBLE_DEVICES="{setting}"' in problem


@pytest.mark.parametrize(
    ("file", "text", "version"),
    [
        ("x86_64-linux/ascend_toolkit_install.info", "version=8.1.RC1\narch=x86_64\n", "8.1.RC1"),
        ("ascend_toolkit_install.info", "package_name=x\nversion=8.0.0\n", "8.0.0"),
        ("version.cfg", "# v\nruntime_running_version=[1:9]\ntoolkit_running_version=[7.6.0.1.220:8.0.0]\n", "8.0.0"),
        ("opp/version.info", "Version=7.7.0.1.238\nversion_dir=8.2.RC1\n", "8.2.RC1"),
        ("compiler/version.info", "Version=7.7.0.1.238\nversion_dir=8.2.RC1\n", "8.2.RC1"),
        ("share/info/runtime/version.info", "Version=9.1.0\n", "9.1.0"),
        ("set_env.sh", "", None),
    ],
)
def test_canns_version_is_where_each_release_keeps_it(
    machine: Machine, file: str, text: str, version: str | None
) -> None:
    machine.cann(file, text, home="opt/cann")
    machine.monkeypatch.setenv("ASCEND_HOME_PATH", "/opt/cann")
    (device, *_) = machine.probe().devices
    assert (device.runtime_version, device.problems) == (version, ())


def test_canns_home_is_the_environments_before_the_default_one(machine: Machine) -> None:
    machine.cann("ascend_toolkit_install.info", "version=8.2.RC1", home="home/me/Ascend/latest")
    machine.monkeypatch.setenv("ASCEND_HOME_PATH", "/was/removed")
    assert machine.probe().devices[0].runtime_version == "8.3.RC1"
    machine.monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/home/me/Ascend/latest/")
    assert machine.probe().devices[0].runtime_version == "8.2.RC1"


def test_without_cann_it_names_the_vendors_guide(machine: Machine) -> None:
    machine.remove("usr/local/Ascend/ascend-toolkit")
    (device, *_) = machine.probe().devices
    assert device.runtime_version is None
    (problem,) = device.problems
    assert '"CANN Software Installation Guide"' in problem
    assert "set_env.sh" in problem
    machine.cann("share/info/runtime/version.info", "Version=9.1.0", home="usr/local/Ascend/cann")
    assert machine.probe().devices[0].problems == ()


def test_a_driver_that_was_installed_elsewhere_tells_its_version(machine: Machine) -> None:
    machine.write("etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/usr/local/npu\n")
    machine.write("usr/local/npu/driver/version.info", "Version=24.1.rc3\n")
    machine.library(OSError("no"))
    assert machine.probe().devices[0].driver_version == "24.1.rc3"


def test_without_torch_it_says_what_to_install(machine: Machine) -> None:
    machine.monkeypatch.setitem(sys.modules, "torch", None)
    assert machine.probe().devices[0].problems == (f"torch is not installed; {INSTALL}",)


def test_without_torch_npu_it_says_what_to_install(machine: Machine) -> None:
    machine.remove("site/torch_npu-2.9.0.dist-info")
    assert machine.probe().devices[0].problems == (f"torch-npu is not installed; {INSTALL}",)


def test_everything_that_is_missing_is_told_at_once(machine: Machine) -> None:
    machine.remove("site/torch_npu-2.9.0.dist-info")
    machine.remove("usr/local/Ascend/ascend-toolkit")
    torch_npu, cann = machine.probe().devices[0].problems
    assert "torch-npu" in torch_npu
    assert "CANN" in cann


@pytest.mark.parametrize(
    ("requirements", "torch", "is_mismatch"),
    [
        pytest.param(["torch==2.9.0"], "2.9.0", False, id="the same"),
        pytest.param(["torch==2.9.0"], "2.9.0+cpu", False, id="a build that has a label"),
        pytest.param(["torch==2.9.0+cpu"], "2.9.0", False, id="a build for Arm, without the label"),
        pytest.param(["torch==2.9.0+cpu"], "2.9.0a0+git0fabc3b", False, id="torch's own source of that version"),
        pytest.param(["torch==2.9.0+cpu"], "2.10.0+cpu", True, id="a newer torch"),
        pytest.param(["torch==2.9.0"], "2.8.0", True, id="an older torch"),
        pytest.param(["pyyaml", "torch (==2.9.0)"], "2.10.0", True, id="an older way of writing it"),
        pytest.param(["torch==2.8.0; python_version < '3'", "torch==2.9.0"], "2.9.0", False, id="markers hold"),
        pytest.param(["pyyaml", "numpy==1.0"], "2.9.0", False, id="no pin"),
        pytest.param([], "2.9.0", False, id="no requirements"),
        pytest.param(["torch==2.9.0"], "", False, id="a torch that does not tell its version"),
        pytest.param(["torch === ,"], "2.9.0", False, id="metadata that cannot be read"),
    ],
)
def test_a_torch_other_than_torch_npu_was_made_for_is_a_problem(
    machine: Machine, requirements: list[str], torch: str, is_mismatch: bool
) -> None:
    machine.torch(torch)
    machine.torch_npu(*requirements)
    problems = machine.probe().devices[0].problems
    assert len(problems) == is_mismatch
    for problem in problems:
        assert "torch-npu 2.9.0 is made for torch==2.9.0" in problem
        assert f"torch {torch} is installed" in problem
        assert 'run `pip install "torch==2.9.0' in problem
        assert ('"Start Locally"' in problem) == ("+cpu" in str(requirements))


def test_the_probe_imports_nothing_of_the_vendors_and_survives_a_real_broken_library(machine: Machine) -> None:
    machine.write("usr/local/dcmi/libdcmi.so", "not a library")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from anyattn.platforms import ascend, host\n"
        "host.ROOT = Path(sys.argv[1])\n"
        "result = ascend.probe()\n"
        "assert len(result.devices) == 8, result\n"
        "assert 'libdcmi.so' in result.problems[0], result\n"
        "assert not {'torch', 'torch_npu', 'acl', 'numpy'} & set(sys.modules)\n"
    )
    run(code, str(machine.root))


def test_the_probe_may_be_called_again_and_sees_what_changed(machine: Machine) -> None:
    assert len(machine.probe("0").devices) == 1
    assert len(machine.probe("0,1").devices) == 2


@pytest.mark.npu
def test_the_probe_agrees_with_torch_npu() -> None:
    devices = ascend.probe().devices
    if not devices or devices[0].problems:
        pytest.skip("no Ascend NPU" if not devices else devices[0].problems[0])
    code = (
        "from anyattn.platforms.ascend import probe\n"
        "devices = probe().devices\n"
        "import torch, torch_npu\n"
        "assert torch.npu.device_count() == len(devices)\n"
        "for device in devices:\n"
        "    name = torch.npu.get_device_name(device.index)\n"
        "    assert name.lower().startswith(device.arch), (name, device)\n"
    )
    run(code)

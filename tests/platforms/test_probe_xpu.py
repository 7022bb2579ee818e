"""The probe of Intel GPUs, with the machine faked at its edges: sysfs, /dev/dri, the environment, torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from anyattn.platforms import host, xpu
from anyattn.platforms.base import ProbeResult
from anyattn.types import GraphLevel

GIB = 1 << 30
MAX_1550, MAX_1100, A770, B580, FLEX_170 = 0x0BD5, 0x0BDA, 0x56A0, 0xE20B, 0x56C0
UHD_770, LUNAR_LAKE, METEOR_LAKE_U = 0x4680, 0x64A0, 0x7D45
INTEGRATED = "0000:00:02.0"
VARIABLES = ("ZE_AFFINITY_MASK", "ZE_FLAT_DEVICE_HIERARCHY", "ZE_ENABLE_PCI_ID_DEVICE_ORDER", "ONEAPI_DEVICE_SELECTOR")


class Machine:
    """A machine without Intel GPUs, torch for XPU, and no variable set."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.monkeypatch, self.num_nodes = root, monkeypatch, 0
        monkeypatch.setattr(host, "ROOT", root)
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        self.write("site/torch/__init__.py", "raise ImportError('a probe must not import torch')")
        self.torch("__version__ = '2.13.0+xpu'\ncuda = None\nhip = None\nxpu = '20250301'\n")
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        monkeypatch.syspath_prepend(root / "site")

    def write(self, name: str, text: str = "") -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def torch(self, version_py: str) -> None:
        self.write("site/torch/version.py", version_py)

    def gpu(
        self,
        device_id: int,
        address: str | None = None,
        *,
        driver: str | None = "xe",
        tiles: int = 1,
        class_id: int = 0x030000,
        tile_bytes: int | None = None,
        has_node: bool = True,
    ) -> str:
        """Adds a GPU, by default on the next bus; its render node."""
        number = self.num_nodes
        self.num_nodes += 1
        folder = f"sys/bus/pci/devices/{address or f'0000:{number + 0x18:02x}:00.0'}"
        for name, value in (("vendor", 0x8086), ("device", device_id), ("class", class_id)):
            self.write(f"{folder}/{name}", f"{value:#x}")
        node = f"dev/dri/renderD{128 + number}"
        if driver is None:
            return node
        (self.root / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        if driver == "vfio-pci":
            return node
        card = f"{folder}/drm/card{number}"
        self.write(f"{card}/dev")
        self.write(f"{folder}/drm/renderD{128 + number}/dev")
        for tile in range(tiles):
            self.write(f"{folder}/tile{tile}/gt{tile}/id" if driver == "xe" else f"{card}/gt/gt{tile}/id", "0")
            if tile_bytes is not None and driver == "xe":
                self.write(f"{folder}/tile{tile}/physical_vram_size_bytes", str(tile_bytes))
        if tile_bytes is not None and driver == "i915":
            self.write(f"{card}/lmem_total_bytes", str(tile_bytes))
        if has_node:
            self.write(node)
        return node

    def probe(
        self,
        *,
        mask: str | None = None,
        hierarchy: str | None = None,
        by_bus: str | None = None,
        selector: str | None = None,
    ) -> ProbeResult:
        for variable, value in zip(VARIABLES, (mask, hierarchy, by_bus, selector), strict=True):
            if value is not None:
                self.monkeypatch.setenv(variable, value)
        return xpu.probe()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def names(result: ProbeResult) -> list[str]:
    return [device.name.removeprefix("Intel ") for device in result.devices]


def sizes(result: ProbeResult) -> list[int]:
    """Memory of the devices in GiB, by which tests tell them apart."""
    return [(device.memory_total_bytes or 0) // GIB for device in result.devices]


def test_a_gpu_is_one_device_with_what_sysfs_and_its_id_tell(machine: Machine) -> None:
    machine.gpu(A770, driver="i915", tile_bytes=16 * GIB)
    machine.write("sys/module/i915/version", "1.25.2.24.250113.19\n")
    result = machine.probe()
    (device,) = result.devices
    assert result.problems == ()
    assert (device.kind, device.vendor, device.name, device.arch) == ("xpu", "intel", "Intel Arc A770", "acm_g10")
    assert (device.torch_device, device.index, device.num_cores) == ("xpu:0", 0, 32)
    assert device.memory_total_bytes == 16 * GIB
    assert (device.driver_version, device.runtime_version) == ("1.25.2.24.250113.19", "20250301")
    assert (device.collective, device.graph, device.triton) == ("xccl", GraphLevel.NEVER, True)
    assert (device.status, device.problems) == ("contract-tested", ())


def test_graphs_are_there_where_the_installed_torch_has_them(machine: Machine) -> None:
    machine.gpu(B580)
    machine.write("site/torch/xpu/graphs.py", "class XPUGraph: ...")
    (device,) = machine.probe().devices
    assert device.graph == GraphLevel.ALWAYS


def test_what_linuxs_own_drivers_do_not_tell_is_unknown(machine: Machine) -> None:
    machine.gpu(B580)
    machine.gpu(A770, driver="i915")
    for device in machine.probe().devices:
        assert (device.memory_total_bytes, device.memory_free_bytes, device.driver_version) == (None, None, None)
        assert (device.uuid, device.compute_capability) == (None, None)


@pytest.mark.parametrize(
    ("device_id", "arch", "name", "num_cores"),
    [
        (MAX_1550, "pvc", "Data Center GPU Max 1550", 128),
        (MAX_1100, "pvc", "Data Center GPU Max 1100", 56),
        (0x0BD4, "pvc_vg", "Data Center GPU Max 1550VG", None),
        (0x56A1, "acm_g10", "Arc A750", 28),
        (FLEX_170, "acm_g10", "Data Center GPU Flex 170", 32),
        (0x56C1, "acm_g11", "Data Center GPU Flex 140", 8),
        (0x56A5, "acm_g11", "Arc A380", 8),
        (0x56B3, "acm_g12", "Arc Pro A60", None),
        (B580, "bmg_g21", "Arc B580", 20),
        (0xE20C, "bmg_g21", "Arc B570", 18),
        (0xE211, "bmg_g21", "Arc Pro B60", None),
        (0xE223, "bmg_g31", "Graphics", None),
        (0x7D55, "mtl_h", "Arc Graphics", None),
        (0x7D51, "arl_h", "Arc Graphics", None),
        (LUNAR_LAKE, "lnl_m", "Arc Graphics", None),
        (0xB080, "ptl", "Graphics", None),
    ],
)
def test_the_architecture_is_that_of_the_pci_id(
    machine: Machine, device_id: int, arch: str, name: str, num_cores: int | None
) -> None:
    machine.gpu(device_id)
    (device,) = machine.probe().devices
    assert (device.arch, device.name, device.num_cores) == (arch, f"Intel {name}", num_cores)


def test_a_data_center_gpu_without_a_display_is_found_too(machine: Machine) -> None:
    machine.gpu(FLEX_170, class_id=0x038000)
    assert len(machine.probe().devices) == 1


@pytest.mark.parametrize("device_id", [UHD_770, METEOR_LAKE_U], ids=["UHD 770", "Meteor Lake-U"])
@pytest.mark.parametrize("driver", ["i915", None])
@pytest.mark.parametrize("settings", [{}, {"mask": "7", "selector": "nonsense"}], ids=["unset", "set wrongly"])
def test_a_laptop_whose_graphics_torch_does_not_drive_hears_nothing(
    machine: Machine, device_id: int, driver: str | None, settings: dict[str, str]
) -> None:
    machine.gpu(device_id, INTEGRATED, driver=driver)
    machine.torch("__version__ = '2.13.0'\nxpu = None\n")
    assert machine.probe(**settings) == ProbeResult()


def test_other_devices_of_intel_are_none_of_ours(machine: Machine) -> None:
    machine.gpu(0x1572, class_id=0x020000, driver="i40e")  # a network card
    machine.gpu(B580, class_id=0x040300, driver="snd_hda_intel")
    assert machine.probe() == ProbeResult()


def test_a_machine_without_sysfs_gives_nothing(machine: Machine) -> None:
    assert machine.probe() == ProbeResult()


def test_a_gpu_without_a_kernel_driver_is_a_problem(machine: Machine) -> None:
    machine.gpu(B580, driver=None)
    result = machine.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert "Intel Arc B580 (PCI 0000:18:00.0) is here" in problem
    assert "xe and i915 do not drive it" in problem
    assert "dmesg" in problem


def test_a_gpu_that_was_given_to_a_virtual_machine_is_not_ours_and_no_problem(machine: Machine) -> None:
    machine.gpu(B580, driver="vfio-pci")
    assert machine.probe() == ProbeResult()


def test_a_render_node_that_may_not_be_opened_names_the_group(machine: Machine) -> None:
    node = machine.gpu(B580)
    machine.gpu(A770)
    access = os.access
    machine.monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith(node) and access(path, mode))
    result = machine.probe()
    assert names(result) == ["Arc A770"]
    assert result.devices[0].torch_device == "xpu:0"
    (problem,) = result.problems
    assert f"/{node} (Intel Arc B580, PCI 0000:18:00.0) may not be opened" in problem
    assert "usermod -aG render" in problem


def test_nobody_hears_of_the_rights_to_graphics_that_torch_does_not_drive(machine: Machine) -> None:
    machine.gpu(UHD_770, INTEGRATED, driver="i915")
    machine.monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine.probe() == ProbeResult()


def test_a_container_without_the_nodes_is_told_how_to_get_them(machine: Machine) -> None:
    node = machine.gpu(MAX_1550, has_node=False)
    machine.gpu(MAX_1550, has_node=False)
    result = machine.probe()
    assert result.devices == ()
    (problem,) = result.problems
    assert f"not its /{node}" in problem
    assert "--device /dev/dri" in problem


def test_a_container_with_some_of_the_nodes_has_these_and_no_problem(machine: Machine) -> None:
    machine.gpu(MAX_1100, has_node=False)
    machine.gpu(B580)
    result = machine.probe()
    assert (names(result), result.problems) == (["Arc B580"], ())
    assert result.devices[0].torch_device == "xpu:0"


def test_a_card_newer_than_the_table_keeps_its_number_and_is_a_problem(machine: Machine) -> None:
    machine.gpu(0xFFFF)
    machine.gpu(B580)
    result = machine.probe()
    assert [device.torch_device for device in result.devices] == ["xpu:1"]
    assert result.devices[0].index == 1
    (problem,) = result.problems
    assert "xpu:0 (Intel GPU 0xffff, PCI 0000:18:00.0) is not known" in problem


def test_cards_come_by_their_address_and_before_the_graphics_of_the_cpu(machine: Machine) -> None:
    machine.gpu(B580, "0000:65:00.0")
    machine.gpu(A770, "0000:18:00.0", driver="i915")
    machine.gpu(UHD_770, INTEGRATED, driver="i915")
    assert names(machine.probe()) == ["Arc A770", "Arc B580"]
    assert names(machine.probe(mask="0")) == ["Arc A770"]


def test_the_pci_order_counts_the_graphics_of_the_cpu_first(machine: Machine) -> None:
    machine.gpu(UHD_770, INTEGRATED, driver="i915")
    machine.gpu(B580)
    assert names(machine.probe(mask="1", by_bus="1")) == ["Arc B580"]
    assert names(machine.probe(mask="0", by_bus="1")) == []


def test_torch_takes_the_graphics_of_the_cpu_only_where_no_card_is_visible(machine: Machine) -> None:
    machine.gpu(LUNAR_LAKE, INTEGRATED)
    assert names(machine.probe()) == ["Arc Graphics"]
    machine.gpu(B580)
    assert names(machine.probe()) == ["Arc B580"]
    assert names(machine.probe(mask="1")) == ["Arc Graphics"]


@pytest.mark.parametrize("driver", ["xe", "i915"])
@pytest.mark.parametrize("hierarchy", [None, "FLAT", "COMBINED"])
def test_each_tile_of_a_max_card_is_a_device(machine: Machine, driver: str, hierarchy: str | None) -> None:
    machine.gpu(MAX_1550, driver=driver, tiles=2, tile_bytes=64 * GIB)
    result = machine.probe(hierarchy=hierarchy)
    assert [device.torch_device for device in result.devices] == ["xpu:0", "xpu:1"]
    assert [(device.num_cores, device.memory_total_bytes) for device in result.devices] == [(64, 64 * GIB)] * 2


@pytest.mark.parametrize("driver", ["xe", "i915"])
def test_a_composite_hierarchy_makes_one_device_of_the_tiles(machine: Machine, driver: str) -> None:
    machine.gpu(MAX_1550, driver=driver, tiles=2, tile_bytes=64 * GIB)
    (device,) = machine.probe(hierarchy="COMPOSITE").devices
    assert (device.num_cores, device.memory_total_bytes) == (128, 128 * GIB)


def test_a_hierarchy_that_is_no_word_of_the_specification_is_not_heeded(machine: Machine) -> None:
    machine.gpu(MAX_1550, tiles=2)
    assert len(machine.probe(hierarchy="composite").devices) == 2


def test_other_cards_have_no_tiles_to_split(machine: Machine) -> None:
    machine.gpu(A770, driver="i915", tiles=2)  # i915 counts a media engine among the "gt" folders too
    assert len(machine.probe(hierarchy="FLAT").devices) == 1


@pytest.fixture
def max_machine(machine: Machine) -> Machine:
    """Two cards of two tiles; a tile's memory tells which it is: 10 and 11 GiB, 20 and 21 GiB."""
    for card in (1, 2):
        machine.gpu(MAX_1550, f"0000:{card}8:00.0", tiles=2)
        for tile in (0, 1):
            size = (10 * card + tile) * GIB
            machine.write(f"sys/bus/pci/devices/0000:{card}8:00.0/tile{tile}/physical_vram_size_bytes", str(size))
    return machine


@pytest.mark.parametrize(
    ("hierarchy", "mask", "expected"),
    [
        pytest.param("FLAT", None, [10, 11, 20, 21], id="unset shows all"),
        pytest.param("FLAT", "", [10, 11, 20, 21], id="empty shows all"),
        pytest.param("FLAT", "default", [10, 11, 20, 21], id="default shows all"),
        pytest.param("FLAT", "0", [10], id="numbers are of tiles where these are the devices"),
        pytest.param("FLAT", "0,3", [10, 21], id="a list shows these"),
        pytest.param("FLAT", "2,1", [11, 20], id="the order of the list is not the order of the devices"),
        pytest.param("FLAT", "1,1", [11], id="a repeat does not matter"),
        pytest.param("FLAT", " 1, 2", [11, 20], id="spaces do not matter"),
        pytest.param("COMBINED", "1,2", [11, 20], id="combined counts like flat"),
        pytest.param("COMPOSITE", "0", [21], id="numbers are of cards where these are the devices"),
        pytest.param("COMPOSITE", "1", [41], id="a card with all its tiles"),
        pytest.param("COMPOSITE", "0.0", [10], id="a tile of a card"),
        pytest.param("COMPOSITE", "0.1,1", [11, 41], id="a tile of one card and all of another"),
        pytest.param("COMPOSITE", "1.1,0.0", [10, 21], id="tiles of two cards"),
        pytest.param("COMPOSITE", "0.0,0.1", [21], id="all tiles of a card are the card"),
        pytest.param("COMPOSITE", "0.1,0", [21], id="a card and its tile are the card"),
        pytest.param("FLAT", "-1", [], id="minus one shows none"),
    ],
)
def test_the_affinity_mask_follows_level_zeros_rules(
    max_machine: Machine, hierarchy: str, mask: str | None, expected: list[int]
) -> None:
    result = max_machine.probe(hierarchy=hierarchy, mask=mask)
    assert sizes(result) == expected
    assert [device.torch_device for device in result.devices] == [f"xpu:{i}" for i in range(len(expected))]
    assert result.problems == ()


@pytest.mark.parametrize(
    ("hierarchy", "mask", "wrong", "expected"),
    [
        ("FLAT", "0,4", "4", [10]),
        ("FLAT", "1.0", "1.0", []),
        ("COMPOSITE", "2,0", "2", [21]),
        ("COMPOSITE", "0.2", "0.2", []),
        ("COMPOSITE", "0.x", "0.x", []),
        ("FLAT", "gpu", "gpu", []),
    ],
)
def test_what_an_affinity_mask_names_and_is_not_there_is_a_problem(
    max_machine: Machine, hierarchy: str, mask: str, wrong: str, expected: list[int]
) -> None:
    result = max_machine.probe(hierarchy=hierarchy, mask=mask)
    assert sizes(result) == expected
    (problem,) = result.problems
    assert f'ZE_AFFINITY_MASK="{mask}": no device "{wrong}" ({hierarchy} device hierarchy)' in problem


def test_a_card_with_one_of_its_tiles_has_half_of_its_cores(max_machine: Machine) -> None:
    assert [device.num_cores for device in max_machine.probe(hierarchy="COMPOSITE", mask="0.1,1").devices] == [64, 128]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        pytest.param("", [10, 11, 20, 21], id="empty shows all"),
        pytest.param("level_zero:gpu", [10, 11, 20, 21], id="all GPUs"),
        pytest.param("level_zero:*", [10, 11, 20, 21], id="all devices"),
        pytest.param("*:gpu", [10, 11, 20, 21], id="all GPUs of any backend"),
        pytest.param("LEVEL_ZERO:GPU", [10, 11, 20, 21], id="capitals do not matter"),
        pytest.param("level_zero:0", [10], id="a number"),
        pytest.param("level_zero:2,1", [11, 20], id="the order of the list is not the order of the devices"),
        pytest.param("level_zero:1,gpu", [10, 11, 20, 21], id="named twice is shown once"),
        pytest.param("opencl:gpu;level_zero:3", [21], id="several backends"),
        pytest.param("level_zero:1;level_zero:2", [11, 20], id="one backend several times"),
        pytest.param("level_zero:*;!level_zero:0", [11, 20, 21], id="all but one"),
        pytest.param("level_zero:0,1;!*:1", [10], id="what is discarded wins"),
        pytest.param("!level_zero:1,2", [10, 21], id="discards alone leave all others"),
        pytest.param("!opencl:*", [10, 11, 20, 21], id="a discard of another backend leaves all"),
        pytest.param("!*:cpu", [10, 11, 20, 21], id="a discard of CPUs leaves all"),
    ],
)
def test_the_device_selector_follows_sycls_rules(max_machine: Machine, selector: str, expected: list[int]) -> None:
    result = max_machine.probe(selector=selector)
    assert (sizes(result), result.problems) == (expected, ())


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        pytest.param("level_zero:*", [21, 41], id="cards"),
        pytest.param("level_zero:0.0", [10], id="a tile"),
        pytest.param("level_zero:0.*", [10, 11], id="all tiles of a card, one by one"),
        pytest.param("level_zero:*.*", [10, 11, 20, 21], id="all tiles of all cards"),
        pytest.param("level_zero:*,*.*", [21, 10, 11, 41, 20, 21], id="each card and then its tiles"),
        pytest.param("level_zero:1,0.1", [11, 41], id="a card and a tile of another"),
        pytest.param("level_zero:*.*;!level_zero:0.1", [10, 20, 21], id="all tiles but one"),
        pytest.param("level_zero:*.*;!level_zero:0", [20, 21], id="a discarded card takes its tiles along"),
    ],
)
def test_the_device_selector_may_take_cards_apart(max_machine: Machine, selector: str, expected: list[int]) -> None:
    result = max_machine.probe(hierarchy="COMPOSITE", selector=selector)
    assert (sizes(result), result.problems) == (expected, ())


@pytest.mark.parametrize("selector", ["opencl:*", "*:cpu", "level_zero:7", "level_zero:0.0", "!level_zero:*"])
def test_a_selector_that_leaves_no_gpu_is_a_problem(max_machine: Machine, selector: str) -> None:
    result = max_machine.probe(selector=selector)  # the tiles are the devices here, and have none of their own
    assert result.devices == ()
    (problem,) = result.problems
    assert f'ONEAPI_DEVICE_SELECTOR="{selector}" leaves no Intel GPU' in problem


@pytest.mark.parametrize(
    ("selector", "reason"),
    [
        ("gpu", "backend:devices"),
        ("level_zero", "backend:devices"),
        ("level_zero:", "backend:devices"),
        ("ze:gpu", "backend:devices"),
        ("level_zero:gpu:0", "backend:devices"),
        ("level_zero:xpu", '"xpu" is no device'),
        ("level_zero:*.0", '"*.0" is no device'),
        ("level_zero:0.gpu", '"0.gpu" is no device'),
        ("!level_zero:0;level_zero:*", "must come last"),
        ("level_zero:0.0.0", "parts of a tile"),
    ],
)
def test_a_selector_that_cannot_be_read_is_a_problem(max_machine: Machine, selector: str, reason: str) -> None:
    result = max_machine.probe(selector=selector)
    assert result.devices == ()
    (problem,) = result.problems
    assert f'ONEAPI_DEVICE_SELECTOR="{selector}" cannot be read' in problem
    assert reason in problem


def test_the_selectors_numbers_are_those_that_the_mask_left(max_machine: Machine) -> None:
    assert sizes(max_machine.probe(mask="1,3", selector="level_zero:1")) == [21]


def test_a_missing_torch_is_a_problem_of_the_device(machine: Machine) -> None:
    machine.gpu(B580)
    machine.monkeypatch.setattr(sys, "path", [str(machine.root / "nothing")])
    (device,) = machine.probe().devices
    assert device.runtime_version is None
    (problem,) = device.problems
    assert "torch is not installed" in problem
    assert problem.index("Getting Started on Intel GPU") < problem.index('pip install "anyattn[xpu]"')


def test_a_torch_built_without_xpu_is_a_problem_of_the_device(machine: Machine) -> None:
    machine.gpu(B580)
    machine.torch("__version__ = '2.13.0+cu130'\ncuda = '13.0'\nxpu: Optional[str] = None\n")
    (device,) = machine.probe().devices
    assert device.runtime_version is None
    (problem,) = device.problems
    assert "torch 2.13.0+cu130 was built without XPU" in problem
    assert problem.index("Getting Started on Intel GPU") < problem.index('pip install "anyattn[xpu]"')


def test_a_torch_that_does_not_speak_of_xpu_is_given_the_benefit_of_the_doubt(machine: Machine) -> None:
    machine.gpu(B580)
    machine.torch("__version__ = '2.4.0'\n")
    (device,) = machine.probe().devices
    assert (device.runtime_version, device.problems) == (None, ())


def test_a_file_with_nonsense_leaves_the_memory_unknown(machine: Machine) -> None:
    machine.gpu(MAX_1550, tiles=2, tile_bytes=64 * GIB)
    machine.write("sys/bus/pci/devices/0000:18:00.0/tile1/physical_vram_size_bytes", "lots")
    assert machine.probe(hierarchy="COMPOSITE").devices[0].memory_total_bytes is None
    assert sizes(machine.probe(hierarchy="FLAT")) == [64, 0]


def test_the_probe_does_not_raise_whatever_the_machine_does(machine: Machine) -> None:
    machine.gpu(B580)

    def fail(path: object, mode: int) -> bool:
        raise RuntimeError("no such system call")

    machine.monkeypatch.setattr(os, "access", fail)
    assert machine.probe().problems == ("the probe of Intel GPUs failed: no such system call",)


@pytest.mark.xpu
def test_on_hardware_torch_sees_the_devices_that_the_probe_found() -> None:
    import torch

    devices = xpu.probe().devices
    assert [device.index for device in devices] == list(range(torch.xpu.device_count()))
    for device in devices:
        facts = torch.xpu.get_device_properties(device.index)
        assert torch.ones(2, device=device.torch_device).sum().item() == 2
        if device.memory_total_bytes is not None:
            assert facts.total_memory == pytest.approx(device.memory_total_bytes, rel=0.1)


def test_on_wsl_it_says_that_gpus_are_not_read_there(machine: Machine) -> None:
    machine.write("dev/dxg")
    assert machine.probe() == ProbeResult()
    machine.write("usr/lib/x86_64-linux-gnu/libze_intel_gpu.so.1")
    (problem,) = machine.probe().problems
    assert "run without WSL" in problem

"""Huawei Ascend NPUs as CANN numbers them for this process, told by DCMI: no device context, no import of torch-npu."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from anyattn.platforms import host
from anyattn.platforms.ascend_visible import visible_indices
from anyattn.platforms.base import Platform, ProbeResult
from anyattn.platforms.dcmi import Chip, Dcmi, DcmiError, Place
from anyattn.types import FP8_DTYPES, GraphLevel

_VENDOR_ID = 0x19E5
_PCI_ARCHS = {
    0xD100: "ascend310",
    0xD105: "ascend310b",
    0xD500: "ascend310p",
    0xD501: "ascend310p",
    0xD801: "ascend910",
    0xD802: "ascend910b",
    0xD803: "ascend910_93",
    0xD806: "ascend950",
}
"""By PCI device id, as the driver's own table has them (hicann/driver, devdrv)."""
_CHIP_ARCHS = (
    (r"Ascend950", "ascend950"),
    (r"Ascend910", "ascend910_93"),  # the chips before the A3 go without the brand
    (r"910B[0-9]|A2G", "ascend910b"),
    (r"910", "ascend910"),  # also 910B without a digit, a model of the first generation
    (r"310P|I2", "ascend310p"),
    (r"310B", "ascend310b"),
    (r"310", "ascend310"),
)
"""By the beginning of DCMI's chip name, first match first: vllm-ascend (setup.py), torch_npu (SocVersion); A2G and I2
are the same chips under another brand (hicann/driver, DCMI)."""
_GRAPH_ARCHS = frozenset({"ascend910b"})
"""Atlas A2: the only one for which torch_npu documents attention whose lengths change in a graph (2.14.0,
_op_plugin_docs.py, npu_fused_infer_attention_score.out). The documents of its NPUGraph (op-plugin,
graph_task_update_begin) name Atlas A3 too, and CANN's own graph capture may reach further."""
_TRITON_ARCHS = frozenset({"ascend910b", "ascend910_93"})
"""Atlas A2 and A3: the only ones that triton-ascend's quick start names."""

NPU_MISSING_DTYPES = {
    **dict.fromkeys(("ascend310", "ascend310p", "ascend910"), FP8_DTYPES | {"bfloat16"}),
    **dict.fromkeys(("ascend310b", "ascend910b", "ascend910_93"), FP8_DTYPES),
}
"""By architecture: those before the 910B compute no bfloat16 (torch_npu, csrc/core/npu, IsBF16Supported), those before
the 950 are not quantized to fp8 (torch_npu 2.14.0, _op_plugin_docs.py: npu_rotate_quant's dst_dtype, and the dtypes of
fused infer attention)."""

_CANN_HOMES = ("usr/local/Ascend/ascend-toolkit/latest", "usr/local/Ascend/cann")
"""Where CANN goes by default, the second from 8.5 on (Huawei, "CANN Software Installation Guide")."""
_CANN_VERSIONS = (
    *((f"{folder}ascend_toolkit_install.info", r"version=") for folder in ("aarch64-linux/", "x86_64-linux/", "")),
    ("version.cfg", r"toolkit_running_version=\[[^:\]]*:"),
    *((f"{package}/version.info", r"version_dir=") for package in ("opp", "compiler", "share/info/runtime")),
    ("share/info/runtime/version.info", r"Version="),
)
"""Files below CANN's home and what stands before its version there. The first is what torch_npu's collect_env reads;
a version.info of older packages gives under Version the package's own, so version_dir goes first."""


def probe() -> ProbeResult:
    """The Ascend NPUs that CANN shows to this process, in CANN's order. Never raises; trouble is a problem text.

    A machine without a sign of an Ascend NPU gives an empty result without problems, and no library is loaded there.
    """
    try:
        num_nodes = _num_device_nodes()
        return _probe(num_nodes) if num_nodes else _unreachable()
    except Exception as error:
        return ProbeResult(problems=(f"the probe of Ascend NPUs failed: {error}",))


def _num_device_nodes() -> int:
    """How many /dev/davinciN are there. In a container they are what it was given of the host's NPUs."""
    try:
        return sum(re.fullmatch(r"davinci[0-9]+", file.name) is not None for file in (host.ROOT / "dev").iterdir())
    except OSError:
        return 0


def _accelerators() -> list[host.PciDevice]:
    """All of the machine, also in a container: sysfs shows what the host has."""
    return [device for device in host.pci_devices(_VENDOR_ID) if device.class_id >> 16 == 0x12]


def _unreachable() -> ProbeResult:
    if host.exists("dev/davinci_manager"):
        sign = "the Ascend driver is here (/dev/davinci_manager exists)"
    elif accelerators := _accelerators():
        sign = f"an Ascend NPU is on the PCI bus ({accelerators[0].address})"
    else:
        return ProbeResult()
    problem = (
        f"{sign}, but no /dev/davinci0 or the like; install the driver if `npu-smi info` does not run on the host, and "
        "give a container its NPUs (`--device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm "
        "--device /dev/hisi_hdc`, or Ascend Docker Runtime with ASCEND_VISIBLE_DEVICES)"
    )
    return ProbeResult(problems=(problem,))


def _probe(num_nodes: int) -> ProbeResult:
    units, driver_version, problems = _units(num_nodes)
    visible, complaint = visible_indices(len(units), os.environ.get("ASCEND_RT_VISIBLE_DEVICES"))
    problems += complaint
    runtime_version, device_problems = _software()
    devices = []
    for index, number in enumerate(visible):
        try:
            facts = units[number]()
        except DcmiError as error:  # its number stays taken, so that the others keep theirs
            problems.append(f"npu:{index} does not answer and is left out: {error}")
            continue
        devices.append(
            Platform(
                kind="ascend",
                vendor="huawei",
                torch_device=f"npu:{index}",
                index=index,
                driver_version=driver_version,
                runtime_version=runtime_version,
                collective="hccl",
                graph=GraphLevel.ALWAYS if facts["arch"] in _GRAPH_ARCHS else GraphLevel.NEVER,
                triton=facts["arch"] in _TRITON_ARCHS,
                missing_dtypes=NPU_MISSING_DTYPES.get(facts["arch"], frozenset()),
                status="contract-tested",
                torch_remedy=host.TORCH_REMEDIES["ascend"],
                problems=device_problems,
                **facts,
            )
        )
    return ProbeResult(devices=tuple(devices), problems=tuple(problems))


_Unit = Callable[[], dict[str, Any]]
"""Tells what is known of one NPU, as fields of Platform; raises DcmiError."""


def _units(num_nodes: int) -> tuple[list[_Unit], str | None, list[str]]:
    """The NPUs in CANN's order, the driver's version, and what went wrong: by DCMI, else by what Linux shows."""
    try:
        dcmi = Dcmi()
        places, problems = dcmi.places()
    except (OSError, DcmiError) as error:
        problem = (
            f"DCMI, the Ascend driver's management library, does not answer ({error}), so memory, cores and models of "
            "NPUs are unknown; see whether `npu-smi info` runs, and give a container /usr/local/dcmi, "
            "/usr/local/Ascend/driver/lib64 and LD_LIBRARY_PATH="
            "/usr/local/Ascend/driver/lib64/common:/usr/local/Ascend/driver/lib64/driver"
        )
        return [_guessed_facts] * num_nodes, _driver_version(), [problem]
    if not places and not problems:
        problems = ["/dev has Ascend NPUs, but DCMI shows none to this process; see what `npu-smi info` says"]
    units: list[_Unit] = [partial(_told_facts, dcmi, place) for place in places]
    return units, dcmi.driver_version() or _driver_version(), problems


def _told_facts(dcmi: Dcmi, place: Place) -> dict[str, Any]:
    chip = dcmi.chip(place)
    return {
        "name": _name(chip),
        "arch": next((arch for start, arch in _CHIP_ARCHS if re.match(start, chip.chip_name)), "unknown"),
        "memory_total_bytes": chip.memory_total_bytes,
        "memory_free_bytes": chip.memory_free_bytes,
        "num_cores": chip.num_cores,
    }


def _name(chip: Chip) -> str:
    model = chip.chip_name.removeprefix("Ascend")
    if model != chip.chip_name and chip.npu_name:  # an A3's chip name is the same for all models
        model = f"{model}_{chip.npu_name}"
    return f"{chip.chip_type or 'Ascend'} {model}".strip()


def _guessed_facts() -> dict[str, Any]:
    """What the PCI bus says of every NPU, where all of the machine are alike: a node does not tell its address."""
    archs = {_PCI_ARCHS.get(device.device_id, "unknown") for device in _accelerators()}
    arch = archs.pop() if len(archs) == 1 else "unknown"
    name = "NPU" if arch == "unknown" else arch.removeprefix("ascend").upper()
    return {"name": f"Ascend {name}", "arch": arch}


def _driver_version() -> str | None:
    folder = _value("etc/ascend_install.info", r"Driver_Install_Path_Param=") or "/usr/local/Ascend"
    return _value(f"{folder.strip('/')}/driver/version.info", r"Version=")


def _value(file: str, before: str) -> str | None:
    """What follows the pattern `before` at the beginning of one of the file's lines."""
    match = re.search(rf"^{before}([^\s\]]+)", host.read(file) or "", re.MULTILINE)
    return match.group(1) if match else None


def _software() -> tuple[str | None, tuple[str, ...]]:
    """CANN's version, and why what is installed here cannot drive an NPU."""
    named = [os.environ.get(variable, "").strip("/") for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")]
    home = next((folder for folder in (*named, *_CANN_HOMES) if folder and host.exists(folder)), None)
    problems = _torch_problems()
    if home is None:
        problems.append(
            'CANN was not found; install it as Huawei\'s "CANN Software Installation Guide" says, then run '
            "`source /usr/local/Ascend/cann/set_env.sh` (before CANN 8.5: ascend-toolkit/set_env.sh)"
        )
        return None, tuple(problems)
    versions = (_value(f"{home}/{file}", before) for file, before in _CANN_VERSIONS)
    return next((version for version in versions if version), None), tuple(problems)


def _torch_problems() -> list[str]:
    build = host.torch_build()
    if build is None or build.is_damaged:
        return list(host.torch_problems("ascend"))
    try:
        version = importlib.metadata.version("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        return [f"torch-npu is not installed; {host.TORCH_REMEDIES['ascend']}"]
    with contextlib.suppress(ValueError):  # of a torch that does not tell its version nothing is claimed
        installed = Version(build.version).base_version
        for requirement in map(Requirement, importlib.metadata.requires("torch-npu") or ()):
            if requirement.name != "torch" or (requirement.marker and not requirement.marker.evaluate()):
                continue
            wanted = str(requirement.specifier)
            # Compared without the build's label: torch-npu may ask for "+cpu", which builds for Arm need not carry.
            if installed not in SpecifierSet(re.sub(r"\+[\w.]+", "", wanted)):
                where = ' from the index for CPU builds that PyTorch\'s "Start Locally" page gives'
                return [
                    f"torch-npu {version} is made for torch{wanted}, but torch {build.version} is installed; run "
                    f'`pip install "torch{wanted}"`{where if "+cpu" in wanted else ""}'
                ]
    return []

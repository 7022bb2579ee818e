"""Devices of different kinds and architectures in one process: all found at once, and served side by side."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import anyattn
from anyattn import AttentionSpec, NoBackendError, discovery
from anyattn.platforms import host
from anyattn.plugins.manager import PluginManager

VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"),
    *("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR", "MUSA_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "ANYATTN_PLATFORM"),
)


@pytest.fixture
def every_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that nobody has: two NVIDIA GPUs of two generations, an MI300X, an Ascend 910B, a PVC, an MTT S5000."""
    monkeypatch.setattr(host, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed: the driver's files tell
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)

    def write(name: str, text: str = "") -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def pci(address: str, vendor: int, device: int, class_id: int, driver: str | None = None) -> str:
        folder = f"sys/bus/pci/devices/{address}"
        for name, value in (("vendor", vendor), ("device", device), ("class", class_id)):
            write(f"{folder}/{name}", hex(value))
        if driver is not None:
            (tmp_path / folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        return folder

    write("dev/nvidiactl")
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Release Build")
    for bus, model in (("0000:01:00.0", "NVIDIA A100-SXM4-80GB"), ("0000:02:00.0", "NVIDIA H200")):
        write(f"proc/driver/nvidia/gpus/{bus}/information", f"Model: \t {model}\nGPU UUID: \t GPU-{bus[5:7]}\n")
    node = "sys/class/kfd/kfd/topology/nodes/0"
    facts = ("simd_count 1216", "simd_per_cu 4", "gfx_target_version 90402", "location_id 768", "drm_render_minor 128")
    write(f"{node}/properties", "\n".join(facts))
    write(f"{node}/mem_banks/0/properties", f"heap_type 1\nsize_in_bytes {192 << 30}\n")
    write("dev/kfd")
    write("dev/dri/renderD128")
    pci("0000:81:00.0", 0x19E5, 0xD802, 0x120000)
    write("dev/davinci0")
    write("dev/davinci_manager")
    intel = pci("0000:03:00.0", 0x8086, 0x0BDA, 0x038000, "xe")
    write(f"{intel}/drm/renderD129/dev")
    write(f"{intel}/tile0/gt0/id", "0")
    write("dev/dri/renderD129")
    pci("0000:04:00.0", 0x1ED5, 0x0400, 0x030200, "mtgpu")
    write("sys/module/mtgpu/version", "3.1")
    write("proc/cpuinfo", "vendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t: avx2 amx_bf16\n\n")
    return tmp_path


def test_all_kinds_are_found_at_once_accelerators_first_and_each_says_what_torch_lacks(every_accelerator: Path) -> None:
    found = discovery.detect(PluginManager(entry_points=[]))
    archs = [(device.kind, device.arch) for device in found.devices]
    assert archs == [
        ("cuda", "sm80"),
        ("cuda", "sm90"),
        ("rocm", "gfx942"),
        ("ascend", "ascend910b"),
        ("xpu", "pvc"),
        ("musa", "mp_31"),
        ("cpu", anyattn.detect().devices[-1].arch),
    ]
    for device in found.devices[:-1]:  # one torch cannot drive them all, and a CPU build drives none
        assert device.problems


def test_what_would_be_chosen_on_each_can_be_asked_side_by_side() -> None:
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    answers = {name: anyattn.survey(spec, device=f"sim:{name}") for name in ("h100", "a100", "mi300x", "ascend910b")}
    assert {name: answer.device.arch for name, answer in answers.items()} == {
        "h100": "sm90", "a100": "sm80", "mi300x": "gfx942", "ascend910b": "ascend910b"
    }  # fmt: skip
    assert (answers["h100"].selection.prefill, answers["a100"].selection.prefill) == ("fa3", "flashinfer")
    assert "sm80" in answers["a100"].explain()
    again = anyattn.survey(spec, device="sim:h100")
    assert again.explain() == answers["h100"].explain()


def test_runtimes_on_devices_of_different_kinds_run_in_turn_without_touching_each_other() -> None:
    """Two kinds that torch calls alike stand for two devices: what differs is what a backend declares for them."""
    torch = pytest.importorskip("torch", reason="needs torch")
    cpu = next(device for device in anyattn.detect().devices if device.kind == "cpu")
    other = dataclasses.replace(cpu, kind="npu", arch="n1", name="another kind")
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
    with pytest.raises(NoBackendError, match="device_kind: wanted npu, supported cuda"):
        anyattn.create_runtime(spec, num_layers=1, num_pages=8, device=other, backend="flashinfer")
    options = {"num_layers": 1, "num_pages": 8, "backend": "torch_native"}
    runtimes = [anyattn.create_runtime(spec, device=device, **options) for device in (cpu, other, cpu)]
    assert [rt.selection.platform.kind for rt in runtimes] == ["cpu", "npu", "cpu"]
    alone = anyattn.create_runtime(spec, device=cpu, **options)
    sequences = [rt.new_sequences(1) for rt in (*runtimes, alone)]
    for count in (5, 1, 1):
        q, k, v = (torch.randn(count, heads, 16) for heads in (4, 2, 2))
        outs = [
            rt.run(0, q, k, v, rt.plan(rt.extend(seqs, [count])))
            for rt, seqs in zip((*runtimes, alone), sequences, strict=True)
        ]
        for out in outs:  # kinds may go other ways through torch, which round differently
            torch.testing.assert_close(out, outs[-1], atol=1e-5, rtol=1e-5)


def test_after_detection_and_a_fork_the_child_may_detect_again() -> None:
    program = (
        "import os, warnings\n"
        "warnings.simplefilter('error')\n"  # Python warns of a fork beside a thread that is still there
        "import anyattn\n"
        "here = [device.kind for device in anyattn.detect().devices]\n"
        "if os.fork():\n"
        "    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "assert [device.kind for device in anyattn.detect().devices] == here\n"
    )
    root = str(Path(anyattn.__file__).parents[1])
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": root, "PATH": ""}, timeout=60)


def test_a_platform_names_the_backends_that_are_valid_on_it() -> None:
    devices = {name: offer.load() for name, offer in PluginManager(entry_points=[]).simulated_devices().items()}
    spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)
    assert devices["h100"].backends(spec)[0] == "fa3"
    assert "flashinfer" not in devices["h100"].backends(spec.replace(alibi=True))
    assert "flashinfer" in devices["h100"].backends()
    assert "flashinfer" not in devices["mi300x"].backends()
    assert {"torch_native", "reference"} <= set(devices["mi300x"].backends(spec))
    broken = dataclasses.replace(devices["h100"], simulated=False, problems=("no driver",))
    assert broken.backends() == broken.backends(spec) == ()

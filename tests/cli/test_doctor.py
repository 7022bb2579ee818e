"""`anyattn doctor`: facts, versions, problems, remedies and the exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys

import pytest

from anyattn.discovery import Detection
from anyattn.errors import NoDeviceError
from anyattn.platforms.base import Platform
from anyattn.types import GraphLevel

KEYS = {
    "ok",
    "error",
    "device",
    "spec",
    "choice",
    "remedies",
    "devices",
    "problems",
    "plugin_problems",
    "versions",
    "settings",
}

GPU = Platform(
    kind="cuda",
    vendor="nvidia",
    name="NVIDIA H200",
    arch="sm90",
    torch_device="cuda:0",
    compute_capability=(9, 0),
    uuid="GPU-0",
    memory_total_bytes=141 << 30,
    memory_free_bytes=140 << 30,
    num_cores=132,
    driver_version="580.1",
    runtime_version="13.0",
    collective="nccl",
    graph=GraphLevel.ALWAYS,
    triton=True,
)


def machine(monkeypatch, *devices: Platform, problems: tuple[str, ...] = ()) -> None:
    """Makes detection find these."""
    monkeypatch.setattr("anyattn.dry_run.detect", lambda plugins: Detection(devices=devices, problems=problems))


def test_doctor_says_yes_on_a_usable_machine(anyattn):
    ended = anyattn("doctor")
    assert (ended.code, ended.err) == (0, "")
    for fact in ("arch", "memory", "cores", "threads", platform.python_version(), "torch_native", "page size 16"):
        assert fact in ended.out


def test_doctors_json_holds_every_part_of_the_answer(anyattn):
    ended = anyattn("doctor", "--json")
    document = json.loads(ended.out)
    assert document.keys() == KEYS
    assert ended.code == 0
    assert document["ok"] is True
    assert document["error"] is None
    assert document["device"]["torch_device"] == "cpu"
    assert document["choice"].keys() == {"prefill", "decode", "page_size", "layout", "allocator", "pool"}
    assert document["settings"] == {"ANYATTN_PLATFORM": "cpu"}
    assert document["versions"]["python"] == platform.python_version()
    assert {"anyattn", "torch", "triton", "transformers", "flashinfer-python"} <= document["versions"].keys()


def test_doctor_shows_the_facts_of_an_accelerator(anyattn, monkeypatch):
    monkeypatch.delenv("ANYATTN_PLATFORM")
    machine(monkeypatch, GPU)
    out = anyattn("doctor").out
    for fact in ("NVIDIA H200", "sm90", "141.0 GiB, 140.0 GiB free", "132", "580.1", "13.0", "GPU-0", "nccl"):
        assert fact in out
    assert "multiprocessors" in out
    assert "threads" not in out


def test_doctor_says_no_when_the_device_asked_for_is_not_here(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_PLATFORM", "cuda:77")
    ended = anyattn("doctor", "--json")
    document = json.loads(ended.out)
    assert ended.code == 1
    assert document["ok"] is False
    assert document["device"] is document["choice"] is None
    assert document["devices"]
    assert "cuda:77" in document["error"]
    assert ended.err == f"error: {document['error']}\n"


def test_doctor_says_no_when_the_backend_asked_for_is_not_valid(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "nonesuch")
    ended = anyattn("doctor")
    assert ended.code == 1
    assert "nonesuch" in ended.err
    assert "ANYATTN_ATTENTION_BACKEND" in ended.out


def test_doctor_reports_problems_of_detection_and_of_plugins(anyattn, monkeypatch):
    from anyattn import discovery

    def broken(settings):
        plugins = discovery.plugin_manager(settings)
        plugins.report("plugin zoo cannot be imported")
        return plugins

    cpu = Platform(kind="cpu", vendor="x", name="x", arch="x86_64", torch_device="cpu")
    machine(monkeypatch, cpu, problems=("NVML does not start",))
    monkeypatch.setattr("anyattn.dry_run.plugin_manager", broken)
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["problems"] == ["NVML does not start"]
    assert document["plugin_problems"] == ["plugin zoo cannot be imported"]
    ended = anyattn("doctor")
    assert ended.code == 0
    assert "NVML does not start" in ended.out
    assert "plugin zoo cannot be imported" in ended.out


def test_doctor_names_the_command_that_mends_an_unusable_device(anyattn, monkeypatch):
    remedy = 'torch is not installed; run `pip install "anyattn[cpu]"`'
    machine(
        monkeypatch,
        Platform(kind="cpu", vendor="x", name="x", arch="x86_64", torch_device="cpu", problems=(remedy,)),
    )
    ended = anyattn("doctor")
    assert ended.code == 1
    assert f"cpu: {remedy}" in ended.out
    assert json.loads(anyattn("doctor", "--json").out)["remedies"] == [f"cpu: {remedy}"]


def test_doctor_names_the_command_that_adds_a_backend(anyattn, monkeypatch):
    from anyattn.attention.reference import ReferenceBackend
    from anyattn.attention.selection import BackendCandidate, Candidates
    from anyattn.types import Reason

    missing = Reason(field="package", wanted="fast-kernels>=2", supported="not installed", remedy="pip install x")
    fast = BackendCandidate(
        name="fast", distribution="d", capabilities=ReferenceBackend.capabilities, missing=(missing,)
    )
    monkeypatch.setattr(
        "anyattn.dry_run.candidates", lambda plugins: Candidates(backends=[fast], allocators={}, pools={})
    )
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["remedies"] == ["pip install x adds fast (fast-kernels>=2: not installed)"]


def test_doctor_names_what_mends_a_better_device_than_the_one_in_use(anyattn, monkeypatch):
    monkeypatch.delenv("ANYATTN_PLATFORM")
    gpu = dataclasses.replace(GPU, problems=("the installed torch was built without CUDA",))
    machine(monkeypatch, gpu, Platform(kind="cpu", vendor="x", name="x", arch="x86_64", torch_device="cpu"))
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["device"]["kind"] == "cpu"
    assert "cuda:0: the installed torch was built without CUDA" in document["remedies"]


def test_doctor_does_not_tell_to_give_up_a_usable_accelerator_for_another_one(anyattn, monkeypatch):
    monkeypatch.delenv("ANYATTN_PLATFORM")
    graphics = Platform(kind="rocm", vendor="amd", name="Radeon", arch="gfx1036", torch_device="cuda:0", problems=("x",))
    machine(monkeypatch, GPU, graphics)
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["device"]["kind"] == "cuda"
    assert not any(remedy.startswith("cuda:0: x") for remedy in document["remedies"])
    assert [device["problems"] for device in document["devices"]] == [[], ["x"]]


def test_doctor_tells_of_a_variable_that_nothing_reads_and_which_one_may_be_meant(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_ATENTION_BACKEND", "reference")
    problems = json.loads(anyattn("doctor", "--json").out)["problems"]
    assert any("ANYATTN_ATENTION_BACKEND" in text and "is ANYATTN_ATTENTION_BACKEND meant?" in text for text in problems)


def test_doctor_speaks_of_this_machine_even_where_a_simulated_one_is_set(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_PLATFORM", "sim:h100")
    ended = anyattn("doctor", "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["ok"], document["device"]) == (1, False, None)
    assert "unset ANYATTN_PLATFORM" in document["error"]


@pytest.mark.parametrize("flag", [[], ["--json"]])
def test_doctor_works_without_torch(isolated, flag):
    ended = isolated(f"from anyattn.cli import main; sys.exit(main(['doctor', *{flag}]))", "torch")
    assert ended.returncode == 1
    assert 'pip install "anyattn[cpu]"' in ended.stderr
    assert "Traceback" not in ended.stderr
    if flag:
        document = json.loads(ended.stdout)
        assert document["versions"]["torch"] is None
        assert document["devices"][-1]["kind"] == "cpu"
        assert any('pip install "anyattn[cpu]"' in remedy for remedy in document["remedies"])
    else:
        assert 'pip install "anyattn[cpu]"' in ended.stdout


def test_doctor_and_backends_import_neither_torch_nor_a_vendor_package(isolated):
    ended = isolated("""
        from anyattn.cli import main
        assert main(["doctor"]) == main(["backends"]) == 0
        heavy = {"torch", "triton", "transformers", "flashinfer", "sgl_kernel", "flash_mla", "torch_npu", "aiter"}
        sys.stderr.write(repr(heavy & set(sys.modules)))
    """)
    assert ended.stderr == "set()"


def test_doctor_takes_less_than_a_second():
    """In CPU time, which other tests beside this one stretch less; doctor waits for nothing. About 0.4 s."""

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system

    best = 60.0
    for _ in range(3):
        start = spent()
        subprocess.run([sys.executable, "-m", "anyattn", "doctor"], capture_output=True, check=True)
        best = min(best, spent() - start)
    assert best < 1.0


def test_importing_anyattn_imports_nothing_heavy(isolated):
    ended = isolated("""
        before = set(sys.modules)
        import anyattn
        dir(anyattn)
        new = {name.partition(".")[0] for name in set(sys.modules) - before}
        new -= sys.stdlib_module_names
        print(sorted(new))
    """)
    assert ended.stdout == "['anyattn']\n", ended.stderr


def test_a_device_error_is_the_one_that_create_runtime_raises(anyattn, monkeypatch):
    from anyattn import current_platform

    monkeypatch.setenv("ANYATTN_PLATFORM", "nonesuch")
    with pytest.raises(NoDeviceError) as caught:
        current_platform()
    # Free memory and the like do not enter the text, so both detections give the same.
    assert anyattn("doctor").err == f"error: {caught.value}\n"

"""`anyattn doctor`: facts, versions, problems, remedies and the exit code."""

from __future__ import annotations

import dataclasses
import json
import os
import platform

import pytest

from anyattn.attention.reference import ReferenceBackend
from anyattn.errors import NoDeviceError
from anyattn.platforms import host
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
    "threads",
    "problems",
    "plugin_problems",
    "versions",
    "settings",
}

GPU = Platform(
    kind="gpu",
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


@pytest.fixture
def two_nodes(tmp_path, monkeypatch):
    """A machine of two CPUs, each on a NUMA node of its own, both of which this process may use."""
    for name, text in {
        "sys/devices/system/node/node0/cpulist": "0",
        "sys/devices/system/node/node1/cpulist": "1",
        "sys/devices/system/cpu/online": "0-1",
        "proc/self/status": "Mems_allowed_list:\t0-1",
        **{f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu}" for cpu in range(2)},
    }.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    monkeypatch.setattr(host, "ROOT", tmp_path / "root")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def test_doctor_shows_the_cpus_the_nodes_and_the_threads_and_what_pins_them(anyattn, monkeypatch, two_nodes):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    ended = anyattn("doctor")
    lines = [line.split(None, 2) for line in ended.out.splitlines()]
    assert ["cpus", "0-1"] in lines
    assert ["NUMA", "nodes", "0-1"] in lines
    assert ["torch", "threads", "2 (one for each core)"] in lines
    assert ["pinned", "by", "OMP_PROC_BIND=close"] in lines
    assert "- cpu: threads run on NUMA nodes 0-1" in " ".join(ended.out.split())
    document = json.loads(anyattn("doctor", "--json").out)
    (device,) = (each for each in document["devices"] if each["kind"] == "cpu")
    assert (device["cpus"], device["numa_nodes"], device["memory_nodes"]) == ("0-1", "0-1", "0-1")
    threads = document["threads"]
    assert (threads["count"], threads["counted_by"]) == (2, "one for each core")
    assert threads["pinned_by"] == ["OMP_PROC_BIND=close"]
    assert [f"cpu: {hint}" for hint in threads["hints"]] == document["remedies"][-1:]


def test_doctor_says_that_nothing_pins_the_threads_and_what_counts_them(anyattn, monkeypatch, two_nodes):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ended = anyattn("doctor")
    assert "1 (OMP_NUM_THREADS)" in ended.out
    assert any(line.split() == ["pinned", "by", "nothing"] for line in ended.out.splitlines())
    assert "NUMA nodes 0-1" not in ended.out  # one thread, of one node


def test_doctor_says_nothing_of_the_cpus_threads_to_who_has_an_accelerator_in_use(
    anyattn, monkeypatch, stranger, two_nodes
):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("ANYATTN_PLATFORM", "gpu")
    stranger(GPU)
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["device"]["kind"] == "gpu"
    assert document["threads"]["hints"]
    assert not any("NUMA" in remedy for remedy in document["remedies"])


def test_doctor_shows_the_facts_of_an_accelerator(anyattn, monkeypatch, stranger):
    monkeypatch.delenv("ANYATTN_PLATFORM")
    stranger(GPU)
    out = anyattn("doctor").out
    for fact in ("NVIDIA H200", "sm90", "141.0 GiB, 140.0 GiB free", "132", "580.1", "13.0", "GPU-0", "nccl"):
        assert fact in out
    assert "multiprocessors" in out
    facts = out[: out.index("\n\n")]
    assert not any(word in facts for word in ("threads", "cpus", "NUMA", "pinned"))


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


def test_doctor_reports_problems_of_detection_and_of_plugins(anyattn, stranger):
    stranger(problems=("the manager does not start",), backends={"zoo": int})
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["problems"] == ["the manager does not start"]
    broken = "'zoo' of plugin stranger (stranger 1.0): stranger:zoo is no subclass of AttentionBackend."
    assert document["plugin_problems"] == [broken]
    ended = anyattn("doctor")
    assert ended.code == 0
    assert "the manager does not start" in ended.out
    assert broken in ended.out


def test_doctor_names_the_command_that_mends_an_unusable_device(anyattn, monkeypatch, stranger):
    remedy = 'torch is not installed; run `pip install "anyattn[gpu]"`'
    monkeypatch.setenv("ANYATTN_PLATFORM", "gpu")
    stranger(dataclasses.replace(GPU, problems=(remedy,)))
    ended = anyattn("doctor")
    assert ended.code == 1
    assert f"cuda:0: {remedy}" in ended.out
    assert json.loads(anyattn("doctor", "--json").out)["remedies"] == [f"cuda:0: {remedy}"]


def test_doctor_names_the_command_that_adds_a_backend(anyattn, stranger):
    class Fast(ReferenceBackend):
        capabilities = dataclasses.replace(ReferenceBackend.capabilities, packages=("fast-kernels>=2",))

    stranger(backends={"Fast": Fast})
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["remedies"] == ['pip install "fast-kernels>=2" adds Fast (fast-kernels>=2: not installed)']


def test_doctor_names_the_program_that_adds_a_backend(anyattn, stranger):
    class Compiled(ReferenceBackend):
        capabilities = dataclasses.replace(ReferenceBackend.capabilities, programs=("nonesuch-compiler",))

    stranger(backends={"Compiled": Compiled})
    document = json.loads(anyattn("doctor", "--json").out)
    assert "install nonesuch-compiler adds Compiled (nonesuch-compiler: not on the PATH)" in document["remedies"]


def test_doctor_names_what_mends_a_better_device_than_the_one_in_use(anyattn, monkeypatch, stranger):
    monkeypatch.delenv("ANYATTN_PLATFORM")
    stranger(dataclasses.replace(GPU, problems=("the installed torch was built without CUDA",)))
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["device"]["kind"] == "cpu"
    assert "cuda:0: the installed torch was built without CUDA" in document["remedies"]


def test_doctor_does_not_tell_to_give_up_a_usable_accelerator_for_another_one(anyattn, monkeypatch, stranger):
    monkeypatch.setenv("ANYATTN_PLATFORM", "gpu")
    stranger(GPU, dataclasses.replace(GPU, kind="graphics", torch_device="cuda:1", problems=("x",)))
    document = json.loads(anyattn("doctor", "--json").out)
    assert document["device"]["kind"] == "gpu"
    assert not any(remedy.startswith("cuda:1: x") for remedy in document["remedies"])
    problems = {device["kind"]: device["problems"] for device in document["devices"]}
    assert (problems["gpu"], problems["graphics"]) == ([], ["x"])


def test_doctor_tells_of_a_variable_that_nothing_reads_and_which_one_may_be_meant(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_ATENTION_BACKEND", "reference")
    problems = json.loads(anyattn("doctor", "--json").out)["problems"]
    (problem,) = (text for text in problems if "ANYATTN_ATENTION_BACKEND" in text)
    assert "is ANYATTN_ATTENTION_BACKEND meant?" in problem


def test_doctor_speaks_of_this_machine_even_where_a_simulated_one_is_set(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_PLATFORM", "sim:h100")
    ended = anyattn("doctor", "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["ok"], document["device"]) == (1, False, None)
    assert "unset it" in document["error"]


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

"""Exit codes and error texts that all commands share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from anyattn.cli import main


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["backends", "--backend", "nonesuch"], "There is no attention backend named 'nonesuch'"),
        (["backends", "--device", "nonesuch"], "No device 'nonesuch' can be used here"),
        (["backends", "--dtype", "int3"], "dtype must be one of"),
        (["backends", "--num-qo-heads", "7"], "num_qo_heads must be a multiple of num_kv_heads"),
        (["generate", "--prompt", "x", "--device", "nonesuch"], "No device 'nonesuch' can be used here"),
    ],
)
def test_what_is_refused_ends_as_a_paragraph_with_exit_code_1(anyattn, argv, wanted):
    ended = anyattn(*argv)
    assert ended.code == 1
    assert ended.err.startswith("error: ")
    assert wanted in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("command", [["doctor"], ["backends"], ["warmup"], ["generate", "--prompt", "x"]])
@pytest.mark.parametrize(("name", "value"), [("ANYATTN_PAGE_SIZE", "abc"), ("ANYATTN_STRICT", "maybe")])
def test_a_setting_that_means_nothing_is_refused_by_name(anyattn, monkeypatch, command, name, value):
    monkeypatch.setenv(name, value)
    ended = anyattn(*command)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith(f"error: {name} must be ")
    assert value in ended.err


@pytest.mark.parametrize(
    "argv",
    [
        ["nonesuch"],
        ["doctor", "--nonesuch"],
        ["backends", "--page-size", "0"],
        ["backends", "--page-size", "many"],
        ["backends", "--graph", "sometimes"],
        ["backends", "--layout", "DHN"],
        ["backends", "--model", "deepseek-v3", "--head-dim", "128"],
        ["generate"],
        ["generate", "--prompt", "x", "--max-new-tokens", "0"],
        ["generate", "--prompt", "x", "--page-size", "-1"],
    ],
)
def test_wrong_usage_exits_2(anyattn, argv):
    ended = anyattn(*argv)
    assert (ended.code, ended.out) == (2, "")
    assert "Usage: anyattn" in ended.err


def test_an_interrupt_exits_130_quietly(anyattn, stranger):
    gate = threading.Event()

    def interrupted():
        os.kill(os.getpid(), signal.SIGINT)
        gate.wait(60)

    stranger(at_probe=interrupted)
    ended = anyattn("doctor")
    gate.set()
    for thread in [thread for thread in threading.enumerate() if thread.name == "anyattn plugin"]:
        thread.join(60)
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_a_bug_keeps_its_plain_traceback(monkeypatch):
    def bug(*arguments, **options):
        raise ZeroDivisionError

    monkeypatch.setattr("json.dumps", bug)
    with pytest.raises(ZeroDivisionError):
        main(["doctor", "--json"])


@pytest.mark.parametrize(
    "argv",
    [["backends", "--model", "nope"], ["backends", "--kv-dtype", "fp8"], ["doctor"], ["warmup"], ["plugins"]],
    ids=str,
)
def test_with_json_a_refusal_is_an_object_too(anyattn, monkeypatch, argv):
    if len(argv) == 1:
        monkeypatch.setenv("ANYATTN_PAGE_SIZE", "x")
    ended = anyattn(*argv, "--json")
    (error,) = json.loads(ended.out).values()
    assert (ended.code, ended.err) == (1, f"error: {error}\n")


@pytest.mark.parametrize("closed", [">&-", "> /dev/full"])
@pytest.mark.parametrize("command", ["doctor", "backends --json", "plugins"])
def test_a_closed_or_full_stdout_is_no_traceback(closed, command):
    run = f"{sys.executable} -m anyattn {command} {closed}"
    ended = subprocess.run(["sh", "-c", run], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr
    if closed == "> /dev/full":
        assert ended.returncode == 1
        assert "No space left on device" in ended.stderr


def test_the_version_is_the_distributions(anyattn):
    ended = anyattn("--version")
    assert ended.code == 0
    assert ended.out.startswith("anyattn ")


@pytest.mark.parametrize("command", ["doctor", "backends", "warmup", "plugins", "generate"])
def test_every_command_explains_itself(anyattn, command):
    ended = anyattn(command, "--help")
    assert ended.code == 0
    assert "--json" in ended.out


def test_python_m_anyattn_is_the_command_line():
    ended = subprocess.run(
        [sys.executable, "-m", "anyattn", "backends", "--backend", "nonesuch"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: ")
    assert "Traceback" not in ended.stderr


def test_a_prompt_that_is_no_text_is_a_usage_error():
    run = subprocess.run(
        [sys.executable, "-m", "anyattn", "generate", "--prompt", b"\xff\xfe"], capture_output=True, check=False
    )
    assert run.returncode == 2
    assert b"not valid UTF-8" in run.stderr
    assert b"Traceback" not in run.stderr


QUICK = ["doctor", "backends", "plugins"]


def test_the_quick_commands_import_neither_torch_nor_a_vendor_package(isolated):
    ended = isolated(f"""
        from anyattn.cli import main
        assert [main([command]) for command in {QUICK}] == [0, 0, 0]
        heavy = {{"torch", "triton", "transformers", "flashinfer", "sgl_kernel", "flash_mla", "torch_npu", "aiter"}}
        sys.stderr.write(repr(heavy & set(sys.modules)))
    """)
    assert ended.stderr == "set()"


@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_takes_less_than_a_second(command):
    """In CPU time, which other tests beside this one stretch less; it waits for nothing. About 0.4 s."""

    def spent() -> float:
        times = os.times()
        return times.children_user + times.children_system

    best = 60.0
    for _ in range(3):
        start = spent()
        subprocess.run([sys.executable, "-m", "anyattn", command], capture_output=True, check=True)
        best = min(best, spent() - start)
    assert best < 1.0

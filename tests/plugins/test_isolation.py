"""The time limit of plugins' code, what a thread of it may do to its process, and stdout kept for the caller."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from anyattn.plugins.isolation import TimeLimitError, describe, run_side_by_side

MINUTE = 60.0


@pytest.fixture
def gate():
    """What waits for it hangs until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def raising(error):
    def function():
        raise error

    return function


def recursing():
    return recursing()


def test_outcomes_come_in_the_order_of_the_functions_whichever_ends_first(plugin_threads):
    second_is_done = threading.Event()

    def first():
        assert second_is_done.wait(MINUTE)
        return 1

    def second():
        second_is_done.set()
        return 2

    assert [outcome.result() for outcome in run_side_by_side([first, second, lambda: 3], MINUTE)] == [1, 2, 3]
    assert plugin_threads() == []


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raising(ValueError("boom")), "ValueError: boom"),
        (raising(SystemExit(0)), "RuntimeError: SystemExit: 0"),
        (raising(KeyboardInterrupt()), "RuntimeError: KeyboardInterrupt"),
        (raising(GeneratorExit()), "RuntimeError: GeneratorExit"),
        (recursing, "RecursionError: "),
    ],
)
def test_whatever_the_code_raises_is_its_outcome_and_prints_nothing(function, text, capfd, plugin_threads):
    outcomes = run_side_by_side([function, lambda: "good"], MINUTE)
    assert describe(outcomes[0].error).startswith(text)
    assert outcomes[1].result() == "good"
    assert plugin_threads() == []
    assert capfd.readouterr() == ("", "")


def test_what_takes_too_long_is_left_behind_and_the_others_are_kept(gate):
    outcomes = run_side_by_side([lambda: gate.wait(MINUTE), lambda: "good"], 1.0)
    assert outcomes[1].result() == "good"
    with pytest.raises(TimeLimitError, match="did not end within 1 s and is left behind"):
        outcomes[0].result()


def test_what_comes_late_changes_and_prints_nothing(gate, capfd, plugin_threads):
    def late():
        gate.wait(MINUTE)
        raise RuntimeError("too late")

    (outcome,) = run_side_by_side([late], 0.1)
    (thread,) = plugin_threads()
    gate.set()
    thread.join(MINUTE)
    assert isinstance(outcome.error, TimeLimitError)
    assert capfd.readouterr() == ("", "")


def test_a_thread_that_was_left_behind_does_not_keep_the_process_from_ending():
    program = (
        "import time\n"
        "from anyattn.plugins.isolation import run_side_by_side\n"
        "print(run_side_by_side([lambda: time.sleep(600)], 0.1))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert "TimeLimitError" in ended.stdout
    assert ended.stderr == ""


def test_ctrl_c_interrupts_the_wait(gate):
    def hanging():
        os.kill(os.getpid(), signal.SIGINT)
        gate.wait(MINUTE)

    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([hanging], MINUTE)


def test_without_a_thread_to_be_had_the_code_still_runs(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert [outcome.result() for outcome in run_side_by_side([lambda: 1, lambda: 2], MINUTE)] == [1, 2]


def test_an_error_that_cannot_be_put_into_words_is_named_by_its_type():
    class Mute(Exception):
        def __str__(self):
            raise SystemExit

    assert describe(Mute()) == "Mute"


def test_what_others_write_to_stdout_goes_to_stderr_also_from_c():
    program = """
import ctypes, os, sys
from anyattn.plugins.isolation import stdout_on_stderr
print("before")
with stdout_on_stderr():
    print("python")
    os.write(1, b"descriptor\\n")
    ctypes.CDLL(None).printf(b"buffered in C\\n")
print("after")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "before\nafter\n"
    assert sorted(ended.stderr.splitlines()) == ["buffered in C", "descriptor", "python"]


def test_a_process_without_stdout_and_stderr_is_no_trouble():
    program = (
        "import os, sys\n"
        "from anyattn.plugins.isolation import stdout_on_stderr\n"
        "os.close(1); os.close(2)\n"
        "with stdout_on_stderr(): pass\n"
        "os._exit(7)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 7

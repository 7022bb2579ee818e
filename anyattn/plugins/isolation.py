"""Keeps a plugin's code from holding up, ending or talking over the program that calls it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from anyattn.errors import contained


class TimeLimitError(Exception):
    """A plugin's code did not come to an end in the time that it had."""


@dataclass(slots=True)
class Outcome:
    """What became of a call: its value or its error."""

    value: Any = None
    error: Exception | None = None

    def result(self) -> Any:
        """The value. Raises the error."""
        if self.error is not None:
            raise self.error
        return self.value


class _Call(threading.Thread):
    """One function in a thread that neither prints a traceback nor keeps the process from ending."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="anyattn plugin", daemon=True)
        self._function = function
        self.outcome = Outcome()

    def run(self) -> None:
        try:
            self.outcome.value = contained(self._function)
        except Exception as error:
            self.outcome.error = error
        except KeyboardInterrupt:  # Ctrl-C reaches only the main thread: this one was raised by the plugin
            self.outcome.error = RuntimeError("KeyboardInterrupt")


def run_side_by_side(functions: Sequence[Callable[[], Any]], limit_s: float) -> list[Outcome]:
    """Calls all functions at once, each in a thread of its own, and gives their outcomes in order.

    limit_s: seconds that all of them have together. What runs longer has a TimeLimitError for an outcome and is left
        behind; otherwise no thread is left. Code that does not release the GIL cannot be left behind.
    """
    deadline = time.monotonic() + limit_s
    calls = [_Call(function) for function in functions]
    for call in calls:
        try:
            call.start()
        except RuntimeError:  # this process may start no more threads: better without a limit than not at all
            call.run()
    outcomes = []
    for call in calls:
        if call.ident is not None:
            call.join(max(0.0, deadline - time.monotonic()))
        late = Outcome(
            error=TimeLimitError(
                f"it did not end within {limit_s:g} s and is left behind; see whether the device's driver answers"
            )
        )
        outcomes.append(late if call.is_alive() else call.outcome)
    return outcomes


def describe(error: BaseException) -> str:
    """The error's type and text, also where a plugin's error cannot be put into words."""
    try:
        return f"{type(error).__name__}: {contained(str, error)}"
    except Exception:
        return type(error).__name__


@contextlib.contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """What is written to stdout meanwhile, by Python or a vendor's library, goes to stderr: stdout stays the caller's.

    It holds for the whole process, so it is for commands, not for libraries.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    kept = None
    with contextlib.suppress(OSError):  # a process may have been started without stdout or stderr
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            _flush_c_stdout()
            os.dup2(kept, 1)
            os.close(kept)


def _flush_c_stdout() -> None:
    """What a library's printf left in C's own buffer would come out at the end of the process otherwise."""
    with contextlib.suppress(Exception):  # Windows finds no C library under this name
        import ctypes

        ctypes.CDLL(None).fflush(None)

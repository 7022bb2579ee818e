"""Runs checks as pytest items, in this process, whatever pytest files, settings and plugins are around."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal

import pytest

from anyattn.errors import ContractError, contained
from anyattn.platforms.base import Platform
from anyattn.testing.check import CannotRunError, Check, CheckFailedError, Measured
from anyattn.testing.command.verification import Verification
from anyattn.testing.command.xfails import ExpectedFailures
from anyattn.testing.device import answers

Result = Literal["passed", "failed", "skipped", "xfailed", "xpassed"]

_OPTIONS = (
    "--noconftest",
    "--capture=no",  # what the tested code prints is for the caller to send somewhere
    "--assert=plain",
    *("-o", "junit_suite_name=anyattn"),
    *("-p", "no:terminal"),
    *("-p", "no:cacheprovider"),
    *("-p", "no:logging"),
    *("-p", "no:warnings"),
    # Their hooks are the process's: those of a pytest around this one stay in place.
    *("-p", "no:unraisableexception"),
    *("-p", "no:threadexception"),
)

_OF_THE_USER: Mapping[str, str | None] = {
    "PYTEST_ADDOPTS": None,
    "PYTEST_PLUGINS": None,
    "PYTEST_CURRENT_TEST": None,  # of a test that calls this one: pytest would remove it
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Variables that pytest reads, and what they are while checks run; None for not set."""


_LOST = "a kernel read or wrote where it must not. What comes after this check is not run."


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a check.

    message: why it failed or was skipped, in words; empty when it passed. expected: why it is expected to fail; None
    where it is not. An expected failure has the result "xfailed"; one that passed, which is a failure, "xpassed".
    """

    check: Check
    result: Result
    message: str
    expected: str | None
    measured: Measured | None
    seconds: float


def run_checks(
    verifications: Sequence[Verification],
    *,
    seed: int,
    expected: ExpectedFailures | None = None,
    junitxml: Path | None = None,
    exit_first: bool = False,
    started: Callable[[int, str], None] = lambda done, name: None,
) -> list[list[Outcome]]:
    """Runs all checks and gives their outcomes, for each verification in the order of its checks.

    exit_first: ends at the first failure; the outcomes are then those up to it. So they are where a device does not
        answer any more after a failure, as later checks would fail for nothing of their own.
    started: is told how many checks are done, and the id of the next.
    """
    plugin = _Plugin(verifications, seed, expected, started)
    options = [*_OPTIONS, *(["--exitfirst"] if exit_first else [])]
    if junitxml is not None:
        options.append(f"--junitxml={junitxml.absolute()}")
    with tempfile.TemporaryDirectory(prefix="anyattn-verify-") as folder, _environment(_OF_THE_USER):
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\n", encoding="utf-8")
        place = ["-c", str(settings), f"--rootdir={folder}", f"--confcutdir={folder}", folder]
        code = pytest.main([*options, *place], plugins=[plugin])
    if plugin.interrupted:
        raise KeyboardInterrupt
    if code in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR):
        raise ContractError(f"pytest {pytest.__version__} could not run the checks; stderr says why.")
    return plugin.outcomes


@contextlib.contextmanager
def _environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    try:
        _set_variables(variables)
        yield
    finally:
        _set_variables(before)


def _set_variables(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _Item(pytest.Item):
    """One check."""

    check: Check
    seed: int
    device: Platform | None
    number: int
    """Of its verification."""
    expected: str | None = None
    measured: Measured | None = None

    def runtest(self) -> None:
        try:
            self.measured = contained(self.check.run, self.seed)
            if not answers(self.device):  # of a kernel that is still on its way, this check is to blame
                raise CheckFailedError(f"{self.device} does not answer any more: {_LOST}")
        except CannotRunError as error:
            pytest.skip(str(error))
        except pytest.exit.Exception as error:  # the tested code is not the one to end the run
            raise RuntimeError(f"pytest.exit: {error}") from error
        if self.measured is not None:
            self.user_properties += [("error", self.measured.error), ("allowed", self.measured.allowed)]

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> str:  # type: ignore[override]
        error = excinfo.value
        if isinstance(error, CheckFailedError):
            return str(error)
        lines = traceback.format_exception(type(error), error, _below_the_kit(error.__traceback__))
        return "".join(lines).rstrip()


def _below_the_kit(frames: TracebackType | None) -> TracebackType | None:
    """Without pytest's frames and those above: what the check called."""
    found = frames
    while found is not None and found.tb_frame.f_code is not contained.__code__:
        found = found.tb_next
    return frames if found is None else found.tb_next


class _Plugin:
    """Gives pytest the items, and keeps what became of them."""

    def __init__(
        self,
        verifications: Sequence[Verification],
        seed: int,
        expected: ExpectedFailures | None,
        started: Callable[[int, str], None],
    ) -> None:
        self.outcomes: list[list[Outcome]] = [[] for _ in verifications]
        self.interrupted = False
        self._verifications = verifications
        self._seed = seed
        self._expected = expected
        self._started = started

    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        for number, verification in enumerate(self._verifications):
            name = verification.target.name
            for check in verification.checks:
                item = _Item.from_parent(session, name=check.name, nodeid=f"{name}.{check.tier}::{check.name}")
                item.check, item.seed, item.number = check, self._seed, number
                item.device = verification.device
                if self._expected is not None and (reason := self._expected.reason_for(name, check.id)) is not None:
                    item.expected = reason
                    item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
                items.append(item)

    def pytest_runtest_setup(self, item: _Item) -> None:
        self._started(sum(map(len, self.outcomes)), item.check.id)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: _Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when != "call":
            return report
        result: Result = report.outcome
        message = report.longreprtext
        if item.expected is not None and not report.skipped:
            assert self._expected is not None
            result = "xpassed"
            report.longrepr = message = f"expected to fail and passes: remove it from {self._expected.path}"
        elif hasattr(report, "wasxfail"):
            result = "xfailed"
        elif isinstance(report.longrepr, tuple):  # of what was skipped: file, line and reason
            message = report.longrepr[2].removeprefix("Skipped: ")
        if report.failed and not answers(item.device):
            message += f"\n{item.device} does not answer any more: {_LOST}"
            item.session.shouldstop = "the device is lost"
        self.outcomes[item.number].append(
            Outcome(
                check=item.check,
                result=result,
                message=message,
                expected=item.expected,
                measured=item.measured,
                seconds=call.duration,
            )
        )
        return report

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        # What ends the run by `shouldstop` comes by this way too.
        self.interrupted = not isinstance(excinfo.value, pytest.Session.Interrupted)

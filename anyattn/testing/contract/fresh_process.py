"""Calls a function in a process of its own that has imported nothing yet, for checks of what an import brings in."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from anyattn.errors import contained
from anyattn.plugins.isolation import describe
from anyattn.testing.check import CheckFailedError

LIMIT_S = 120.0
"""What an import may take at most; the first one of a large package from a slow disk takes tens of seconds."""

_BOOT = (
    "import json, sys\n"
    "request = json.loads(sys.argv[1])\n"
    "sys.path[:] = request['path']\n"
    "from anyattn.testing.contract.fresh_process import answer\n"
    "answer(request)\n"
)


def call(
    function: Callable[..., Any],
    *,
    environment: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
    **values: Any,
) -> Any:
    """What the function returns in a new process with this one's sys.path; JSON values go in and come out.

    function: of a module that can be imported there. environment: instead of this process's variables.

    Raises CheckFailedError when it raises there, ends the process or takes longer.
    """
    request = {
        "path": [str(entry) for entry in sys.path],
        "place": f"{function.__module__}:{function.__qualname__}",
        "values": values,
    }
    with subprocess.Popen(
        [sys.executable, "-c", _BOOT, json.dumps(request)],
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            end(process)
            raise CheckFailedError(f"a fresh process did not end within {limit_s:g} s.") from None
    try:
        outcome = json.loads(stdout)
    except ValueError:
        said = stderr.strip().splitlines()
        words = f": {said[-1]}" if said else ""
        raise CheckFailedError(f"a fresh process ended with status {process.returncode}{words}.") from None
    if "error" in outcome:
        raise CheckFailedError(f"in a fresh process: {outcome['error']}")
    return outcome["value"]


def end(process: subprocess.Popen[Any]) -> None:
    """Kills a process that was started in a session of its own, with those that it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def answer(request: dict[str, Any]) -> None:
    """In the new process: makes the call that was asked for and writes what became of it to stdout."""
    stdout = os.dup(1)
    os.dup2(2, 1)  # what is printed meanwhile is not the answer
    module, _, name = request["place"].partition(":")
    function = getattr(importlib.import_module(module), name)
    try:
        outcome = {"value": contained(lambda: function(**request["values"]))}
    except Exception as error:
        outcome = {"error": describe(error)}
    with os.fdopen(stdout, "w") as stream:
        json.dump(outcome, stream)


def brought_in(place: str, names: Iterable[str]) -> list[str]:
    """To be called in a fresh process: which of these top-level modules come in with "package.module[:attribute]".

    Of a class, its `capabilities` are read too.
    """
    before = set(sys.modules)
    module, _, attribute = place.partition(":")
    loaded = importlib.import_module(module)
    if attribute:
        capabilities = getattr(getattr(loaded, attribute), "capabilities", None)
        if capabilities is not None:
            capabilities.to_json()
    return sorted(set(names) & (set(sys.modules) - before))

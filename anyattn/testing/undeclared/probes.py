"""What of a backend works though it is not declared: each value is tried in a process that a bad kernel may take down.

One process works through the list and tells of each result. When it dies or hangs, what it was at is noted, and a new
one goes on behind it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from anyattn.attention.backend import AttentionBackend
from anyattn.errors import ContractError, contained
from anyattn.platforms.base import Platform
from anyattn.plugins.isolation import describe
from anyattn.testing.contract.fresh_process import end
from anyattn.testing.device import answers
from anyattn.testing.undeclared.attempts import Tried, attempt, attempts

_BOOT = (
    "import json, sys\nsys.path[:] = json.loads(sys.argv[1])\n"
    "from anyattn.testing.undeclared.probes import serve\nserve()\n"
)

_START_S = 120.0
"""What a process may take until it begins: the first import of torch from a slow disk takes tens of seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """field, value: of the declaration, in words. works: whether the cases of that value are right against float64.

    note: what was run, or what is wrong.
    """

    field: str
    value: str
    works: bool
    note: str


def probe(
    backend_class: type[AttentionBackend], device: Platform, seed: int, *, limit_s: float = 120.0
) -> list[Probed]:
    """Tries everything that the backend does not declare on a device. What has no case is left out.

    limit_s: seconds that one case may take.

    Raises ContractError where the class cannot be found by its name, or not in another process.
    """
    place = _place(backend_class)
    wanted = list(attempts(backend_class.capabilities, device))
    found: list[Probed] = []
    first = 0
    while first < len(wanted):
        results, how = _work((place, device, seed, first), limit_s)
        if not results:
            if first == 0:
                raise ContractError(f"{place} cannot be tried in a process of its own: {how}.")
            results = {first: Tried(works=False, note=f"could not be tried: a new process {how}")}
        for number, tried in results.items():
            if tried is not None:
                value = wanted[number]
                found.append(Probed(field=value.field, value=value.value, works=tried.works, note=tried.note))
        first = max(results) + 1
    return found


def _place(backend: type[AttentionBackend]) -> str:
    """ "package.module:Class". Raises ContractError where the class is not found there."""
    place = f"{backend.__module__}:{backend.__qualname__}"
    try:
        is_there = _find(place) is backend
    except Exception:
        is_there = False
    if not is_there or backend.__module__ == "__main__":
        raise ContractError(
            f"{place} does not name this class to another process, in which what it does not declare is tried: define "
            "it at the top of a module that can be imported."
        )
    return place


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _work(request: tuple[Any, ...], limit_s: float) -> tuple[dict[int, Tried | None], str]:
    """Results by the number of the attempt, from a process that ends at one that takes it down, and how it ended."""
    results: dict[int, Tried | None] = {}
    current, runs = None, ""
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, json.dumps([str(entry) for entry in sys.path])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            lines = _lines(process)
            assert process.stdin is not None
            # It may have ended already: the end of its output tells.
            with contextlib.suppress(BrokenPipeError), process.stdin as stdin:
                pickle.dump(request, stdin)
            wait_s = max(limit_s, _START_S)
            how = f"did not start within {wait_s:g} s"
            while (line := _next(lines, wait_s)) is not None:
                wait_s, how = limit_s, f"did not end within {limit_s:g} s"
                if not line.endswith(b"\n"):  # an empty one, or one that was cut short
                    how = _ended(process, stderr)
                    break
                message = json.loads(line)
                current, runs = message["at"], message.get("runs", "")
                if "note" in message:
                    results[current] = Tried(works=message["works"], note=message["note"]) if message["note"] else None
                    current = None
        finally:
            end(process)
    if current is not None:
        results[current] = Tried(works=False, note=f"{runs}: {how}" if runs else how)
    return results, how


def _lines(process: subprocess.Popen[bytes]) -> queue.Queue[bytes]:
    """What the process writes, line by line; an empty one at its end."""
    lines: queue.Queue[bytes] = queue.Queue()

    def read() -> None:
        for line in process.stdout or ():
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, name="anyattn undeclared", daemon=True).start()
    return lines


def _next(lines: queue.Queue[bytes], limit_s: float) -> bytes | None:
    """The next line; None when there is none for so long."""
    try:
        return lines.get(timeout=limit_s)
    except queue.Empty:
        return None


def _ended(process: subprocess.Popen[bytes], stderr: Any) -> str:
    """In words, how a process ended that has closed its output."""
    status = process.wait()
    if status < 0:
        return f"crashed (signal {-status})"
    stderr.seek(0)
    said = stderr.read().strip().splitlines()
    return f"ended with status {status}{': ' + said[-1] if said else ''}"


def serve() -> None:
    """In the process: works through the list from the number that is asked for, and writes a line for each event."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what kernels print is no answer
    place, device, seed, first = pickle.load(sys.stdin.buffer)

    def tell(**message: Any) -> None:
        print(json.dumps(message), file=channel, flush=True)

    backend = contained(_find, place)
    for number, wanted in enumerate(attempts(backend.capabilities, device)):
        if number < first:
            continue
        tell(at=number)
        try:
            tried = attempt(backend, device, wanted, seed, partial(_tell_run, tell, number))
        except Exception as error:  # of making the cases
            tried = Tried(works=False, note=describe(error))
        tell(at=number, works=tried is not None and tried.works, note="" if tried is None else tried.note)
        if tried is not None and not tried.is_safe and not answers(device):
            return


def _tell_run(tell: Callable[..., None], number: int, name: str) -> None:
    tell(at=number, runs=name)

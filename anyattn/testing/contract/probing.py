"""Runs a platform probe in a process of its own, and in one that is forked from it, for `platforms`."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
from typing import Any

from anyattn.platforms.base import Platform, ProbeResult
from anyattn.plugins.isolation import describe, run_side_by_side

_HEAVY = ("torch", "triton")


def probed(place: str, probe_limit_s: float) -> dict[str, Any]:
    """To be called in a fresh process: what the probe at "package.module:attribute" finds there.

    devices: the facts of each. heavy: which of torch and triton came in with the probe.
    """
    before = set(sys.modules)
    module, _, attribute = place.partition(":")
    probe = getattr(importlib.import_module(module), attribute)
    (outcome,) = run_side_by_side([probe], probe_limit_s)
    result = outcome.result()
    if not isinstance(result, ProbeResult):
        raise TypeError(f"the probe returned {type(result).__name__}, not ProbeResult")
    return {
        "devices": [_lasting_facts(device) for device in result.devices],
        "problems": list(result.problems),
        "heavy": [name for name in _HEAVY if name in sys.modules and name not in before],
    }


def _lasting_facts(device: Platform) -> dict[str, str]:
    """In words, by field, without what changes from one moment to the next."""
    facts = {field.name: getattr(device, field.name) for field in dataclasses.fields(device)}
    del facts["memory_free_bytes"]
    return {name: repr(sorted(fact) if isinstance(fact, frozenset) else fact) for name, fact in facts.items()}


def probed_in_a_fork(place: str, probe_limit_s: float) -> list[dict[str, Any]]:
    """To be called in a fresh process: what `probed` gives there, and then in a process that is forked from it."""
    here = probed(place, probe_limit_s)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            outcome: dict[str, Any] = {"value": probed(place, probe_limit_s)}
        except BaseException as error:
            outcome = {"error": describe(error)}
        with os.fdopen(writing, "w") as stream:
            json.dump(outcome, stream)
        os._exit(0)  # nothing of the parent's is to be cleaned up a second time
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    _, status = os.waitpid(child, 0)
    if not text:
        raise RuntimeError(f"the probe ended a forked process with status {os.waitstatus_to_exitcode(status)}")
    outcome = json.loads(text)
    if "error" in outcome:
        raise RuntimeError(f"in a forked process the probe raised {outcome['error']}")
    return [here, outcome["value"]]

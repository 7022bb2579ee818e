"""The kit's checks of probes and simulated devices: the built-in ones keep the contract, and each mutant is named."""

import dataclasses
import os
import sys
from types import ModuleType

import pytest

from anyattn.platforms import simulated
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.records import Offer
from anyattn.testing.check import CannotRunError
from anyattn.testing.contract import platforms
from anyattn.testing.target import Target, find_targets

pytestmark = pytest.mark.usefixtures("one_look_at_each_import")

BUILTIN = PluginManager(entry_points=())
LIMIT_S = 30.0  # for probes that end: enough for a loaded machine


def outcomes(target, time_limit_s=None):
    """By name, what became of each check: None where it passed."""
    found = {}
    for check in platforms.checks(target, time_limit_s=time_limit_s):
        assert check.tier == "contract"
        assert check.name not in found
        try:
            found[check.name] = check.run(0)
        except Exception as error:
            found[check.name] = error
    return found


def failures(target, time_limit_s=LIMIT_S):
    """By name, the text of each check that failed; what could not be checked is left out."""
    return {
        name: str(error)
        for name, error in outcomes(target, time_limit_s).items()
        if error is not None and not isinstance(error, CannotRunError)
    }


@pytest.mark.parametrize("name", BUILTIN.platforms())
def test_every_built_in_probe_keeps_the_contract(name):
    (target,) = find_targets(name, BUILTIN)
    assert failures(target, None) == {}


def test_of_a_device_that_is_here_everything_is_checked():
    (target,) = find_targets("cpu", BUILTIN)
    skipped = {name: str(error) for name, error in outcomes(target).items() if error is not None}
    assert skipped == {"a device's problems say what is wrong; what mends it": "no device here has a problem."}


@pytest.mark.parametrize("name", BUILTIN.simulated_devices())
def test_every_built_in_simulated_device_keeps_the_contract(name):
    (target,) = find_targets(name, BUILTIN)
    assert outcomes(target) == dict.fromkeys(outcomes(target))


PROBES = """
import itertools, os, sys, time
from anyattn import Platform, ProbeResult

calls = itertools.count()


def device(**facts):
    facts = {"kind": "tpu", "vendor": "v", "name": "n", "arch": "a", "torch_device": "cpu", **facts}
    return Platform(**facts)


def tpu():
    gone = "torch_tpu is not installed; run `pip install torch-tpu`"
    return ProbeResult(
        devices=(device(torch_device="tpu:0", problems=(gone,)), device(memory_free_bytes=next(calls))),
        problems=("the fan is loud",),
    )


def without_hardware():
    return ProbeResult()


def talks():
    print("a word")
    os.write(1, b"and more")
    return tpu()


def hangs():
    time.sleep(600)


def raises():
    raise RuntimeError("no driver")


def exits():
    sys.exit(3)


def lists():
    return [device()]


def other_kind():
    return ProbeResult(devices=(device(kind="npu"),))


def pretends():
    return ProbeResult(devices=(device(simulated=True),))


def twice():
    return ProbeResult(devices=(device(), device(name="other")))


def changes():
    return ProbeResult(devices=(device(num_cores=1 + next(calls)),))


def helpless():
    return ProbeResult(devices=(device(problems=("the driver is too old",)),))


def mute():
    return ProbeResult(problems=(" ",))


def wordy():
    return ProbeResult(problems=("a traceback\\nof two lines",))


class Loose(Platform):
    __setattr__ = object.__setattr__


def loose():
    facts = device()
    return ProbeResult(devices=(Loose(**{name: getattr(facts, name) for name in Platform.__slots__}),))


class Private(Platform):
    def to_json(self):
        return {**super().to_json(), "handle": object()}


def private():
    facts = device()
    return ProbeResult(devices=(Private(**{name: getattr(facts, name) for name in Platform.__slots__}),))


def starts_torch():
    import torch

    return tpu()


started_by = []


def starts_a_driver():
    started_by.append(os.getpid())
    if started_by[0] != os.getpid():
        raise RuntimeError("cannot be started again in a forked process")
    return tpu()


def crashes_when_forked():
    started_by.append(os.getpid())
    if started_by[0] != os.getpid():
        os.kill(os.getpid(), 11)
    return tpu()


def wants_home():
    return ProbeResult(devices=(device(name=os.environ["HOME"]),))


number = 3
"""

FORKED = "it finds the same in a forked process"
RESULT = "it returns a ProbeResult within the time limit of all probes"
MUTANTS = {
    "other_kind": (
        "its devices are of the kind that it is offered for",
        "of kind 'npu', and the probe is offered for 'tpu'",
    ),
    "pretends": ("its devices are not simulated", "cpu (n, a) is simulated: offer it in anyattn_simulated_devices"),
    "twice": ("its devices differ in torch_device", "several devices are cpu to torch"),
    "helpless": (
        "a device's problems say what is wrong; what mends it",
        "'the driver is too old' keeps a device from being used and does not say what mends that",
    ),
    "mute": ("the problems are lines of text", "' ' is a problem's text: it is one line"),
    "wordy": ("the problems are lines of text", "of two lines' is a problem's text: it is one line"),
    "loose": ("its devices are frozen", "Loose.kind can be assigned"),
    "private": (
        "its devices can be written as JSON",
        "Private.to_json() gives no JSON values (TypeError: Object of type",
    ),
    "starts_torch": ("it runs without importing torch", "the probe imports torch: detection starts no device"),
    "starts_a_driver": (FORKED, "RuntimeError: cannot be started again in a forked process"),
    "crashes_when_forked": (FORKED, "the probe ended a forked process with status -11"),
    "wants_home": ("it runs without any environment variable", "KeyError: 'HOME'"),
}
"""By the probe's name: the check that fails, and what it says."""

BROKEN = {
    "raises": "the probe raised RuntimeError: no driver: what it cannot tell belongs into the result's problems.",
    "exits": "the probe raised RuntimeError: SystemExit: 3: what",
    "lists": "which is no anyattn.ProbeResult.",
}
"""Probes of which nothing else can be checked, and what the first check says."""


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """The target of one of these probes, as a plugin offers it for the kind tpu."""
    (tmp_path / "kit_probes.py").write_text(PROBES)
    monkeypatch.syspath_prepend(tmp_path)

    def target(name):
        if name == "starts_torch":  # the real one takes seconds in each of the processes that ask the probe
            (tmp_path / "torch.py").touch()
            monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch") or ModuleType("torch"))
        place = f"kit_probes:{name}"
        offer = Offer(name="tpu", target=place, plugin="tpus", distribution="tpus")
        return Target(kind="platform", name="tpu", place=place, loaded=offer.load(), offer=offer)

    yield target
    sys.modules.pop("kit_probes", None)


@pytest.mark.parametrize("name", ["tpu", "without_hardware", "talks"])
def test_a_probe_that_keeps_the_contract_fails_nothing(probe, name):
    assert failures(probe(name)) == {}


def test_where_no_device_is_found_what_is_about_devices_cannot_be_checked(probe):
    texts = [str(error) for error in outcomes(probe("without_hardware"), LIMIT_S).values() if error is not None]
    assert texts.count("the probe finds no device here.") == 7


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_the_check_that_names_what_is_wrong_and_no_other(probe, name):
    found = failures(probe(name))
    check, text = MUTANTS[name]
    assert list(found) == [check]
    assert text in found[check]


@pytest.mark.parametrize("name", BROKEN)
def test_a_probe_without_a_result_fails_the_check_of_the_result(probe, name):
    text = failures(probe(name))[RESULT]
    assert BROKEN[name] in text


def test_a_probe_that_finds_something_else_each_time_is_told_so(probe):
    found = failures(probe("changes"))
    assert "it finds the same when it is asked again" in found
    assert RESULT not in found


def test_a_probe_that_hangs_is_left_behind_at_the_time_limit(probe):
    found = failures(probe("hangs"), 0.3)
    assert found[RESULT] == "the probe did not end within 0.3 s, which all probes have together."
    assert "TimeLimitError" in found["it runs without importing torch"]


def test_what_is_no_function_is_told_so(probe):
    assert "'int' object is not callable" in failures(probe("number"))[RESULT]


def test_without_a_plugin_the_kind_and_the_contract_version_cannot_be_checked(probe):
    found = outcomes(dataclasses.replace(probe("tpu"), offer=None), LIMIT_S)
    assert "not offered by an installed plugin" in str(found["its devices are of the kind that it is offered for"])
    assert "not offered by an installed plugin" in str(found["its plugin states this contract version"])


def test_the_time_limit_is_that_of_detection(monkeypatch):
    limits = []
    real = platforms.run_side_by_side
    monkeypatch.setattr(
        platforms, "run_side_by_side", lambda probes, limit: limits.append(limit) or real(probes, limit)
    )
    (target,) = find_targets("cpu", BUILTIN)
    outcomes(target)
    assert set(limits) == {BUILTIN.time_limit_s}


class LooseDevice(type(simulated.H100)):
    __setattr__ = object.__setattr__


def like_h100(kind, **changes):
    facts = {field.name: getattr(simulated.H100, field.name) for field in dataclasses.fields(simulated.H100)}
    return kind(**{**facts, **changes})


SIMULATED = {
    "real": (
        like_h100(type(simulated.H100), simulated=False),
        "is a Platform with simulated=True",
        "is a Platform with",
    ),
    "troubled": (like_h100(type(simulated.H100), problems=("p; q",)), "it has no problems", "has problems (p; q)"),
    "loose": (like_h100(LooseDevice), "its facts are frozen", "LooseDevice.kind can be assigned"),
    "no device": (3, "is a Platform with simulated=True", "is 3: a simulated device is a Platform with simulated=True"),
}


@pytest.mark.parametrize("what", SIMULATED)
def test_a_simulated_device_that_is_none_fails_the_check_that_names_it(what):
    loaded, name, text = SIMULATED[what]
    place = "anyattn.platforms.simulated:H100"
    found = failures(Target(kind="simulated device", name="h100", place=place, loaded=loaded))
    assert list(found) == [name]
    assert text in found[name]


def test_a_process_that_cannot_fork_is_no_failure(probe, monkeypatch):
    monkeypatch.delattr(os, "fork")
    assert "cannot fork" in str(outcomes(probe("tpu"), LIMIT_S)[FORKED])

"""What all probes ask of the host alike: the installed torch, and what mends it for each kind of device."""

import gc
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from anyattn.platforms import host
from anyattn.plugins.manager import PluginManager

PLUGINS = PluginManager(entry_points=[])


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of its own to import torch from."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch").mkdir()
    return tmp_path / "torch"


def test_every_built_in_kind_of_device_knows_how_its_torch_is_installed():
    assert host.TORCH_REMEDIES.keys() == PLUGINS.platforms().keys()
    for offer in PLUGINS.simulated_devices().values():
        device = offer.load()
        assert device.torch_remedy == host.TORCH_REMEDIES[device.kind]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), ("1,2,4-5", {1, 2, 4, 5}), ("", set()), ("0-1,3\n", {0, 1, 3})],
)
def test_lists_as_linux_writes_them_are_read_and_written(text, numbers):
    assert host.numbers(text) == numbers
    assert host.numbers(host.number_list(numbers)) == numbers


def test_a_list_is_written_as_short_as_linux_writes_it():
    assert host.number_list({8, 3, 2, 1, 0}) == "0-3,8"
    assert host.number_list({1, 2, 4}) == "1-2,4"
    assert host.number_list(set()) == ""


@pytest.mark.parametrize("text", ["x", "0-", "3-x", "0-99999999999"])
def test_what_is_no_such_list_is_refused(text):
    with pytest.raises(ValueError, match="no list of CPUs or nodes"):
        host.numbers(text)


@pytest.mark.parametrize("kind", host.TORCH_REMEDIES)
def test_a_torch_that_is_missing_or_damaged_is_a_problem_of_every_kind(site, kind):
    (problem,) = host.torch_problems(kind)
    assert problem == f"torch is not installed; {host.TORCH_REMEDIES[kind]}"
    (site / "__init__.py").write_text("")
    (problem,) = host.torch_problems(kind)
    assert problem.startswith("the installed torch is damaged")
    assert problem.endswith(host.TORCH_REMEDIES[kind])
    (site / "version.py").write_text("__version__ = '2.9.0'")
    assert host.torch_problems(kind) == ()


class _Garbage:
    """Its end runs Python code in the middle of whatever is being allocated, where threads may change."""

    def __init__(self):
        self.itself = self

    def __del__(self):
        for _ in range(50):
            pass


def test_probes_side_by_side_never_take_a_whole_torch_for_a_damaged_one():
    def build(depth):
        if depth:
            return build(depth - 1)
        for _ in range(50):
            _Garbage()
        return host.torch_build()

    thresholds, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(5, 2, 2)
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as threads:
            builds = list(threads.map(build, [number % 40 for number in range(3000)]))
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
    assert not any(found.is_damaged for found in builds)

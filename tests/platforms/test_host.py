"""What all probes ask of the host alike: the installed torch, and what mends it for each kind of device."""

import sys

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

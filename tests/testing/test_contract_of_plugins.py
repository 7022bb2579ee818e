"""The kit's contract tier looks into an installed plugin: its contract version, and what its modules import."""

import importlib
import os
import sys

import pytest

from anyattn.plugins.manager import PluginManager
from anyattn.testing.check import CannotRunError
from anyattn.testing.contract import backends as backend_contract
from anyattn.testing.target import find_targets


def outcomes(target):
    """By name, what became of each check: None where it passed."""
    found = {}
    for check in backend_contract.checks(target):
        try:
            found[check.name] = check.run(0)
        except Exception as error:
            found[check.name] = error
    return found


def failures(target):
    """By name, the text of each check that failed; what could not be checked is left out."""
    return {
        name: str(error)
        for name, error in outcomes(target).items()
        if error is not None and not isinstance(error, CannotRunError)
    }


BACKEND = """
import dataclasses
from anyattn.attention.torch_native import TorchNativeBackend

class Theirs(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, packages=("torch>=2.9", "vendor-kernels>=1"))
"""
OFFER = """
import anyattn
{version}
@anyattn.hookimpl
def anyattn_attention_backends():
    return {{"theirs": "theirs.backend:Theirs"}}
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Installs a distribution "theirs" with a backend and a plugin, beside vendor-kernels with vendor_kernels."""
    monkeypatch.syspath_prepend(tmp_path)

    def metadata(name, *entry_points, top_level=""):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("\n".join(["[anyattn.plugins]", *entry_points]))
        (folder / "top_level.txt").write_text(top_level)

    def install(*, backend=BACKEND, version="contract_version = 1", plugin="", find="theirs"):
        package = tmp_path / "theirs"
        package.mkdir()
        (package / "backend.py").write_text(backend)
        (package / "__init__.py").write_text("")
        (tmp_path / "theirs_plugin.py").write_text(plugin + OFFER.format(version=version))
        (tmp_path / "vendor_kernels.py").write_text("")
        metadata("theirs", "theirs = theirs_plugin", top_level="theirs\ntheirs_plugin")
        metadata("vendor-kernels", top_level="vendor_kernels")
        importlib.invalidate_caches()
        (target,) = find_targets(find, PluginManager())
        return target

    before = set(sys.modules)
    yield install
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("theirs", "theirs_plugin", "vendor_kernels"):
            del sys.modules[name]


def test_an_installed_plugins_backend_keeps_the_contract(installed):
    target = installed()
    assert target.offer is not None
    assert outcomes(target) == dict.fromkeys(outcomes(target))


MODULE = "its module is imported without torch and the packages it names"
PLUGIN = "its plugin is imported without torch and the packages it names"


@pytest.mark.parametrize(
    ("name", "files", "text"),
    [
        (
            MODULE,
            {"backend": f"import torch\n{BACKEND}"},
            "importing theirs.backend:Theirs imports torch",
        ),
        (
            MODULE,
            {"backend": f"import vendor_kernels\n{BACKEND}"},
            "theirs.backend:Theirs imports vendor_kernels: what",
        ),
        (MODULE, {"backend": f"import triton.language\n{BACKEND}"}, "theirs.backend:Theirs imports triton: what"),
        (PLUGIN, {"plugin": "import torch\n"}, "importing theirs_plugin imports torch"),
        (PLUGIN, {"plugin": "import vendor_kernels\n"}, "importing theirs_plugin imports vendor_kernels: what"),
    ],
    ids=["torch", "a vendor's package", "Triton", "torch by the plugin", "a vendor's package by the plugin"],
)
def test_an_import_of_what_is_not_on_every_machine_is_named(installed, name, files, text):
    found = failures(installed(**files))
    assert list(found) == [name]
    assert text in found[name]


def test_what_a_module_prints_or_does_in_this_process_changes_nothing_in_the_fresh_one(installed):
    backend = f"import os, sys\nprint('a word')\nos.write(1, b'and more')\n{BACKEND}"
    assert failures(installed(backend=backend)) == {}


def test_a_module_that_raises_in_a_fresh_process_is_told_so(installed):
    backend = f"import os\nif os.getpid() != {os.getpid()}: raise SystemExit('not here')\n{BACKEND}"
    found = failures(installed(backend=backend))
    assert list(found) == [MODULE]
    assert "in a fresh process: RuntimeError: SystemExit: not here" in found[MODULE]


def test_a_module_that_ends_a_fresh_process_is_told_so(installed):
    backend = f"import os\nif os.getpid() != {os.getpid()}: os._exit(7)\n{BACKEND}"
    found = failures(installed(backend=backend))
    assert list(found) == [MODULE]
    assert "a fresh process ended with status 7" in found[MODULE]


VERSION = "its plugin states this contract version"


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("", "plugin theirs (theirs 1.0) states no contract version: set contract_version = 1 in it."),
        (
            "contract_version = 2",
            "is written for contract version 2, and this anyattn has 1: run `pip install --upgrade",
        ),
    ],
    ids=["none", "another"],
)
def test_a_plugin_of_another_contract_version_is_told_though_its_offers_are_then_refused(installed, version, text):
    target = installed(version=version, find="theirs.backend:Theirs")
    assert target.offer is None
    found = failures(target)
    assert list(found) == [VERSION]
    assert text in found[VERSION]


def test_what_no_plugin_offers_has_no_contract_version_to_check(installed):
    target = installed(find="theirs.backend:TorchNativeBackend")
    found = outcomes(target)
    assert "not offered by an installed plugin" in str(found[VERSION])
    assert "not offered by an installed plugin" in str(found[PLUGIN])
    assert {type(error) for error in found.values()} == {type(None), CannotRunError}

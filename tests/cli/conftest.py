"""How the tests of the command line run it: in this process, on the CPU, with an environment of their own."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import pytest

from anyattn import Platform, ProbeResult, hookimpl
from anyattn.cli import main


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch):
    """So that what is chosen does not depend on the machine that runs the tests."""
    for name in list(os.environ):
        if name.startswith("ANYATTN_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ANYATTN_PLATFORM", "cpu")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("MKL_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def anyattn(capsys) -> Callable[..., Ended]:
    """Runs the command line; capsys is no terminal, so this is what a pipe gets."""

    def run(*argv: str) -> Ended:
        capsys.readouterr()
        code = main(argv)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


@pytest.fixture
def stranger(tmp_path, monkeypatch) -> Callable[..., None]:
    """Installs a plugin whose probes find these devices, and that offers these backends; its probes run `at_probe`."""

    def install(
        *devices: Platform,
        problems: tuple[str, ...] = (),
        backends: dict[str, type] | None = None,
        at_probe: Callable[[], object] = lambda: None,
    ) -> None:
        def probe(kind):
            at_probe()
            found = tuple(device for device in devices if device.kind == kind)
            return ProbeResult(devices=found, problems=problems)

        kinds = dict.fromkeys([*(device.kind for device in devices), *(["nothing"] if problems or not devices else [])])
        plugin = ModuleType("stranger")
        offers = {
            "anyattn_platforms": {kind: f"stranger:probe_{kind}" for kind in kinds},
            "anyattn_attention_backends": {name: f"stranger:{name}" for name in backends or {}},
        }
        for hook, names in offers.items():
            setattr(plugin, hook, hookimpl(specname=hook)(lambda names=names: names))
        found = {f"probe_{kind}": functools.partial(probe, kind) for kind in kinds}
        vars(plugin).update({"contract_version": 1, "__file__": "stranger.py", **found, **(backends or {})})
        folder = tmp_path / "stranger-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[anyattn.plugins]\nstranger = stranger\n")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setitem(sys.modules, "stranger", plugin)

    return install


@pytest.fixture
def isolated() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a fresh interpreter in which the hidden packages are neither importable nor installed."""
    return _isolated


_HIDE = """
import importlib.metadata as metadata, sys
hidden = {hidden!r}
class Hide:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide)
from_name = metadata.Distribution.from_name
def visible(name):
    if name in hidden:
        raise metadata.PackageNotFoundError(name)
    return from_name(name)
metadata.Distribution.from_name = visible
"""


def _isolated(script: str, *hidden: str) -> subprocess.CompletedProcess[str]:
    code = _HIDE.format(hidden=set(hidden)) + textwrap.dedent(script)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

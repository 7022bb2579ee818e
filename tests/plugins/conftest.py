"""How the tests install plugins: real packages with real metadata in a temporary folder on sys.path."""

from __future__ import annotations

import importlib
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest


class Site:
    """A folder like site-packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def module(self, name: str, source: str) -> None:
        """Writes a package of one file."""
        package = self.folder / name
        package.mkdir(exist_ok=True)
        (package / "__init__.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()

    def metadata(
        self,
        name: str,
        version: str = "1.0",
        *,
        entry_points: str | None = None,
        metadata: str | None = "",
        folder: str | None = None,
        direct_url: str | None = None,
    ) -> Path:
        """Writes a dist-info folder. entry_points: of the group; metadata: instead of the usual one, None for none."""
        info = self.folder / (folder or f"{name.replace('-', '_')}-{version}.dist-info")
        info.mkdir()
        usual = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        if metadata is not None:
            (info / "METADATA").write_text(metadata or usual)
        points = f"{name} = {name.replace('-', '_')}" if entry_points is None else entry_points
        (info / "entry_points.txt").write_text(f"[anyattn.plugins]\n{points}\n")
        if direct_url is not None:
            (info / "direct_url.json").write_text(direct_url)
        return info

    def plugin(self, name: str, source: str = "", *, contract_version: str | None = "1", **metadata: str) -> Path:
        """Writes a package and its metadata; the source goes on after the usual first lines."""
        head = "import anyattn\n" + ("" if contract_version is None else f"contract_version = {contract_version}\n")
        self.module(name.replace("-", "_"), head + textwrap.dedent(source))
        return self.metadata(name, **metadata)


@pytest.fixture
def hook():
    """The source of a hook that offers these."""
    return lambda name, **offers: f"\n@anyattn.hookimpl\ndef anyattn_{name}():\n    return {offers}\n"


@pytest.fixture(scope="session")
def site_at():
    """Makes a site folder of a folder that is on the path of another process only."""
    return Site


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[Site]:
    """An empty site folder, first on sys.path; what was imported from it is forgotten in the end."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield Site(folder)
    for name in set(sys.modules) - before:
        facts = vars(sys.modules[name])
        places = [facts.get("__file__"), *facts.get("__path__", ())]
        if any(Path(place).resolve().is_relative_to(folder.resolve()) for place in places if place):
            del sys.modules[name]


@pytest.fixture
def plugin_threads():
    """The threads that plugins' code of this test still runs in; other tests leave some behind for good."""
    before = set(threading.enumerate())
    return lambda: [each for each in threading.enumerate() if each.name == "anyattn plugin" and each not in before]

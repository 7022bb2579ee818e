"""What README.md shows works as printed."""

import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

import pytest

from anyattn import discovery
from anyattn.plugins.manager import PluginManager
from anyattn.settings import VARIABLES, Settings
from anyattn.testing.__main__ import main as kit

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def nothing_to_compile(monkeypatch):
    """What is chosen by itself depends on the machine, and may have kernels that are compiled in seconds."""
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "torch_native")


def test_the_python_of_the_readme_runs_as_printed(capsys, nothing_to_compile):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
        if "bind_mla" in block:
            assert scope["out"].shape == (7, 16, 128)
    assert "decode    torch_native: " in capsys.readouterr().out


def test_the_python_of_the_memory_page_runs_as_printed(capsys, nothing_to_compile):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/memory.md").read_text(), flags=re.DOTALL)
    scope = {}
    for block in blocks:
        exec(compile(block, "docs/memory.md", "exec"), scope)
    assert "96 of 100 tokens are there" in capsys.readouterr().out
    scope["rt"].table.check()
    scope["cache"].check()


def test_the_first_two_commands_of_the_readme_are_make_run_and_make_test():
    assert re.findall(r"^make \w+", README, flags=re.MULTILINE)[:2] == ["make run", "make test"]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"\]\(([^)]+)\)", README))))
def test_every_link_of_the_readme_leads_somewhere(name):
    assert (ROOT / name).exists()


def test_the_table_of_settings_names_exactly_the_variables_that_are_read():
    asked = set()

    class Recorder(dict):
        def get(self, key, default=None):
            asked.add(key)
            return default

    Settings.from_env(Recorder())
    documented = set(re.findall(r"`(ANYATTN_\w+)`", (ROOT / "docs/contract.md").read_text()))
    assert documented == asked == set(VARIABLES)


def test_the_support_matrix_is_what_the_declarations_say_and_every_choice_in_it_the_one_made_today():
    spec = importlib.util.spec_from_file_location("support", ROOT / "docs/support.py")
    support = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(support)
    assert (ROOT / "docs/support.md").read_text() == support.main(), "run `make docs` and look at what has changed"


def test_the_plugin_of_the_plugins_page_is_loaded_and_its_devices_are_told(tmp_path, monkeypatch, capsys):
    """Its numerics are the business of tests/plugins/test_example_plugin.py, which types the page's commands."""
    page = (ROOT / "docs/plugins.md").read_text()
    blocks = dict(re.findall(r"```python\n# mine/(mine/[^\n]*)\n(.*?)```", page, flags=re.DOTALL))
    assert sorted(blocks) == ["mine/__init__.py", "mine/backend.py", "mine/devices.py"]
    assert len(blocks["mine/backend.py"].splitlines()) <= 120
    (tmp_path / "mine").mkdir()
    for name, text in blocks.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("mine", "mine", "anyattn.plugins")
    manager = PluginManager(entry_points=[point], strict=True)
    assert "mine" in {candidate.name for candidate in discovery.candidates(manager).backends}
    assert discovery.find_device(manager, "sim:mine1", discovery.detect(manager)).name == "Mine One"
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/mine0" or exists(path))
    mine = next(device for device in discovery.detect(manager).devices if device.kind == "mine")
    assert "pip install torch-mine" in mine.problems[0]
    assert kit(["mine.backend:Mine", "mine.devices:MINE1", "--tier", "contract"]) == 0, capsys.readouterr().out

"""What README.md shows works as printed."""

import re
from pathlib import Path

import pytest

from anyattn.settings import Settings

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_python_of_the_readme_runs_as_printed(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
    scope = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), scope)
        if "bind_mla" in block:
            assert scope["out"].shape == (7, 16, 128)
    assert "torch_native: priority" in capsys.readouterr().out


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
    assert documented == asked

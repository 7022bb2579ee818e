"""In an environment of its own, by the commands that the docs show: the page on plugins, what new-plugin writes, and
the example plugin.

The environment is made as a stranger would: `python -m venv`, then pip with a wheel of this checkout and torch as
constraints.txt pins it, both from the registry that pip is set up for. Nothing of the environment that runs the tests
is visible in it. That takes about twenty seconds where the packages are near, so there is no lighter variant. Python
compiles what it imports; pip, which would take longer than for all else to compile all of torch, is told not to.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/plugins.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples/anyattn-example-plugin"
KIT_TEST = "test_what_is_offered_passes_the_compliance_kit"

pytestmark = pytest.mark.slow


class Shell:
    """A folder, and an environment with anyattn's wheel for pip to find and nothing else in it."""

    def __init__(self, folder):
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self.environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ANYATTN_", "PYTHON", "PYTEST_", "VIRTUAL_ENV", "EXAMPLE_"))
        }
        self.environment["PIP_COMPILE"] = "0"
        self.environment["PATH"] = f"{folder / 'venv/bin'}{os.pathsep}{os.environ['PATH']}"
        self.run(f"{sys.executable} -m venv ../venv")
        self.require_registry()
        self.run(f"pip wheel --quiet --no-deps --wheel-dir ../wheels {ROOT}")
        (wheel,) = (folder / "wheels").glob("anyattn-*.whl")
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        (folder / "constraints.txt").write_text(f"{pins}\nanyattn=={wheel.name.split('-')[1]}\n", encoding="utf-8")
        for variable, value in (("PIP_CONSTRAINT", "constraints.txt"), ("PIP_FIND_LINKS", "wheels")):
            given = self.environment.get(variable, "")
            self.environment[variable] = f"{given} {folder / value}".strip()

    def run(self, script):
        """What a script of commands prints; fails, with all of it, unless each of them exits with 0."""
        ended = self.ended(script)
        assert ended.returncode == 0, f"{script}\n{ended.stdout}"
        return ended.stdout

    def ended(self, script):
        return subprocess.run(
            ["bash", "-euc", script],
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=600,
        )

    def require_registry(self):
        """What builds the packages has to come from somewhere. Where CI runs, it does."""
        ended = self.ended("pip download --quiet --no-deps --dest ../downloads hatchling")
        if ended.returncode and "CI" not in os.environ:
            pytest.skip(f"needs a package registry: {ended.stdout.strip()}")
        assert ended.returncode == 0, ended.stdout


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    return Shell(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def page(shell):
    """The page as a reader follows it: commands are typed, files are written. Gives what each command printed."""
    printed = {}
    for language, text in re.findall(r"```(\w+)\n(.*?)```", PAGE, flags=re.DOTALL):
        if language == "sh":
            for command in text.splitlines():
                printed.setdefault(command, []).append(shell.run(command))
        elif language == "python":
            first, _, text = text.partition("\n")
            (shell.work / first.removeprefix("# ")).write_text(text, encoding="utf-8")
    return printed


@pytest.fixture(scope="module")
def readme(shell, page):
    """What the commands of the example plugin's README print, typed beside a copy of its folder.

    One of its tests is left out: it runs the kit a second time, and has a test of its own below.
    """
    shutil.copytree(EXAMPLE, shell.work / EXAMPLE.name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (block,) = re.findall(r"```\n(.*?)```", (EXAMPLE / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return shell.run(f"export PYTEST_ADDOPTS='-k \"not {KIT_TEST}\"'\n{block}")


def test_anyattn_and_the_plugins_are_those_that_were_installed(shell, page):
    homes = {
        "anyattn": shell.folder / "venv",
        "torch": shell.folder / "venv",
        "mine": shell.work / "mine",
        "mine_npu": shell.work / "mine-npu",
        "mine_books": shell.work / "mine-books",
    }
    program = f"import {', '.join(homes)}; print({', '.join(f'{name}.__file__' for name in homes)}, sep=chr(10))"
    places = shell.run(f"python -c {shlex.quote(program)}").splitlines()
    for (name, home), place in zip(homes.items(), places, strict=True):
        assert Path(place).is_relative_to(home), name


def test_every_kind_of_plugin_passes_the_kit_as_new_plugin_writes_it(page):
    verified = {command: texts for command, texts in page.items() if command.startswith("anyattn verify mine")}
    for command in ("anyattn verify mine", "anyattn verify mine-npu", "anyattn verify mine-books"):
        assert re.search(r"^\d+ passed, 0 failed", verified[command][0], flags=re.MULTILINE), verified[command]


def test_the_expected_failures_of_the_page_are_named_as_the_kit_names_them(shell, page):
    (named,) = re.findall(r"# xfails.txt\n(.*?)  #", PAGE)
    assert f"mine:{named}" in shell.run("anyattn verify mine --list").splitlines()


def test_the_backend_of_the_page_is_chosen_by_its_priority_and_its_distribution_named(page):
    (text,) = page["anyattn backends --device cpu"]
    assert re.search(r"decode +mine: priority 30, from mine, declared", text), text


def test_what_is_offered_for_simulated_devices_is_told(page):
    assert "Mine One" in page["anyattn backends --device sim:mine1"][0]
    assert "torch_native" in page["anyattn backends --device sim:mine_npu1"][0]


@pytest.mark.parametrize("package", ["mine-npu", "mine-books"])
def test_the_test_that_new_plugin_writes_passes(shell, page, package):
    assert "1 passed" in shell.run(f"pytest -q {package}")


def test_the_example_plugin_does_what_its_readme_shows(readme):
    assert re.search(r"^total: \d+ passed, 0 failed", readme, flags=re.MULTILINE), readme
    assert readme.count("decode   example_gather: priority 30, from anyattn-example-plugin, emulated") == 2, readme
    assert readme.count("allocator example_lowest_first") == 2, readme
    assert re.search(r"^=+ \d+ passed, 1 deselected in ", readme, flags=re.MULTILINE), readme


def test_the_example_s_own_test_of_the_kit_fails_where_the_kit_does(shell, readme):
    """It asks the kit for what the README's second command does, which passes; here the plugin is not allowed."""
    ended = shell.ended(f"ANYATTN_PLUGINS=anyattn pytest anyattn-example-plugin -k {KIT_TEST}")
    assert ended.returncode == 1, ended.stdout
    assert re.search(r"^=+ 1 failed, \d+ deselected in ", ended.stdout, flags=re.MULTILINE), ended.stdout
    assert "error: 'example' is neither package.module:attribute nor what an installed plugin offers" in ended.stdout


def test_all_of_them_are_loaded_side_by_side_without_a_problem(shell, page, readme):
    text = shell.run("anyattn plugins")
    for name in ("anyattn", "example", "mine", "mine-books", "mine-npu"):
        assert re.search(rf"^{name} .* loaded$", text, flags=re.MULTILINE), text

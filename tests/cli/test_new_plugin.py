"""`anyattn new-plugin`: what it writes, what it prints to type next, and what it refuses without writing anything."""

from __future__ import annotations

import pytest

from anyattn.scaffold.package import PLUGIN_KINDS

COMMON = {"README.md", "pyproject.toml", "tests/test_compliance.py", "acme_attention/__init__.py"}
OWN = {"backend": "backend.py", "platform": "devices.py", "allocator": "allocator.py"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def refused(anyattn, here, *argv):
    """The text of the refusal; nothing was written."""
    before = files(here)
    ended = anyattn("new-plugin", *argv)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: ")
    assert files(here) == before
    return ended.err


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_a_package_is_written_and_the_next_commands_are_printed(anyattn, here, kind):
    ended = anyattn("new-plugin", "Acme.Attention", "--kind", kind)
    assert (ended.code, ended.err) == (0, "")
    written = {*COMMON, f"acme_attention/{OWN[kind]}"}
    assert files(here / "Acme.Attention") == written
    *wrote, empty, title, install, verify, test = ended.out.splitlines()
    assert sorted(wrote) == sorted(f"wrote Acme.Attention/{path}" for path in written)
    assert (empty, title) == ("", "next")
    assert install == "  pip install -e './Acme.Attention[test]'"
    assert verify == "  anyattn verify Acme.Attention"
    assert test == "  pytest ./Acme.Attention"


def test_another_folder_is_made_with_those_around_it_and_quoted_for_the_shell(anyattn, here):
    ended = anyattn("new-plugin", "acme-attention", "--kind", "backend", "--path", str(here / "a b" / "c"))
    assert ended.code == 0
    assert files(here / "a b" / "c") > COMMON
    assert f"  pip install -e '{here}/a b/c[test]'" in ended.out
    assert not (here / "acme-attention").exists()


def test_an_empty_folder_is_filled(anyattn, here):
    (here / "acme-attention").mkdir()
    assert anyattn("new-plugin", "acme-attention", "--kind", "backend").code == 0
    assert files(here / "acme-attention") > COMMON


def test_a_folder_that_holds_something_is_left_alone(anyattn, here):
    (here / "acme").mkdir()
    (here / "acme" / "kernel.cu").write_text("mine")
    text = refused(anyattn, here, "acme", "--kind", "backend")
    assert "acme is there already, and not an empty folder: name another with --path" in text
    assert (here / "acme" / "kernel.cu").read_text() == "mine"


def test_a_file_in_the_way_is_left_alone(anyattn, here):
    (here / "acme").write_text("mine")
    assert "is there already" in refused(anyattn, here, "acme", "--kind", "backend")
    text = refused(anyattn, here, "acme-attention", "--kind", "backend", "--path", "acme/inner")
    assert "acme/inner cannot be written" in text
    assert (here / "acme").read_text() == "mine"


@pytest.mark.parametrize("name", ["", "a b", "acme/attention", "-acme", "acme-", "..", "acme\n", "açme", "acme;rm"])
def test_what_no_distribution_may_be_called_is_refused_with_the_rule(anyattn, here, name):
    text = refused(anyattn, here, "--kind", "backend", "--", name)
    assert f"{name!r} cannot name a package: names are ASCII letters, digits" in text


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("anyattn", "anyattn is anyattn itself"),
        ("AnyAttn", "anyattn is anyattn itself"),
        ("tests", "tests is the folder of its tests"),
        ("random", "random is a module of Python itself"),
        ("torch_native", "torch_native is the name of something that anyattn itself offers"),
        ("torch", "torch is installed here already"),
        ("numpy", "numpy is installed here already"),
        ("3d-attention", "Python cannot import '3d_attention'. Begin with a letter"),
        ("class", "Python cannot import 'class'"),
    ],
)
def test_a_name_that_could_not_be_imported_or_is_anothers_is_refused(anyattn, here, name, reason):
    assert reason in refused(anyattn, here, name, "--kind", "backend")


def test_a_plugin_that_is_installed_may_be_written_anew(anyattn, here, stranger):
    stranger()
    assert anyattn("new-plugin", "stranger", "--kind", "backend").code == 0


@pytest.mark.parametrize("argv", [["acme"], ["acme", "--kind", "kernel"], ["--kind", "backend"]], ids=str)
def test_wrong_usage_exits_2_and_writes_nothing(anyattn, here, argv):
    ended = anyattn("new-plugin", *argv)
    assert (ended.code, ended.out) == (2, "")
    assert files(here) == set()


def test_it_imports_no_torch(isolated):
    run = isolated("from anyattn.cli import main\nmain(['new-plugin', 'acme', '--kind', 'backend'])", "torch")
    assert "anyattn verify acme" in run.stdout

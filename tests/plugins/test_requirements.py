"""What a backend needs and has not: a reason with the command that mends it."""

import importlib.metadata
import sys

import pytest

from anyattn.plugins.requirements import check_entry, missing_packages, missing_programs, package_names


def test_what_is_here_is_no_reason():
    assert missing_packages(["packaging>=1", "nonesuch; python_version < '3'"], "") == ()


def test_what_is_missing_or_too_old_names_the_extra_that_brings_it():
    absent, old = missing_packages(["nonesuch>=2", "packaging>=9999"], "cuda")
    assert (absent.supported, absent.remedy) == ("not installed", 'pip install "anyattn[cuda]"')
    assert old.supported == f"{importlib.metadata.version('packaging')} is installed"
    assert missing_packages(["nonesuch>=2"], "")[0].remedy == 'pip install "nonesuch>=2"'


@pytest.mark.parametrize("metadata", [b"Metadata-Version: 2.1\nName: broken\n", b"\xff\xfe", b""])
def test_metadata_that_is_damaged_is_mended_by_installing_again(tmp_path, monkeypatch, metadata):
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_bytes(metadata)
    monkeypatch.syspath_prepend(tmp_path)
    (reason,) = missing_packages(["broken>=1"], "cuda")
    assert reason.remedy == "pip install --force-reinstall broken"


def test_a_program_is_looked_for_on_the_path_by_its_variable_first(tmp_path, monkeypatch):
    program = tmp_path / "compiler"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MINE", raising=False)
    assert missing_programs(["compiler", "$MINE|compiler"]) == ()
    monkeypatch.setenv("MINE", "another")
    (reason,) = missing_programs(["$MINE|compiler"])
    assert (reason.field, reason.wanted, reason.supported) == ("program", "another", "not on the PATH")
    assert reason.remedy == "install another, or set MINE to another"
    assert missing_programs(["nonesuch"])[0].remedy == "install nonesuch"


def test_one_of_several_alternatives_is_enough():
    assert missing_packages(["nonesuch>=2 | module:nonesuch | packaging>=1"], "") == ()
    (reason,) = missing_packages(["nonesuch>=2 | module:nonesuch.kernels"], "fa3")
    assert (reason.wanted, reason.supported) == ("nonesuch>=2 or nonesuch.kernels", "not installed")
    assert reason.remedy == 'pip install "anyattn[fa3]"'


def test_an_alternative_for_another_environment_is_none_here():
    elsewhere = "nonesuch; python_version < '3'"
    assert missing_packages([elsewhere, f"{elsewhere} | packaging"], "") == ()
    assert [r.wanted for r in missing_packages([f"{elsewhere} | alsonone"], "")] == ["alsonone"]
    (reason,) = missing_packages(["nonesuch>=2; python_version >= '3'"], "")
    assert reason.remedy == 'pip install "nonesuch>=2"'


def test_a_module_is_found_without_importing_the_package_that_it_lies_in(tmp_path, monkeypatch):
    package = tmp_path / "loud_package" / "inner"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "kernels.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert missing_packages(["module:loud_package.inner.kernels"], "") == ()
    assert [r.wanted for r in missing_packages(["module:loud_package.other", "module:loud_package.inner.a.b"], "")] == [
        "loud_package.other",
        "loud_package.inner.a.b",
    ]
    assert "loud_package" not in sys.modules
    (tmp_path / "mere_folder").mkdir()
    assert [r.wanted for r in missing_packages(["module:mere_folder"], "")] == ["mere_folder"]


def test_entries_that_cannot_be_read_are_told():
    assert package_names(["torch>=2.9 | module:a.b | triton"]) == ["torch", "triton"]
    check_entry("torch>=2.9 | module:a.b")
    for entry in ("module:a..b", "module:", ">=2", "torch>=2.9 | "):
        with pytest.raises(ValueError):  # noqa: PT011
            check_entry(entry)

"""What a backend needs and has not: a reason with the command that mends it."""

import importlib.metadata

import pytest

from anyattn.plugins.requirements import missing_packages, missing_programs


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

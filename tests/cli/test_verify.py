"""`anyattn verify`: what it prints and its exit codes, in this process and from a vendor's folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import types
import xml.etree.ElementTree as ET

import pytest

from anyattn.attention.reference import ReferenceBackend
from anyattn.testing import suite
from anyattn.testing.__main__ import main as module
from anyattn.testing.check import CannotRunError, Check, CheckFailedError, Measured

FACTS = {"name", "kind", "place", "distribution", "version", "plugin", "contract_version", "device", "versions", "os"}
FACTS |= {"date", "seed", "command"}
CHECK_KEYS = {"id", "tier", "capability", "outcome", "message", "expected_to_fail", "error", "allowed", "seconds"}


def wrong(seed):
    raise CheckFailedError("the window is one token too long")


def unable(seed):
    raise CannotRunError("this torch has no float8")


CHECKS = (
    Check(tier="contract", name="says what it needs", capability="packages", run=lambda seed: None),
    Check(tier="numerics", name="plain", capability="dtypes", run=lambda seed: Measured(error=0.5, allowed=2.0)),
    Check(tier="numerics", name="sliding_window=33", capability="sliding_window", run=wrong),
    Check(tier="graph", name="lengths grow", capability="graph", run=unable),
)
GOOD = tuple(check for check in CHECKS if check.run is not wrong)


@pytest.fixture
def checks(monkeypatch):
    """Has every target pass these checks, the first of which needs no device."""

    def use(*found):
        monkeypatch.setattr(suite, "checks_for", lambda target, device: iter(found if device else found[:1]))

    return use


def rows(ended):
    return [" ".join(line.split()) for line in ended.out.splitlines()]


def test_a_target_that_passes_is_a_yes_with_a_report(anyattn, checks):
    checks(*GOOD)
    ended = anyattn("verify", "reference", "--seed", "7")
    assert (ended.code, ended.err) == (0, "")
    lines = rows(ended)
    assert lines[:3] == [
        "reference",
        "target reference (backend)",
        "place anyattn.attention.reference:ReferenceBackend",
    ]
    assert any(line.startswith("device cpu (") for line in lines)
    assert "repeat anyattn verify reference --device cpu --seed 7" in lines
    assert "| sliding_window | yes |" not in ended.out
    assert "| graph | " in ended.out
    assert "2 passed, 0 failed, 1 skipped (contract 1, numerics 1, graph 1)" in lines
    assert "largest error: 0.25 of what is allowed, in numerics/plain" in lines


def test_a_check_that_fails_is_shown_with_its_message_and_the_answer_is_no(anyattn, checks):
    checks(*CHECKS)
    ended = anyattn("verify", "anyattn.attention.reference:ReferenceBackend")
    assert (ended.code, ended.err) == (1, "")
    lines = rows(ended)
    assert lines[lines.index("failed: numerics/sliding_window=33") + 1] == "the window is one token too long"
    assert "| sliding_window | yes | 1 failed |" in lines


def test_the_json_holds_the_facts_the_declaration_and_every_check(anyattn, checks):
    checks(*CHECKS)
    ended = anyattn("verify", "reference", "--json", "--seed", "5")
    assert (ended.code, ended.err) == (1, "")
    document = json.loads(ended.out)
    (target,) = document.pop("targets")
    counts = {"passed": 2, "failed": 1, "skipped": 1, "xfailed": 0}
    assert document == {"anyattn_verify": 1, "stale": [], **counts, "ok": False}
    assert target.keys() == FACTS | {"capabilities", "checks", "not_run", "undeclared"}
    assert (target["distribution"], target["plugin"], target["device"]["kind"]) == ("anyattn", "anyattn", "cpu")
    assert target["versions"].keys() >= {"anyattn", "Python", "torch", "numpy"}
    assert target["capabilities"] == ReferenceBackend.capabilities.to_json()
    assert (target["not_run"], target["undeclared"], target["seed"]) == ([], None, 5)
    assert all(check.keys() == CHECK_KEYS for check in target["checks"])
    assert [check["outcome"] for check in target["checks"]] == ["passed", "passed", "failed", "skipped"]
    assert (target["checks"][1]["error"], target["checks"][1]["allowed"]) == (0.5, 2.0)
    assert target["checks"][3]["message"] == "this torch has no float8"


def test_a_seed_is_drawn_anew_and_a_given_one_repeats(anyattn, checks):
    seeds = []
    checks(Check(tier="contract", name="a", capability="a", run=seeds.append))
    for _ in range(2):
        assert anyattn("verify", "reference", "--tier", "contract").code == 0
    assert seeds[0] != seeds[1]
    assert anyattn("verify", "reference", "--tier", "contract", "--seed", str(seeds[0])).code == 0
    assert seeds[2] == seeds[0]


def test_the_ids_are_listed_and_nothing_runs(anyattn, checks):
    checks(*CHECKS)
    ended = anyattn("verify", "reference", "--list", "--tier", "numerics")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines() == ["numerics/plain", "numerics/sliding_window=33"]
    ended = anyattn("verify", "reference", "paged", "--list", "--only", "says")
    assert ended.out.splitlines() == ["reference:contract/says what it needs", "paged:contract/says what it needs"]
    (target,) = json.loads(anyattn("verify", "reference", "--list", "--json").out)["targets"]
    assert [check["id"] for check in target["checks"]] == [check.id for check in CHECKS]


def test_a_narrowed_run_says_how_it_is_repeated(anyattn, checks):
    checks(*CHECKS)
    ended = anyattn("verify", "reference", "--tier", "numerics", "--only", "PLAIN", "-x", "--seed", "1")
    assert ended.code == 0
    assert "anyattn verify reference --tier numerics --device cpu --only PLAIN --seed 1 --exit-first" in ended.out
    assert "1 passed, 0 failed, 0 skipped (numerics 1)" in ended.out


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--only", "nonesuch"], "reference has no check whose id holds 'nonesuch'"),
        (["--tier", "memory"], "reference has no check of memory;"),
        (["--device", "nonesuch"], "No device 'nonesuch' can be used here"),
        (["--device", "sim:h100"], "is simulated: nothing runs on it"),
        (["--junitxml", "/dev/null/junit.xml"], "/dev/null/junit.xml cannot be written"),
    ],
    ids=["only", "tier", "device", "simulated", "junitxml"],
)
def test_what_cannot_be_is_refused_in_a_sentence(anyattn, checks, options, wanted):
    checks(*GOOD)
    ended = anyattn("verify", "reference", *options)
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("error: ")
    assert wanted in ended.err


@pytest.mark.parametrize("target", ["nonesuch", "nonesuch:Backend", "anyattn.errors:SpecError"])
def test_a_target_that_is_none_is_refused(anyattn, target):
    ended = anyattn("verify", target, "--json")
    assert ended.code == 1
    assert json.loads(ended.out).keys() == {"error"}
    assert target in ended.err


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["reference", "--tier", "speed"],
        ["reference", "--seed", "-1"],
        ["reference", "--xfails", "no-such-file"],
        ["reference", "--junitxml", "."],
        ["paged", "--probe-undeclared"],
    ],
    ids=" ".join,
)
def test_wrong_usage_exits_2(anyattn, checks, options):
    checks(*GOOD)
    ended = anyattn("verify", *options)
    assert (ended.code, ended.out) == (2, "")
    assert "Usage: anyattn verify" in ended.err


def test_what_needs_another_device_is_not_run_and_the_answer_is_no_unless_the_contract_was_asked_for(anyattn, checks):
    checks(*GOOD)
    ended = anyattn("verify", "flashinfer")
    assert ended.code == 1
    assert "1 passed, 0 failed, 0 skipped (contract 1)" in ended.out
    assert "numerics, memory, graph, determinism" in ended.out
    tiers = "numerics, memory, graph, determinism"
    assert ended.err.startswith(f"error: flashinfer: {tiers} did not run: it does not run on cpu")
    assert "use a device of kind cuda" in ended.err
    assert "`--tier contract` checks what needs no device" in ended.err
    document = json.loads(anyattn("verify", "flashinfer", "--json", "--device", "cpu").out)
    assert document["ok"] is False
    assert document["targets"][0]["not_run"][0]["tiers"] == ["numerics", "memory", "graph", "determinism"]
    ended = anyattn("verify", "flashinfer", "--tier", "contract")
    assert (ended.code, ended.err) == (0, "")


def test_where_every_check_is_skipped_the_answer_is_no(anyattn, checks):
    checks(*GOOD)
    ended = anyattn("verify", "reference", "--tier", "graph")
    assert ended.code == 1
    assert "| graph | " in ended.out
    assert ended.err == "error: every check had to be skipped, so that nothing is known to hold.\n"


def test_a_plugins_name_stands_for_all_it_offers_and_there_is_a_total(anyattn, checks, stranger):
    stranger(backends={"one": ReferenceBackend, "two": ReferenceBackend})
    checks(*GOOD)
    ended = anyattn("verify", "stranger")
    assert ended.code == 0
    assert "from plugin stranger (stranger 1.0)" in rows(ended)
    assert "| --- | --- | --- |" in ended.out
    assert rows(ended)[-1].startswith(
        "total: 5 passed, 0 failed, 2 skipped (contract 3, numerics 2, graph 2), 3 targets"
    )


def test_expected_failures_are_no_failures_and_stale_ones_are(anyattn, checks, tmp_path):
    checks(*CHECKS)
    file = tmp_path / "xfails.txt"
    file.write_text("numerics/sliding_window=33  # off by one until 1.1\n")
    ended = anyattn("verify", "reference", "--xfails", str(file))
    assert (ended.code, ended.err) == (0, "")
    assert "numerics/sliding_window=33 is expected to fail: off by one until 1.1 |" in ended.out
    assert "2 passed, 0 failed, 1 skipped, 1 expected to fail" in ended.out
    file.write_text("numerics/sliding_window=32  # gone\nnumerics/sliding_window=33  # here\n")
    ended = anyattn("verify", "reference", "--xfails", str(file), "--json")
    document = json.loads(ended.out)
    assert (ended.code, document["ok"], document["failed"]) == (1, False, 0)
    assert "the closest is 'numerics/sliding_window=33'" in document["stale"][0]
    ended = anyattn("verify", "reference", "--xfails", str(file), "--only", "plain")
    assert ended.code == 1
    assert "line 1: there is no check 'numerics/sliding_window=32'" in ended.out
    file.write_text("numerics/sliding_window=33  # here\n")
    assert anyattn("verify", "reference", "--xfails", str(file), "--only", "plain").code == 0
    file.write_text("numerics/plain  # mended\n")
    ended = anyattn("verify", "reference", "--xfails", str(file), "--only", "plain")
    assert ended.code == 1
    assert f"expected to fail and passes: remove it from {file}" in ended.out
    file.write_text("numerics/plain\n")
    ended = anyattn("verify", "reference", "--xfails", str(file))
    assert (ended.code, ended.out) == (1, "")
    assert f"error: {file}, line 1: 'numerics/plain' has no reason" in ended.err


def test_what_works_though_it_is_not_declared_is_shown(anyattn, checks, monkeypatch):
    def probe(backend, device, seed):
        assert (backend, device.kind, seed) == (ReferenceBackend, "cpu", 7)
        tried = types.SimpleNamespace
        return [
            tried(field="head_dims", value="40", works=True, note="within 0.3 of what is allowed"),
            tried(field="alibi", value="True", works=False, note="off by 3"),
        ]

    monkeypatch.setitem(sys.modules, "anyattn.testing.undeclared.probes", types.SimpleNamespace(probe=probe))
    checks(*GOOD)
    ended = anyattn("verify", "reference", "--probe-undeclared", "--tier", "contract", "--seed", "7")
    lines = rows(ended)
    assert ended.code == 0
    assert lines[lines.index("works, but is not declared") + 1] == "head_dims 40 within 0.3 of what is allowed"
    assert lines[lines.index("is not declared, and does not work") + 1] == "alibi True off by 3"
    (target,) = json.loads(anyattn("verify", "reference", "--probe-undeclared", "--seed", "7", "--json").out)["targets"]
    assert [entry["works"] for entry in target["undeclared"]] == [True, False]


def test_ctrl_c_exits_130_quietly(anyattn, checks):
    def interrupted(seed):
        raise KeyboardInterrupt

    checks(Check(tier="contract", name="a", capability="a", run=interrupted))
    ended = anyattn("verify", "reference", "--tier", "contract")
    assert (ended.code, ended.out, ended.err) == (130, "", "")


def test_without_pytest_the_extra_that_brings_it_is_named(isolated):
    ended = isolated("from anyattn.cli import main; sys.exit(main(['verify', 'reference']))", "pytest")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith('error: the kit needs pytest: pip install "anyattn[kit]"')


def test_python_m_anyattn_testing_is_the_same_command(anyattn, checks, capsys):
    checks(*GOOD)
    assert module(["reference", "--list"]) == anyattn("verify", "reference", "--list").code == 0
    ended = subprocess.run(
        [sys.executable, "-m", "anyattn.testing", "--help"], capture_output=True, text=True, check=True
    )
    assert ended.stdout == anyattn("verify", "--help").out


DRIVER = """
    import os, sys
    from anyattn.testing import suite
    from anyattn.testing.check import Check, CheckFailedError, Measured
    import vendor

    def checks(target, device):
        assert target.loaded is vendor.Backend
        yield Check(tier="contract", name="prints", capability="packages", run=prints)
        yield Check(tier="numerics", name="drawn", capability="dtypes", run=drawn)
        yield Check(tier="numerics", name="wrong", capability="sinks", run=wrong)

    def prints(seed):
        print("from Python")
        os.write(1, b"from a library\\n")
        assert "PYTEST_ADDOPTS" not in os.environ

    def drawn(seed):
        return Measured(error=seed / 2**32, allowed=1.0)

    def wrong(seed):
        raise CheckFailedError("sinks are added twice")

    suite.checks_for = checks
    from anyattn.cli import main
    sys.exit(main(["verify", "vendor:Backend", *sys.argv[1:]]))
"""


@pytest.fixture
def foreign(tmp_path):
    """Runs the command in a vendor's folder, whose own pytest is set up in ways that would break any other."""
    folder = tmp_path / "vendor"
    folder.mkdir()
    (folder / "driver.py").write_text(textwrap.dedent(DRIVER))
    (folder / "vendor.py").write_text("from anyattn.attention.reference import ReferenceBackend as Backend\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\nnot_a_setting = 1\n")
    (folder / "conftest.py").write_text("raise RuntimeError('the conftest was read')\n")
    (folder / "test_mine.py").write_text("raise RuntimeError('the tests were collected')\n")
    environment = {**os.environ, "PYTEST_ADDOPTS": "--no-such-option", "PYTEST_PLUGINS": "no_such_plugin"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH", "")]))

    def run(*options, **streams):
        return subprocess.run(
            [sys.executable, "driver.py", *options],
            cwd=folder,
            env=environment,
            text=True,
            check=False,
            timeout=60,
            **({"capture_output": True} | streams),
        )

    run.folder = folder
    return run


def test_from_a_folder_with_a_pytest_of_its_own_the_json_is_all_of_stdout(foreign):
    ended = foreign("--json", "--junitxml", "out/junit.xml", "--seed", "9")
    document = json.loads(ended.stdout)
    assert ended.returncode == 1
    assert (document["passed"], document["failed"]) == (2, 1)
    assert sorted(ended.stderr.splitlines()) == ["from Python", "from a library"]
    suites = ET.parse(foreign.folder / "out/junit.xml").getroot()
    assert [case.get("classname") for case in suites.iter("testcase")] == [
        "Backend.contract",
        *["Backend.numerics"] * 2,
    ]
    assert [failure.get("message") for failure in suites.iter("failure")] == ["sinks are added twice"]
    left = {path.name for path in foreign.folder.iterdir()} - {"__pycache__"}
    assert left == {"driver.py", "vendor.py", "pytest.ini", "conftest.py", "test_mine.py", "out"}


def test_the_command_that_the_report_prints_repeats_the_run(foreign):
    first = foreign("--only", "drawn")
    assert first.returncode == 0
    assert first.stderr == ""
    (command,) = [line.split() for line in first.stdout.splitlines() if line.split()[:1] == ["repeat"]]
    assert command[1:4] == ["anyattn", "verify", "vendor:Backend"]
    assert foreign(*command[4:]).stdout == first.stdout


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_a_terminal_is_told_which_check_runs(foreign):
    import pty

    reader, writer = pty.openpty()
    ended = foreign("--only", "numerics/", capture_output=False, stdout=subprocess.PIPE, stderr=writer)
    os.close(writer)
    shown = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert ended.returncode == 1
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "0/2 numerics/drawn" in plain
    assert "1/2 numerics/wrong" in plain
    assert "numerics/wrong" in ended.stdout

"""Checks as pytest items, what is reported of them, expected failures, and where a target can run."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import pytest

from anyattn import Platform, discovery
from anyattn.attention.reference import ReferenceBackend
from anyattn.errors import ContractError, NoDeviceError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.pool import MHAPool
from anyattn.plugins.manager import PluginManager
from anyattn.testing import suite
from anyattn.testing.check import CannotRunError, Check, CheckFailedError, Measured
from anyattn.testing.command.report import Report, Run
from anyattn.testing.command.runner import run_checks
from anyattn.testing.command.verification import Devices, NotRun, Verification, prepare, reasons_against
from anyattn.testing.command.xfails import ExpectedFailures
from anyattn.testing.target import Target

CPU = discovery.usable_device("cpu")
CUDA = Platform(kind="cuda", vendor="nvidia", name="Some GPU", arch="sm90", torch_device="cuda:0")


def passing(seed):
    return None


def measuring(seed):
    return Measured(error=0.25 * seed, allowed=2.0)


def failing(seed):
    raise CheckFailedError("the LSE is in base 2, where the contract says natural")


def breaking(seed):
    raise ZeroDivisionError("inside the backend")


def leaving(seed):
    sys.exit("bye")


def unable(seed):
    raise CannotRunError("this torch has no float8")


def check(name, run, tier="numerics", capability="lse"):
    return Check(tier=tier, name=name, capability=capability, run=run)


def verification(*checks, name="mine", **fields):
    target = Target(kind="backend", name=name, place=f"mine.backend:{name}", loaded=ReferenceBackend)
    known = tuple(each.id for each in checks)
    return Verification(target=target, device=CPU, checks=checks, known=known, **fields)


def results(*checks, **options):
    return run_checks([verification(*checks)], seed=3, **options)[0]


def written(tmp_path, text):
    file = tmp_path / "xfails.txt"
    file.write_text(text)
    return file


def test_a_check_that_returns_has_passed_with_what_it_measured():
    first, second = results(check("a", passing), check("b", measuring))
    assert (first.result, first.message, first.measured) == ("passed", "", None)
    assert second.measured == Measured(error=0.75, allowed=2.0)


def test_what_a_check_finds_wrong_is_shown_without_a_traceback():
    (outcome,) = results(check("a", failing))
    assert outcome.result == "failed"
    assert outcome.message == "the LSE is in base 2, where the contract says natural"


def test_what_the_tested_code_raises_is_shown_with_its_traceback_and_none_of_the_kits_frames():
    (outcome,) = results(check("a", breaking))
    assert outcome.result == "failed"
    assert outcome.message.startswith("Traceback (most recent call last):")
    assert "in breaking" in outcome.message
    assert outcome.message.endswith("ZeroDivisionError: inside the backend")
    assert "pytest" not in outcome.message
    assert outcome.message.count("File ") == 1


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (SystemExit("bye"), "SystemExit: bye"),
        (pytest.skip.Exception("no"), "Skipped: no"),
        (pytest.exit.Exception("out"), "pytest.exit: out"),
    ],
    ids=["SystemExit", "pytest.skip", "pytest.exit"],
)
def test_the_tested_code_can_neither_end_the_run_nor_skip_a_check(raised, shown):
    def run(seed):
        raise raised

    first, second = results(check("a", run), check("b", passing))
    assert (first.result, second.result) == ("failed", "passed")
    assert shown in first.message


def test_a_check_that_cannot_be_made_is_skipped_with_its_reason():
    (outcome,) = results(check("a", unable))
    assert (outcome.result, outcome.message) == ("skipped", "this torch has no float8")


def test_every_check_gets_the_seed():
    seeds = []
    results(check("a", seeds.append), check("b", seeds.append))
    assert seeds == [3, 3]


def test_ctrl_c_ends_the_run():
    def run(seed):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        results(check("a", run), check("b", passing))


def test_exit_first_ends_at_the_first_failure_and_what_is_left_is_told():
    found = verification(check("a", passing), check("b", failing), check("c", passing), check("d", passing, "graph"))
    (outcomes,) = run_checks([found], seed=3, exit_first=True)
    assert [outcome.result for outcome in outcomes] == ["passed", "failed"]
    report = Report(verification=found, outcomes=tuple(outcomes), seed=3, command="")
    assert report.not_run == (
        NotRun(tiers=("numerics", "graph"), reason="the run ended at a failure before; 2 checks did not run"),
    )


def test_a_device_that_is_lost_ends_the_run_and_what_is_left_is_told(monkeypatch):
    monkeypatch.setattr("anyattn.testing.command.runner.answers", lambda device: False)
    found = verification(check("a", breaking), check("b", passing))
    (outcomes,) = run_checks([found], seed=3)
    (outcome,) = outcomes
    assert outcome.result == "failed"
    assert "does not answer any more: a kernel read or wrote where it must not" in outcome.message
    report = Report(verification=found, outcomes=tuple(outcomes), seed=3, command="")
    assert [entry.tiers for entry in report.not_run] == [("numerics",)]


def test_progress_is_told_what_is_done_and_what_is_next():
    told = []
    results(check("a", passing), check("b", failing), started=lambda done, name: told.append((done, name)))
    assert told == [(0, "numerics/a"), (1, "numerics/b")]


def test_the_environment_of_a_pytest_around_it_stays_as_it_was(monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    monkeypatch.setenv("PYTEST_PLUGINS", "no_such_plugin")
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", raising=False)
    before = dict(os.environ)
    assert [outcome.result for outcome in results(check("a", passing))] == ["passed"]
    assert dict(os.environ) == before


def test_the_junit_file_has_a_test_case_for_each_check(tmp_path):
    file = tmp_path / "junit.xml"
    expected = ExpectedFailures.read(written(tmp_path, "numerics/known  # a bug\nnumerics/mended  # a bug\n"))
    checks = [check(*pair) for pair in (("m=1", measuring), ("w", failing), ("b", breaking), ("u", unable))]
    checks += [check("known", failing), check("mended", passing)]
    both = [verification(*checks), verification(check("x", passing, "contract"), name="other")]
    run_checks(both, seed=4, expected=expected, junitxml=file)
    cases = {(case.get("classname"), case.get("name")): case for case in ET.parse(file).iter("testcase")}
    assert [*cases] == [
        *(("mine.numerics", name) for name in ("m=1", "w", "b", "u", "known", "mended")),
        ("other.contract", "x"),
    ]
    by_name = {name: case for (_, name), case in cases.items()}
    measured = {entry.get("name"): entry.get("value") for entry in by_name["m=1"].iter("property")}
    assert measured == {"error": "1.0", "allowed": "2.0"}
    assert by_name["w"].find("failure").text == "the LSE is in base 2, where the contract says natural"
    assert "ZeroDivisionError" in by_name["b"].find("failure").text
    assert by_name["u"].find("skipped").get("message") == "this torch has no float8"
    assert by_name["known"].find("skipped").get("message") == "a bug"
    assert "expected to fail and passes" in by_name["mended"].find("failure").text


def test_an_expected_failure_is_none_and_one_that_passes_is(tmp_path):
    file = written(tmp_path, "# known\n\nnumerics/a  # issue 7\nnumerics/b  # issue 8\nnumerics/c   #  issue 9\n")
    expected = ExpectedFailures.read(file)
    checks = (check("a", failing), check("b", passing), check("c", unable), check("d", passing))
    outcomes = results(*checks, expected=expected)
    assert [outcome.result for outcome in outcomes] == ["xfailed", "xpassed", "skipped", "passed"]
    assert [outcome.expected for outcome in outcomes] == ["issue 7", "issue 8", "issue 9", None]
    assert outcomes[0].message == "the LSE is in base 2, where the contract says natural"
    assert outcomes[1].message == f"expected to fail and passes: remove it from {file}"
    report = Report(verification=verification(*checks), outcomes=tuple(outcomes), seed=3, command="")
    assert not Run(reports=(report,)).ok
    assert report.summary() == "1 passed, 1 failed, 1 skipped, 1 expected to fail (numerics 4)"
    assert "1 passed, 1 failed; 1 skipped: this torch has no float8; numerics/a is expected to fail: issue 7" in (
        report.markdown()
    )


def test_an_expected_failure_of_one_target_is_not_that_of_another(tmp_path):
    expected = ExpectedFailures.read(
        written(tmp_path, "left:numerics/a  # one\nnumerics/b  # both\nright:numerics/b # r")
    )
    both = [verification(check("a", failing), check("b", failing), name=name) for name in ("left", "right")]
    left, right = run_checks(both, seed=3, expected=expected)
    assert [outcome.expected for outcome in left] == ["one", "both"]
    assert [outcome.expected for outcome in right] == [None, "r"]
    assert expected.stale(both) == []


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("numerics/a", "line 2: 'numerics/a' has no reason: write `numerics/a  # why it fails`"),
        ("numerics/a  #", "line 2: 'numerics/a' has no reason"),
        ("numerics/a  #  ", "line 2: 'numerics/a' has no reason"),
        ("a  # reason", "line 2: 'a' is no check's id: one is TIER/NAME or TARGET:TIER/NAME"),
        ("mine:a  # reason", "line 2: 'mine:a' is no check's id"),
        ("numerics/z  # reason", "line 2: 'numerics/z' is in line 1 too"),
    ],
)
def test_a_line_that_says_too_little_is_refused_with_its_number(tmp_path, line, wanted):
    file = written(tmp_path, f"numerics/z  # reason\n{line}\n")
    with pytest.raises(ContractError) as refusal:
        ExpectedFailures.read(file)
    assert f"{file}, {wanted}" in str(refusal.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "xfails.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ContractError, match=r"xfails\.txt, cannot be read"):
        ExpectedFailures.read(tmp_path / "xfails.txt")


def test_an_entry_of_no_check_is_stale_and_the_closest_id_is_named(tmp_path):
    file = written(tmp_path, "numerics/sliding_window=3  # x\nmine:contract/old # y\nzoo:numerics/a # z\n")
    found = verification(check("sliding_window=33", failing), check("sinks=True", failing))
    assert ExpectedFailures.read(file).stale([found]) == [
        f"{file}, line 1: there is no check 'numerics/sliding_window=3'; the closest is 'numerics/sliding_window=33'. "
        "Remove the line, or mend it.",
        f"{file}, line 2: there is no check 'contract/old'; the closest is 'numerics/sliding_window=33'. "
        "Remove the line, or mend it.",
        f"{file}, line 3: 'zoo:numerics/a' names a target that is not verified here; verified are mine.",
    ]


def test_an_entry_of_a_check_that_was_not_asked_for_or_could_not_be_made_is_not_stale(tmp_path):
    expected = ExpectedFailures.read(written(tmp_path, "numerics/a  # x\ngraph/a  # y\n"))
    narrowed = dataclasses.replace(verification(check("a", failing), unmade=("graph",)), checks=())
    assert expected.stale([narrowed]) == []


MADE = (check("x", passing, "contract"), check("A b", passing), check("g", passing, "graph"))


def of_mine(target, device):
    yield from MADE if device is not None else MADE[:1]


@pytest.fixture
def mine(monkeypatch):
    """A backend's checks: one of the contract, two on a device."""
    monkeypatch.setattr(suite, "checks_for", of_mine)
    return verification().target


def devices(monkeypatch, *found, wanted=None):
    monkeypatch.setattr("anyattn.testing.command.verification.detect", lambda plugins: discovery.Detection(
        devices=found, problems=(), kinds=("cuda", "cpu")
    ))  # fmt: skip
    return Devices(PluginManager(entry_points=[]), wanted)


def needing(**fields):
    capabilities = dataclasses.replace(ReferenceBackend.capabilities, **fields)
    loaded = type("Needing", (ReferenceBackend,), {"capabilities": capabilities})
    return dataclasses.replace(verification().target, loaded=loaded)


def test_the_first_device_that_a_target_runs_on_is_chosen(monkeypatch, mine):
    here = devices(monkeypatch, CUDA, CPU)
    assert prepare(mine, here).device == CUDA
    assert prepare(needing(device_kinds=frozenset({"cpu"})), here).device == CPU
    assert prepare(needing(features=CPU.features | {"x"}), here).device is None


def test_without_a_device_the_contract_is_left_and_the_reasons_are_told(monkeypatch, mine):
    found = prepare(needing(device_kinds=frozenset({"npu"})), devices(monkeypatch, CUDA, CPU))
    assert [check.id for check in found.checks] == ["contract/x"]
    (entry,) = found.not_run
    assert entry.tiers == ("numerics", "memory", "graph", "determinism")
    assert f"does not run on {CUDA}: device_kind: wanted cuda, supported npu; use a device of kind npu" in entry.reason
    assert f"does not run on {CPU}" in entry.reason


def test_a_device_that_was_asked_for_is_not_replaced_by_another(monkeypatch, mine):
    found = prepare(needing(device_kinds=frozenset({"cuda"})), devices(monkeypatch, CUDA, CPU, wanted="cpu"))
    assert found.device is None
    assert "supported cuda" in found.not_run[0].reason
    assert "Some GPU" not in found.not_run[0].reason


def test_a_device_that_torch_cannot_drive_is_named_with_what_mends_it(monkeypatch, mine):
    broken = dataclasses.replace(CUDA, problems=("run `pip install torch-of-the-vendor`",))
    found = prepare(needing(device_kinds=frozenset({"cuda"})), devices(monkeypatch, broken, CPU))
    assert "cannot be used here: run `pip install torch-of-the-vendor`" in found.not_run[0].reason


def test_a_machine_without_any_device_is_said_to_be_one(monkeypatch, mine):
    found = prepare(mine, devices(monkeypatch))
    assert "No device can be used here" in found.not_run[0].reason


@pytest.mark.parametrize("wanted", ["npu", "sim:h100"])
def test_a_device_that_is_not_here_is_refused(monkeypatch, wanted):
    with pytest.raises(NoDeviceError):
        devices(monkeypatch, CPU, wanted=wanted).require()


def test_packages_and_programs_that_are_missing_keep_a_backend_from_every_device():
    target = needing(packages=("no-such-package>=2",), programs=("no-such-program",))
    package, program = reasons_against(target, CPU)
    assert 'wanted no-such-package>=2, supported not installed; pip install "no-such-package>=2"' in package
    assert "install no-such-program" in program
    (torch,) = reasons_against(needing(packages=("torch>=99",)), dataclasses.replace(CPU, torch_remedy="get it"))
    assert torch.endswith("get it")
    (damaged,) = reasons_against(needing(packages=("no requirement",)), CPU)
    assert "its declaration cannot be read" in damaged


@pytest.mark.parametrize(
    ("kind", "loaded"), [("allocator", PagedAllocator), ("pool", MHAPool)], ids=["allocator", "pool"]
)
def test_allocators_and_pools_run_on_the_kinds_of_device_that_they_declare(kind, loaded):
    target = Target(kind=kind, name="mine", place="mine:It", loaded=loaded)
    assert reasons_against(target, CPU) == []
    declared = dataclasses.replace(loaded.capabilities, device_kinds=frozenset({"npu"}))
    elsewhere = dataclasses.replace(target, loaded=SimpleNamespace(capabilities=declared))
    assert "npu" in reasons_against(elsewhere, CPU)[0]


def test_what_declares_nothing_runs_nowhere_and_its_contract_is_checked(monkeypatch, mine):
    target = dataclasses.replace(mine, loaded=SimpleNamespace())
    found = prepare(target, devices(monkeypatch, CPU))
    assert [check.id for check in found.checks] == ["contract/x"]
    needed = "anyattn.attention.capabilities.Capabilities(...)"
    assert f"declares no capabilities: set its class attribute capabilities = {needed}" in found.not_run[0].reason


def test_tiers_and_texts_narrow_the_checks_and_not_what_is_known(monkeypatch, mine):
    here = devices(monkeypatch, CPU)
    everything = ("contract/x", "numerics/A b", "graph/g")
    for options, wanted in (
        ({"tiers": ("graph",)}, ["graph/g"]),
        ({"tiers": ("contract", "graph")}, ["contract/x", "graph/g"]),
        ({"only": "a B"}, ["numerics/A b"]),
        ({"only": "numerics/"}, ["numerics/A b"]),
        ({"only": "no such"}, []),
    ):
        found = prepare(mine, here, **options)
        assert ([check.id for check in found.checks], found.known) == (wanted, everything)


def test_the_contract_alone_looks_for_no_device(monkeypatch, mine):
    here = devices(monkeypatch)
    found = prepare(mine, here, tiers=("contract",))
    assert (found.device, found.not_run) == (None, ())
    assert found.unmade == ("numerics", "memory", "graph", "determinism")
    (untried,) = prepare(mine, here, tiers=("contract",), probe=True).not_run
    assert str(untried).startswith("what is not declared did not run: No device can be used here")


def test_checks_that_a_declaration_cannot_be_made_into_are_told_and_those_before_run(monkeypatch, mine):
    def broken(target, device):
        yield from MADE[:2]
        raise LookupError("no such head dim")

    monkeypatch.setattr(suite, "checks_for", broken)
    found = prepare(mine, devices(monkeypatch, CPU))
    assert [check.id for check in found.checks] == ["contract/x", "numerics/A b"]
    assert found.not_run == (
        NotRun(
            tiers=("numerics", "memory", "graph", "determinism"),
            reason="making the checks failed after numerics/A b: LookupError: no such head dim",
        ),
    )


def report_of(*checks):
    found = verification(*checks)
    return Report(verification=found, outcomes=tuple(run_checks([found], seed=3)[0]), seed=3, command="anyattn ...")


def test_the_table_has_a_row_for_each_capability_in_order_with_what_is_declared():
    report = report_of(
        check("a", passing, capability="graph"),
        check("b", passing, capability="sinks"),
        check("c", unable, capability="dtypes"),
        check("d", failing, capability="graph"),
        check("e", passing, capability="pages | in\nany order"),
        check("f", passing, capability="archs"),
        check("g", passing, capability="packages"),
        check("h", passing, capability="causal"),
    )
    line, blank, *table = report.markdown().splitlines()
    assert line.startswith("mine (no installed distribution): ")
    assert f"device {CPU}, {report.facts['date']}" in line
    assert blank == ""
    declared = ReferenceBackend.capabilities.to_json()
    assert table == [
        "| capability | declared | result |",
        "| --- | --- | --- |",
        f"| graph | {declared['graph']} | 1 passed, 1 failed |",
        "| sinks | yes | 1 passed |",
        f"| dtypes | {', '.join(declared['dtypes'])} | 1 skipped: this torch has no float8 |",
        "| pages \\| in any order |  | 1 passed |",
        "| archs | any | 1 passed |",
        f"| packages | {', '.join(declared['packages'])} | 1 passed |",
        "| causal | no, yes | 1 passed |",
    ]


def test_the_largest_error_is_told_in_units_of_what_is_allowed():
    report = report_of(
        check("a", passing), check("b", measuring), check("c", lambda seed: Measured(error=0, allowed=0))
    )
    assert report.largest_error() == "largest error: 0.375 of what is allowed, in numerics/b"
    assert report_of(check("a", passing)).largest_error() == ""


@pytest.mark.parametrize(
    "to_json",
    [lambda: {"priority": object()}, lambda: sys.exit(), lambda: 1, None],
    ids=["no JSON value", "SystemExit", "no object", "no function"],
)
def test_a_declaration_that_cannot_be_shown_keeps_no_report_from_being_made(to_json):
    declared = SimpleNamespace(capabilities=SimpleNamespace(to_json=to_json))
    found = dataclasses.replace(verification(), target=dataclasses.replace(verification().target, loaded=declared))
    report = Report(verification=found, outcomes=(), seed=3, command="")
    assert report.to_json()["capabilities"] is None
    assert report.markdown()


def test_a_simulated_device_declares_its_facts():
    target = Target(kind="simulated device", name="mine1", place="mine:MINE1", loaded=CUDA)
    found = Verification(target=target, device=None, checks=(check("a", passing, capability="arch"),), known=())
    report = Report(verification=found, outcomes=tuple(run_checks([found], seed=3)[0]), seed=3, command="")
    assert report.markdown().endswith("| arch | sm90 | 1 passed |")


def test_numbers_that_json_has_no_value_for_are_null():
    report = report_of(check("a", lambda seed: Measured(error=0.0, allowed=float("inf"))))
    (entry,) = json.loads(json.dumps(Run(reports=(report,)).to_json(), allow_nan=False))["targets"][0]["checks"]
    assert (entry["error"], entry["allowed"]) == (0.0, None)


def test_a_run_that_had_to_skip_every_check_is_no_yes():
    assert not Run(reports=(report_of(check("a", unable)),)).ok
    assert Run(reports=(report_of(check("a", unable), check("b", passing)),)).ok


def test_only_the_runner_imports_pytest():
    script = (
        "import sys, anyattn.testing.command.report, anyattn.testing.command.xfails, anyattn.cli\n"
        "print([name for name in ('pytest', 'torch') if name in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ended.stdout == "[]\n"

"""`anyattn verify`: whether a backend, allocator, pool or platform does what it declares."""

from __future__ import annotations

import contextlib
import secrets
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from packaging.requirements import Requirement
from rich.padding import Padding
from rich.text import Text

from anyattn.cli.output import Answered, error_console, section, show, show_json
from anyattn.discovery import plugin_manager
from anyattn.errors import ContractError
from anyattn.plugins.isolation import stdout_on_stderr
from anyattn.plugins.manager import PluginManager
from anyattn.plugins.requirements import missing_packages
from anyattn.settings import Settings
from anyattn.testing.check import TIERS, Tier

if TYPE_CHECKING:  # what runs checks is imported when checks are run: the other commands are quick without it
    from anyattn.testing.command.report import Report, Run
    from anyattn.testing.command.verification import Devices, Verification

_NEEDS = ("pytest>=8.2", "torch>=2.9")


def verify(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET",
            help="package.module:Class, a name that a plugin offers, or a plugin's, for all that it offers.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(help="A kind (cpu, cuda) or a torch device (cuda:1). [default: the first that serves]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=(1 << 32) - 1, help="Of all random inputs. [default: a new one each run]")
    ] = None,
    tier: Annotated[
        list[str] | None, typer.Option(help=f"Just this tier; repeatable: {', '.join(TIERS)}. [default: all]")
    ] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Just the checks whose id holds this text.")] = "",
    list_only: Annotated[bool, typer.Option("--list", help="Print the ids of the checks, and run none.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    junitxml: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Write the results as JUnit XML, too.")
    ] = None,
    xfails: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Checks that are expected to fail, `ID  # reason` a line; TARGET:ID for one of several targets.",
        ),
    ] = None,
    probe_undeclared: Annotated[
        bool, typer.Option("--probe-undeclared", help="Try what a backend does not declare, too.")
    ] = False,
    exit_first: Annotated[bool, typer.Option("-x", "--exit-first", help="Stop at the first failure.")] = False,
) -> None:
    """Check that a backend, allocator, pool or platform does what it declares.

    The checks follow from the declaration. Those of the tier "contract" need no device; all others run on one, with
    random inputs. The report ends with a table for a README. The exit code is 0 when everything that was asked for ran
    and holds. A check that is expected to fail and passes is a failure, and so is an expectation of no check.
    """
    tiers = _tiers(tier)
    _require_packages()
    from anyattn.testing.command.report import Report, Run
    from anyattn.testing.command.verification import Devices
    from anyattn.testing.command.xfails import ExpectedFailures

    expected = None if xfails is None else ExpectedFailures.read(xfails)
    settings = Settings.from_env()
    with stdout_on_stderr():  # a plugin may print when it is imported
        plugins = plugin_manager(settings)
        devices = Devices(plugins, device or settings.platform)
        if device is not None:
            devices.require()
        found = _prepared(targets, plugins, devices, tiers, only, probe_undeclared)
    if probe_undeclared and not any(each.target.kind == "backend" for each in found):
        raise typer.BadParameter("it is for backends, and no target is one.", param_hint="--probe-undeclared")
    if list_only:
        _list(found, as_json)
        return
    if junitxml is not None:
        _require_writable(junitxml)
    drawn = secrets.randbelow(1 << 31) if seed is None else seed
    options = {"--device": _device(found, devices), "--only": only or None, "--xfails": xfails, "--seed": drawn}
    flags = {"--probe-undeclared": probe_undeclared, "--exit-first": exit_first}
    command = ["anyattn", "verify", *targets]
    command += [part for name in tiers for part in ("--tier", name)]
    command += [part for name, value in options.items() if value is not None for part in (name, str(value))]
    command += [name for name, wanted in flags.items() if wanted]
    with stdout_on_stderr(), _progress(found) as progress:
        from anyattn.testing.command.runner import run_checks

        outcomes = run_checks(
            found, seed=drawn, expected=expected, junitxml=junitxml, exit_first=exit_first, started=progress
        )
        reports = [
            Report(
                verification=each,
                outcomes=tuple(results),
                seed=drawn,
                command=shlex.join(command),
                undeclared=_undeclared(each, drawn) if probe_undeclared else None,
            )
            for each, results in zip(found, outcomes, strict=True)
        ]
    run = Run(reports=tuple(reports), stale=() if expected is None else tuple(expected.stale(found)))
    if as_json:
        show_json(run.to_json())
    else:
        _show(run)
    if not_run := [f"{report.facts['name']}: {entry}" for report in reports for entry in report.not_run]:
        without_device = any(each.device is None and each.not_run for each in found)
        hint = ". `--tier contract` checks what needs no device." if without_device else ""
        raise Answered(ContractError("; ".join(not_run) + hint))
    if not run.ok:
        if not run.stale and not any(report.failures for report in reports):
            raise Answered(ContractError("every check had to be skipped, so that nothing is known to hold."))
        raise typer.Exit(1)


def _tiers(names: Sequence[str] | None) -> tuple[Tier, ...]:
    if unknown := set(names or ()) - set(TIERS):
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(TIERS)}.", param_hint="--tier")
    return tuple(tier for tier in TIERS if tier in (names or ()))


def _require_packages() -> None:
    """Raises ContractError where the kit cannot run for lack of one."""
    for reason in missing_packages(_NEEDS, "kit"):
        name = Requirement(reason.wanted).name
        raise ContractError(f"the kit needs {name}: {reason.remedy} (wanted {reason.wanted}: {reason.supported})")


def _require_writable(file: Path) -> None:
    """Raises ContractError, so that it does not come out only when all checks have run."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("ab").close()
    except OSError as error:
        raise ContractError(f"{file} cannot be written: {error}") from error


def _prepared(
    targets: Sequence[str], plugins: PluginManager, devices: Devices, tiers: Sequence[Tier], only: str, probe: bool
) -> list[Verification]:
    """Raises ContractError where not a single check is asked for."""
    from anyattn.testing.command.verification import prepare
    from anyattn.testing.target import find_targets

    chosen = [target for text in dict.fromkeys(targets) for target in find_targets(text, plugins)]
    found = [prepare(target, devices, tiers=tiers, only=only, probe=probe) for target in chosen]
    if not any(each.checks or each.not_run for each in found):
        narrowed = [f"of {' or '.join(tiers)}"] if tiers else []
        narrowed += [f"whose id holds {only!r}"] if only else []
        names = ", ".join(each.target.name for each in found)
        raise ContractError(f"{names} has no check {' '.join(narrowed)}; `--list` without that prints all ids.")
    return found


def _device(found: Sequence[Verification], devices: Devices) -> str | None:
    """What names the device on which all targets run; None where there is none, or are several."""
    chosen = {each.device.torch_device: each.device for each in found if each.device is not None}
    if devices.wanted is not None or len(chosen) != 1:
        return devices.wanted
    (device,) = chosen.values()
    return device.torch_device if ":" in device.torch_device else device.kind  # an emulated one is "cpu" to torch


def _list(found: Sequence[Verification], as_json: bool) -> None:
    if as_json:
        targets = [
            {
                "name": each.target.name,
                "kind": each.target.kind,
                "place": each.target.place,
                "checks": [{"id": c.id, "tier": c.tier, "capability": c.capability} for c in each.checks],
                "not_run": [entry.to_json() for entry in each.not_run],
            }
            for each in found
        ]
        show_json({"anyattn_verify": 1, "targets": targets})
        return
    for each in found:
        prefix = f"{each.target.name}:" if len(found) > 1 else ""
        for check in each.checks:
            show(Text(f"{prefix}{check.id}"))
        for entry in each.not_run:
            error_console().print(f"{each.target.name}: {entry}", soft_wrap=True)


@contextlib.contextmanager
def _progress(found: Sequence[Verification]) -> Iterator[Callable[[int, str], None]]:
    """A line on stderr, where that is a terminal; told how many checks are done, and what is next."""
    console = error_console()
    if not console.is_terminal:
        yield lambda done, text: None
        return
    from rich.progress import MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    name = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis"))
    with Progress(MofNCompleteColumn(), name, console=console, transient=True) as bar:
        task = bar.add_task("", total=sum(len(each.checks) for each in found))
        yield lambda done, text: bar.update(task, completed=done, description=text, refresh=True)


def _undeclared(found: Verification, seed: int) -> tuple[dict[str, Any], ...] | None:
    """What works, or does not, though it is not declared; None where that could not be tried."""
    if found.target.kind != "backend" or found.device is None:
        return None
    from anyattn.testing.undeclared.probes import probe

    return tuple(
        {"field": tried.field, "value": tried.value, "works": tried.works, "note": tried.note}
        for tried in probe(found.target.loaded, found.device, seed)
    )


def _show(run: Run) -> None:
    for report in run.reports:
        _show_report(report)
    if run.stale:
        section("expected failures of no check", (("-", text) for text in run.stale))
    if len(run.reports) > 1:
        show(f"total: {run.summary()}, {len(run.reports)} targets")


def _show_report(report: Report) -> None:
    section(report.facts["name"], report.rows)
    for outcome in report.failures:
        show(Text(f"failed: {outcome.check.id}", style="bold red"))
        show(Padding(Text(outcome.message), (0, 0, 1, 2), expand=False))
    if report.not_run:
        section("not run", ((", ".join(entry.tiers) or "-", entry.reason) for entry in report.not_run))
    for works, title in ((True, "works, but is not declared"), (False, "is not declared, and does not work")):
        if tried := [entry for entry in report.undeclared or () if entry["works"] == works]:
            section(title, ((f"{entry['field']} {entry['value']}", entry["note"]) for entry in tried))
    if report.outcomes:
        typer.echo(f"{report.markdown()}\n")  # as it is: a table that rich wraps can be pasted nowhere
    show(report.summary())
    if largest := report.largest_error():
        show(largest)
    show()

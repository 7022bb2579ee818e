"""`anyattn plugins`: what was found, what it offers, and what failed and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from anyattn.cli.output import section, show, show_json
from anyattn.discovery import load_offers, plugin_manager
from anyattn.plugins.isolation import stdout_on_stderr
from anyattn.plugins.records import PluginRecord, offer_kind, release
from anyattn.types import CONTRACT_VERSION


def plugins(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show every plugin, what it offers, and what failed.

    All that is offered is imported, and the probes are run. The exit code is 0 when nothing failed and nothing that
    ANYATTN_PLUGINS names is missing.
    """
    with stdout_on_stderr():  # a plugin may print when it is imported
        manager = plugin_manager()
        load_offers(manager)
    records = manager.records
    if as_json:
        show_json({"contract_version": CONTRACT_VERSION, "plugins": [record.to_json() for record in records]})
    else:
        _report(records)
    if any(record.problems for record in records):
        raise typer.Exit(1)


def _report(records: Sequence[PluginRecord]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for title in ("plugin", "distribution", "contract", "state"):
        table.add_column(title, overflow="fold")
    for record in records:
        contract = "" if record.contract_version is None else str(record.contract_version)
        table.add_row(_name(record), _release(record), contract, _state(record))
    show(table)
    show()
    for record in records:
        if any(record.offers.values()):
            section(
                f"{_name(record)} offers",
                ((offer_kind(hook), ", ".join(names)) for hook, names in record.offers.items() if names),
            )
    if problems := [(_name(record), problem) for record in records for problem in record.problems]:
        section("problems", problems)
    if kept_out := [(_name(record), _release(record)) for record in records if record.state == "not allowed"]:
        section("installed, and not named by ANYATTN_PLUGINS", kept_out)


def _name(record: PluginRecord) -> str:
    """As it is where a terminal can show it."""
    return record.name if record.name.isprintable() and record.name.strip() else repr(record.name)


def _release(record: PluginRecord) -> str:
    return "" if record.state == "missing" else release(record.distribution, record.version)


def _state(record: PluginRecord) -> Text:
    if record.state == "loaded":
        return Text("loaded, in part", style="yellow") if record.problems else Text("loaded", style="green")
    return Text(record.state, style="" if record.state == "not allowed" else "red")

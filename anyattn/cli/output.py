"""What the commands print with: rich on a terminal, whole lines without padding or escapes in a pipe."""

from __future__ import annotations

import importlib.metadata
import io
import json
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 100_000
"""Columns when no terminal sets a width: no reason is that long, so none is cut or wrapped."""


def show(renderable: RenderableType = "") -> None:
    """Prints to stdout."""
    if sys.stdout.isatty():
        _console().print(renderable)
        return
    page = io.StringIO()
    _console(file=page, width=_PIPE_WIDTH).print(renderable)
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in page.getvalue().removesuffix("\n").split("\n"))
    sys.stdout.flush()  # who reads the pipe sees the machine while the model is still being loaded


def section(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Prints a title and, indented, a name and a value a line."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, value)
    show(Text(title, style="bold"))
    show(Padding(grid, (0, 0, 1, 2), expand=False))


def show_json(document: dict[str, Any]) -> None:
    """Prints one JSON object to stdout, in ASCII so that any pipe takes it."""
    sys.stdout.write(json.dumps(document, indent=2) + "\n")


class Answered(Exception):
    """Ends a command that has printed its whole answer, and whose answer is no: what is left to tell is why."""


def show_error(error: Exception) -> None:
    """Prints an error's text as one paragraph to stderr."""
    error_console().print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)


def error_console() -> Console:
    """rich on stderr."""
    return _console(stderr=True)


def _console(**options: Any) -> Console:
    """Texts are shown as they are: "anyattn[cpu]" is no markup."""
    return Console(markup=False, emoji=False, highlight=False, **options)


def installed_version(distribution: str) -> str | None:
    """From the metadata, without importing the package; None when it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    except Exception:
        return "unknown, as its metadata are damaged"


def gibibytes(count: int) -> str:
    """1 << 30 as "1.0 GiB"."""
    return f"{count / (1 << 30):.1f} GiB"

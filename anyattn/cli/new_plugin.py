"""`anyattn new-plugin`: a package that brings a backend, a platform or an allocator, ready to be verified."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from anyattn.cli.output import show
from anyattn.scaffold.package import PLUGIN_KINDS, write_plugin


def new_plugin(
    name: Annotated[str, typer.Argument(help="Of the package, as pip will know it.")],
    kind: Annotated[str, typer.Option(help=f"What it brings: {', '.join(PLUGIN_KINDS)}.")],
    path: Annotated[Path | None, typer.Option(help="Folder to write. [default: one of that name, here]")] = None,
) -> None:
    """Write a plugin package that passes the compliance kit, to go on from.

    Prints what to type next. A folder that holds something is left alone.
    """
    if kind not in PLUGIN_KINDS:
        raise typer.BadParameter(f"{kind!r} is none of {', '.join(PLUGIN_KINDS)}.", param_hint="--kind")
    folder = Path(name) if path is None else path
    for written in write_plugin(name, kind, folder):
        show(f"wrote {written}")
    place = str(folder) if folder.is_absolute() else os.path.join(os.curdir, folder)
    show("\nnext")
    show(f"  pip install -e {shlex.quote(place + '[test]')}")
    show(f"  anyattn verify {name}")
    show(f"  pytest {shlex.quote(place)}")

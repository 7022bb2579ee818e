"""The command line: `anyattn doctor`, `backends`, `warmup`, `generate`, `plugins`, `verify`, `new-plugin`.

One file a command. The exit code is 0 only when the answer is yes. Nothing here imports torch before a model has to be
loaded, checks are made or kernels compiled.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from anyattn.cli import backends, doctor, generate, new_plugin, plugins, verify, warmup
from anyattn.cli.output import Answered, installed_version, show_error, show_json
from anyattn.errors import AnyattnError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what is no AnyattnError is a bug, and its plain traceback is the report
    rich_markup_mode=None,  # help texts name extras, and "[cpu]" is markup to rich
)
app.command()(doctor.doctor)
app.command()(backends.backends)
app.command()(warmup.warmup)
app.command()(generate.generate)
app.command()(plugins.plugins)
app.command()(verify.verify)
app.command()(new_plugin.new_plugin)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"anyattn {installed_version('anyattn') or '(a checkout that is not installed)'}")
        raise typer.Exit


@app.callback()
def _anyattn(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Finds the attention kernels and KV-cache allocators that are valid on this machine, and drives them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 yes, 1 no or refused, 2 wrong usage, 130 interrupted.

    argv: without the program's name; by default the process's own.
    """
    if sys.stdout is None:  # closed by whoever started the process
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 for the rest of the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a model may write what the terminal cannot encode
    try:
        app(args=argv, prog_name="anyattn")
        sys.stdout.flush()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except Answered as answer:
        show_error(answer)
        return 1
    except AnyattnError as error:
        if "--json" in (sys.argv[1:] if argv is None else argv):
            show_json({"error": str(error)})
        show_error(error)
        return 1
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EPIPE):
            raise
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 what is left over goes nowhere
        show_error(error)
        return 1
    return 0

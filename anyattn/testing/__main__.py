"""`python -m anyattn.testing TARGET...`: the command `anyattn verify`, where its script is not on the path."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from anyattn.cli import main as command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `anyattn verify`; arguments: those after it, by default the process's own. Returns its exit code."""
    return command_line(["verify", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())

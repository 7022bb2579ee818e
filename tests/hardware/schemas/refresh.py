"""Writes the declarations of vendors' functions anew from their wheels: `python .../refresh.py NAME`.

Downloads the wheel from the package registry, installs nothing, and reads it as text. Without a name: all of them.
A version in the command, NAME==1.2.3, is taken instead of the one below. What then changed shows in the diff of the
JSON files, and in the tests that bind our calls to them.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent

Declarations = Iterator[tuple[str, str]]


@dataclass(frozen=True, kw_only=True)
class Source:
    """version: of the distribution that is read. read: gives names and declarations from the open wheel.

    python, platform: of the wheel, where it is not for this interpreter and machine alone.
    """

    distribution: str
    version: str
    read: Callable[[zipfile.ZipFile], Declarations]
    python: str = "3.11"
    platform: str = "manylinux_2_28_x86_64"


def functions(path: str, *names: str, prefix: str = "") -> Callable[[zipfile.ZipFile], Declarations]:
    """Signatures of functions, or of methods as Class.method, of a Python file (or a stub) in the wheel."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        tree = ast.parse(wheel.read(path).decode())
        found: dict[str, str] = {}
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef):
                    owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
                    found[owner + child.name] = f"def {child.name}({_plain(child.args)})"
        yield from ((prefix + name, found[name]) for name in names)

    return read


def _plain(arguments: ast.arguments) -> str:
    """The parameters and their defaults, without annotations."""
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    for argument in every:
        if argument is not None:
            argument.annotation = None
    return ast.unparse(arguments)


def operators(path: str, *names: str) -> Callable[[zipfile.ZipFile], Declarations]:
    """Schemas of torch operators in a YAML file of `- func: name(...) -> ...` entries in the wheel."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        text = wheel.read(path).decode()
        found = {m["name"]: m["schema"].strip() for m in re.finditer(r"func: (?P<schema>(?P<name>[\w.]+)\(.*)", text)}
        yield from ((name, found[name]) for name in names)

    return read


def together(*readers: Callable[[zipfile.ZipFile], Declarations]) -> Callable[[zipfile.ZipFile], Declarations]:
    """All that several readers find."""

    def read(wheel: zipfile.ZipFile) -> Declarations:
        for reader in readers:
            yield from reader(wheel)

    return read


SOURCES: dict[str, Source] = {}


def refresh(name: str, version: str | None = None) -> None:
    """Writes NAME.json beside this file."""
    source = SOURCES[name]
    version = version or source.version
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--pre"]
        command += ["--python-version", source.python, "--platform", source.platform, "--platform", "any"]
        command += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux_2_17_x86_64"]
        subprocess.run([*command, "--dest", folder, f"{source.distribution}=={version}"], check=True)
        (path,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(path) as wheel:
            declared = dict(source.read(wheel))
    document = {"distribution": source.distribution, "version": version, "functions": declared}
    (HERE / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for argument in sys.argv[1:] or SOURCES:
        wanted, _, at = argument.partition("==")
        refresh(wanted, at or None)

"""Writes a plugin package that passes the compliance kit as it stands, for its author to go on from."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path
from typing import Literal, get_args

from anyattn.errors import ContractError
from anyattn.plugins import builtin
from anyattn.plugins.installed import installed_plugins

PluginKind = Literal["backend", "platform", "allocator"]
PLUGIN_KINDS: tuple[PluginKind, ...] = get_args(PluginKind)

_TEMPLATES = Path(__file__).parent
_SUFFIX = ".template"
_DISTRIBUTION_NAME = re.compile(r"[A-Z0-9]|[A-Z0-9][A-Z0-9._-]*[A-Z0-9]", re.IGNORECASE | re.ASCII)
"""The packaging specification "Names and normalization"."""


def plugin_files(name: str, kind: PluginKind) -> dict[str, str]:
    """The text of every file of a package that brings one thing of this kind, by path within the package's folder.

    name: of the distribution and of the plugin. Raises ContractError for one that no package can have.
    """
    module = module_name(name)
    words = {
        "plugin-name": name,
        "plugin_name": module,
        "PluginName": "".join(word.capitalize() for word in module.split("_")),
    }

    def named(text: str) -> str:
        return re.sub("|".join(words), lambda found: words[found.group()], text)

    texts = {}
    for part in ("common", kind):
        for template in sorted((_TEMPLATES / part).rglob(f"*{_SUFFIX}")):
            path = template.relative_to(_TEMPLATES / part).as_posix().removesuffix(_SUFFIX)
            texts[named(path)] = named(template.read_text(encoding="utf-8"))
    return texts


def module_name(name: str) -> str:
    """What a distribution's package is called in Python: Acme.Attention's is acme_attention.

    Raises ContractError for a name that no distribution can have, or whose package could not be imported or would be
    in the way of another.
    """
    if not _DISTRIBUTION_NAME.fullmatch(name):
        raise ContractError(
            f"{name!r} cannot name a package: names are ASCII letters, digits, '-', '_' and '.', and begin and end "
            "with a letter or digit."
        )
    module = re.sub(r"[-_.]+", "_", name).lower()
    if not module.isidentifier() or keyword.iskeyword(module):
        raise ContractError(f"{name!r} cannot name a package: Python cannot import {module!r}. Begin with a letter.")
    if (rival := _rival(module)) is not None:
        raise ContractError(
            f"{name!r} cannot name a package: {module} is {rival}. Choose another name, such as {name}-plugin."
        )
    return module


def write_plugin(name: str, kind: PluginKind, folder: Path) -> list[Path]:
    """Writes the files of `plugin_files` into a folder that is new or empty, and returns where they are.

    Raises ContractError, before anything is written, for a folder that holds something; and where it cannot be written.
    """
    texts = plugin_files(name, kind)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ContractError(f"{folder} is there already, and not an empty folder: name another with --path.")
        paths = [folder / path for path in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ContractError(f"{folder} cannot be written: {error}. Name another folder with --path.") from error
    return paths


def _rival(module: str) -> str | None:
    """Whose name that is already, in words; a plugin of this name that is installed here is no rival."""
    if module in ("anyattn", "tests"):
        return "anyattn itself" if module == "anyattn" else "the folder of its tests"
    if module in sys.stdlib_module_names:
        return "a module of Python itself"
    hooks = [hook for name, hook in vars(builtin).items() if name.startswith("anyattn_")]
    if any(module == re.sub(r"[-_.]+", "_", name).lower() for hook in hooks for name in hook()):
        return "the name of something that anyattn itself offers, which keeps it"
    targets = [plugin.target_parts() for plugin in installed_plugins()]
    if any(target[0].partition(".")[0] == module for target in targets if target is not None):
        return None
    spec = importlib.util.find_spec(module)
    return None if spec is None or spec.origin is None else f"installed here already, {spec.origin}"

"""Whether a plugin's class has the methods of its base class, and whether they can be called as anyattn calls them."""

from __future__ import annotations

import inspect
from typing import Any

from anyattn.plugins.isolation import describe


def missing_methods(implementation: type[Any]) -> list[str]:
    """Names of the abstract methods that a class leaves open."""
    return sorted(getattr(implementation, "__abstractmethods__", ()))


def wrong_signatures(implementation: type[Any], base: type[Any]) -> list[str]:
    """In words, each method of `base` that the class has replaced by one that cannot be called in its place.

    A replacement may name positional parameters as it likes, and have more of them where they have defaults.
    """
    wrong = []
    for name, method in vars(base).items():
        theirs = getattr(implementation, name, None)
        is_method = inspect.isfunction(method) and (name == "__init__" or not name.startswith("_"))
        if is_method and theirs is not None and theirs is not method and (text := _wrong(method, theirs)):
            wrong.append(f"{name}: {text}")
    return wrong


def _wrong(method: Any, theirs: Any) -> str | None:
    """theirs: the attribute of the class, so that it is called with an instance first, unless it is a static method."""
    wanted = inspect.signature(method)
    positional = [p for p in wanted.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [p for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY]
    try:
        signature = inspect.signature(theirs)
    except (TypeError, ValueError):  # written in C, it has none
        return None if callable(theirs) else f"it is a {type(theirs).__name__}, not a method"
    try:
        for optional in (True, False):
            signature.bind(
                *(None for p in positional if optional or p.default is p.empty),
                **{p.name: None for p in named if optional or p.default is p.empty},
            )
    except TypeError as error:
        return f"it is {signature}, which cannot be called as {wanted}: {describe(error).partition(': ')[2]}"
    return None

"""Whether a plugin's class has the methods of its base class, and whether they can be called as anyattn calls them."""

from __future__ import annotations

import inspect
from typing import Any

from anyattn.errors import contained
from anyattn.plugins.isolation import describe


def missing_methods(implementation: type[Any]) -> list[str]:
    """Names of the abstract methods that a class leaves open."""
    return sorted(getattr(implementation, "__abstractmethods__", ()))


def wrong_signatures(implementation: type[Any], base: type[Any]) -> list[str]:
    """In words, each method of `base` that the class has replaced by one that cannot be called in its place.

    A replacement may name positional parameters as it likes, and have more of them where they have defaults. It may be
    a static or class method, or any other object that can be called; one whose parameters cannot be told is let pass.
    """
    wrong = []
    more = _declared_parameters(implementation)
    for name, method in vars(base).items():
        if not inspect.isfunction(method) or (name.startswith("_") and name != "__init__"):
            continue
        theirs = inspect.getattr_static(implementation, name, method)
        if theirs is not method and (text := _wrong(method, implementation, name, theirs, more.get(name, ()))):
            wrong.append(f"{name}: {text}")
    return wrong


_DECLARED = {("run", "indices"): "topk"}
"""Parameters that a method takes by name, besides those of the base class's, where the capabilities have a field."""


def _declared_parameters(implementation: type[Any]) -> dict[str, tuple[str, ...]]:
    """By method, the names of `_DECLARED` that are asked of this class."""
    capabilities = inspect.getattr_static(implementation, "capabilities", None)
    asked: dict[str, tuple[str, ...]] = {}
    for (method, parameter), field in _DECLARED.items():
        try:
            declared = contained(getattr, capabilities, field, None)
        except Exception:  # a plugin's own kind of declaration; that it fails is found where it is judged
            continue
        if declared is not None:
            asked[method] = (*asked.get(method, ()), parameter)
    return asked


def _wrong(method: Any, implementation: type[Any], name: str, theirs: Any, more: tuple[str, ...]) -> str | None:
    """theirs: what the class holds under the name, before any descriptor turns it into what is called.

    more: names of parameters that it has to take besides.
    """
    try:
        called = contained(getattr, implementation, name)
    except Exception as error:
        return f"it cannot be read: {describe(error)}"
    if not callable(called):
        return f"it is {'None' if called is None else f'of type {type(called).__name__}'}, not a method"
    try:
        signature: inspect.Signature = contained(inspect.signature, called)
    except Exception:  # written in C, it has none, and a plugin's own may be broken
        return None
    # A function, or what binds like one, is given the instance first; other objects, static and class methods are not.
    takes_instance = hasattr(type(theirs), "__get__") and not isinstance(theirs, staticmethod | classmethod)
    wanted = inspect.signature(method)
    parameters = list(wanted.parameters.values())[0 if takes_instance else 1 :]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    parameters += [inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=None) for each in more]
    named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    try:
        for optional in (True, False):
            signature.bind(
                *(None for p in positional if optional or p.default is p.empty),
                **{p.name: None for p in named if optional or p.default is p.empty},
            )
    except TypeError as error:
        asked = _bare(wanted.replace(parameters=parameters))
        return f"it is {_bare(signature)}, which cannot be called as {asked}: {error}"
    return None


def _bare(signature: inspect.Signature) -> str:
    """Without annotations, which nothing here depends on."""
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))

"""A module that is imported at its first use, so that a backend's declaration can be read without torch.

Use it beside a `TYPE_CHECKING` import, which keeps type checkers and readers on the real module:

    if TYPE_CHECKING:
        import torch
    else:
        torch = lazy_import("torch")
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any


class _LazyModule(ModuleType):
    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what inspection tools ask of every module must not import it
            raise AttributeError(attribute)
        value = getattr(importlib.import_module(self.__name__), attribute)
        setattr(self, attribute, value)  # the next access costs what it costs on the real module
        return value


def lazy_import(name: str) -> Any:
    """The module `name`, imported when one of its attributes is first read.

    Raises ImportError then, not now, where the package is missing.
    """
    return _LazyModule(name)

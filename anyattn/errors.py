"""Every error that anyattn raises on purpose. Each says what was asked, what is possible and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class AnyattnError(Exception):
    """Base of all errors raised by anyattn."""


class SpecError(AnyattnError, ValueError):
    """A spec or a setting contradicts itself or holds a value that nothing could mean."""


class ContractError(AnyattnError, ValueError):
    """A call broke the contract: a wrong shape, dtype or device, a freed sequence, a plugin that does not fit."""


class NoBackendError(AnyattnError, RuntimeError):
    """No candidate, or not the one asked for, can serve the spec on the device; the text holds all reasons."""


class NoDeviceError(AnyattnError, RuntimeError):
    """The device asked for is not on this machine, or torch cannot drive it here."""


class PluginLoadError(AnyattnError, RuntimeError):
    """A plugin could not be loaded, or two of them offer the same name."""


class OutOfPagesError(AnyattnError, RuntimeError):
    """A request for pages was refused; the free list and the page tables are as before.

    pages_needed: pages that the request would have taken.
    pages_free: pages that were free when it was refused.
    """

    def __init__(self, pages_needed: int, pages_free: int, num_pages: int) -> None:
        self.pages_needed = pages_needed
        self.pages_free = pages_free
        self.num_pages = num_pages
        super().__init__(
            f"{pages_needed} pages needed, {pages_free} of {num_pages} free; nothing was taken. "
            "Free sequences, extend by fewer tokens, or create the runtime with a larger num_pages."
        )


def contained(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a plugin's code so that `except Exception` catches whatever it raises; only Ctrl-C passes as it is.

    SystemExit from a plugin would otherwise end the process, and without a word.
    """
    try:
        return function(*arguments)
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error

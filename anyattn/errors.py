"""Every error that anyattn raises on purpose. Each says what was asked, what is possible and what to do next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal


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
    pages_free: pages that were free when it was refused, or would have become free by it.
    window: of which sliding window's layers the pages are; None for the pages of all others.
    request: what the pages were for: "extend", tokens of sequences; "restore", what a prefix cache has in host memory;
        "save", pages of a tier, which are not the pool's.
    """

    def __init__(
        self,
        pages_needed: int,
        pages_free: int,
        num_pages: int,
        *,
        window: int | None = None,
        request: Literal["extend", "restore", "save"] = "extend",
    ) -> None:
        self.pages_needed = pages_needed
        self.pages_free = pages_free
        self.num_pages = num_pages
        self.window = window
        self.request = request
        kind, setting = "pages", "num_pages"
        if request == "save":
            kind = "pages of the tier"
        elif window is not None:
            kind, setting = f"pages of the layers with window {window}", "num_window_pages"
        remedy = {
            "extend": f"Free sequences, extend by fewer tokens, or create the runtime with a larger {setting}.",
            "restore": f"Free sequences, do without the restore, or create the runtime with a larger {setting}.",
            "save": "Free pages of the tier, or make it larger.",
        }[request]
        super().__init__(f"{pages_needed} {kind} needed, {pages_free} of {num_pages} free; nothing was taken. {remedy}")

    def __reduce__(self) -> tuple[Any, ...]:
        """So that it crosses processes: exceptions are made anew from their text otherwise."""
        made_anew = partial(OutOfPagesError, window=self.window, request=self.request)
        return made_anew, (self.pages_needed, self.pages_free, self.num_pages)


class StorageError(AnyattnError, RuntimeError):
    """KV data is lost outside the pools: a full or broken disk, a damaged record, an export that did not arrive whole.

    The call was right, and what it asked for is not to be had any more: compute those tokens again.
    """


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

"""The environment variables that anyattn reads, in one place. Arguments beat them. Standard library only."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass

from anyattn.errors import SpecError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment asks for; None where it asks for nothing.

    platform: ANYATTN_PLATFORM, a device kind ("cpu", "cuda"), torch device ("cuda:1") or simulated one ("sim:h100").
    prefill_backend, decode_backends: ANYATTN_PREFILL_BACKEND and ANYATTN_DECODE_BACKEND (for several, names separated
        by commas), else both from ANYATTN_ATTENTION_BACKEND.
    page_size: ANYATTN_PAGE_SIZE, tokens.
    plugins: ANYATTN_PLUGINS, names of entry points that may be loaded, separated by commas; empty for none of them.
    strict: ANYATTN_STRICT=1, a plugin that fails to load raises instead of being reported.
    debug: ANYATTN_DEBUG=1, page table and allocators prove their books after every change, and refuse misuse.
    """

    platform: str | None = None
    prefill_backend: str | None = None
    decode_backends: tuple[str, ...] = ()
    page_size: int | None = None
    plugins: frozenset[str] | None = None
    strict: bool = False
    debug: bool = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Settings:
        """Raises SpecError for a value that means nothing."""
        both = _names(environ, "ANYATTN_ATTENTION_BACKEND", most=1)
        prefill = _names(environ, "ANYATTN_PREFILL_BACKEND", most=1) or both
        return cls(
            platform=environ.get("ANYATTN_PLATFORM", "").strip() or None,
            prefill_backend=prefill[0] if prefill else None,
            decode_backends=_names(environ, "ANYATTN_DECODE_BACKEND") or both,
            page_size=_positive_int(environ, "ANYATTN_PAGE_SIZE"),
            plugins=None if environ.get("ANYATTN_PLUGINS") is None else frozenset(_names(environ, "ANYATTN_PLUGINS")),
            strict=_flag(environ, "ANYATTN_STRICT"),
            debug=_flag(environ, "ANYATTN_DEBUG"),
        )


VARIABLES = (
    "ANYATTN_PLATFORM",
    "ANYATTN_ATTENTION_BACKEND",
    "ANYATTN_PREFILL_BACKEND",
    "ANYATTN_DECODE_BACKEND",
    "ANYATTN_PAGE_SIZE",
    "ANYATTN_PLUGINS",
    "ANYATTN_STRICT",
    "ANYATTN_DEBUG",
)


def misspelled_variables(environ: Mapping[str, str]) -> list[str]:
    """In words, variables that are named like ours and that nothing here reads."""
    problems = []
    for name in sorted(environ):
        if name.startswith("ANYATTN_") and name not in VARIABLES:
            near = difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.93)
            meant = f"is {near[0]} meant?" if near else f"there are {', '.join(VARIABLES)}"
            problems.append(f"{name} is set, and anyattn reads no such variable: {meant}")
    return problems


def _names(environ: Mapping[str, str], variable: str, *, most: int | None = None) -> tuple[str, ...]:
    """The names in a list separated by commas, each once."""
    text = environ.get(variable, "")
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if most is not None and len(names) > most:
        raise SpecError(f"{variable} must be one name, not {text!r}.")
    return names


def _positive_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()) or len(text) > 9 or int(text) < 1:
        raise SpecError(f"{name} must be a positive integer, not {text!r}.")
    return int(text)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name, "0")
    if text not in ("", "0", "1"):
        raise SpecError(f"{name} must be 0 or 1, not {text!r}.")
    return text == "1"

"""What several tests of the kit share."""

import functools
import importlib.metadata

import pytest

from anyattn.testing.contract import classes, fresh_process

packages_distributions = functools.cache(importlib.metadata.packages_distributions)


@functools.cache
def brought_in(function, place, names):
    return fresh_process.call(function, place=place, names=list(names))


@pytest.fixture
def one_look_at_each_import(monkeypatch):
    """For tests that run the contract tier often: what is installed, and what comes in with a module, is found out once
    for all of them, as the first reads all metadata and the second takes a process."""
    monkeypatch.setattr(importlib.metadata, "packages_distributions", packages_distributions)
    monkeypatch.setattr(
        classes, "call", lambda function, *, place, names: brought_in(function, place, tuple(names))
    )

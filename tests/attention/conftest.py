"""What several files of this folder share."""

import pytest


@pytest.fixture
def portable(monkeypatch):
    """Where a test names no backend it gets torch_native: what would be chosen depends on the CPU, and may be compiled
    in seconds."""
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "torch_native")

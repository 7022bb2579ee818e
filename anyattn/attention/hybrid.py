"""Two backends over one pool: one plans and runs batches of single query tokens, the other all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.types import Role

if TYPE_CHECKING:
    from anyattn.attention.backend import AttentionBackend
    from anyattn.attention.batch import Batch


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """The backend that a step went to, and its plan."""

    backend: AttentionBackend
    plan: Any


class HybridBackend:
    """Composition of a prefill and a decode backend; they may be the same object."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill = prefill
        self.decode = decode

    def plan(self, batch: Batch) -> PlannedStep:
        """Picks the backend by the batch and has it plan."""
        backend = self.decode if role_of(batch) == "decode" else self.prefill
        return PlannedStep(backend, backend.plan(batch))


def role_of(batch: Batch) -> Role:
    """The role that serves a batch."""
    return "decode" if batch.phase == "decode" else "prefill"

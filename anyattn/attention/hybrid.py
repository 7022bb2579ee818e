"""Several backends over one pool: each step goes to the one that the selection names for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.types import TYPICAL_LOAD, Load, Role

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyattn.attention.backend import AttentionBackend
    from anyattn.attention.batch import Batch
    from anyattn.attention.selection import Selection


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """The backend that a step went to, and its plan."""

    backend: AttentionBackend
    plan: Any


class HybridBackend:
    """Composition of a selection's backends.

    backends: an instance for each name that the selection chose; one may fill several roles.
    """

    def __init__(self, selection: Selection, backends: Mapping[str, AttentionBackend]) -> None:
        self._selection = selection
        self._backends = backends

    def plan(self, batch: Batch) -> PlannedStep:
        """Picks the backend by the batch and has it plan."""
        backend = self._pick(batch, _load_of(batch))
        return PlannedStep(backend, backend.plan(batch))

    def init_graph(self, batch: Batch) -> PlannedStep:
        """Picks the backend by the graph's sizes, for good: as many sequences, of the typical length or the longest."""
        load = Load(num_seqs=batch.num_seqs, kv_len=min(batch.max_kv_len, TYPICAL_LOAD.kv_len))
        backend = self._pick(batch, load)
        return PlannedStep(backend, backend.init_graph(batch))

    def _pick(self, batch: Batch, load: Load) -> AttentionBackend:
        chosen = self._selection
        if _role_of(batch) != "decode":
            return self._backends[chosen.prefill]
        by_load = chosen.decode_by_load
        return self._backends[chosen.decode if by_load is None else by_load.pick(load)]


def _load_of(batch: Batch) -> Load:
    """How big a batch is; taken from the host's lengths."""
    return Load(num_seqs=batch.num_seqs, kv_len=int(batch.host.kv_lens.sum()) // max(batch.num_seqs, 1))


def _role_of(batch: Batch) -> Role:
    """The role that serves a batch."""
    return "decode" if batch.phase == "decode" else "prefill"

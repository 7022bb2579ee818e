"""Several backends over one pool: each step goes to the one that the selection names for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.types import TYPICAL_LOAD, GraphLevel, Load, dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from anyattn.attention.backend import AttentionBackend
    from anyattn.attention.batch import Batch
    from anyattn.attention.selection import Selection
    from anyattn.mem_cache.base import LayerKV
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """The backend that a step went to, and its plan."""

    backend: AttentionBackend
    plan: Any

    def run(
        self, q: torch.Tensor, kv: LayerKV, out: torch.Tensor | None = None, **more: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and LSE of the backend, which gets q and out in the form that it asks for.

        out: where to write; None where the output may be a new tensor. more: what else the backend's `run` takes.

        Raises ContractError for what a backend that declares `allocates_out` returns in another form.
        """
        backend = self.backend
        declared = backend.capabilities
        if not q.is_contiguous() and (declared.contiguous_q or q.stride(-1) != 1):
            q = q.contiguous()
        if not declared.allocates_out:
            if out is None:
                out = q.new_empty((q.shape[0], q.shape[1], backend.spec.vo_head_dim))
            return out, backend.run(q, kv, self.plan, out, **more)  # type: ignore[return-value]
        returned = backend.run(q, kv, self.plan, None, **more)
        shape = (q.shape[0], q.shape[1], backend.spec.vo_head_dim)
        if type(returned) is not tuple or len(returned) != 2 or not _is_output(returned[0], shape, q.dtype):
            raise ContractError(
                f"{type(backend).__name__} declares allocates_out, so that its run must return a contiguous output "
                f"{list(shape)} of {dtype_name(q.dtype)} and the LSE or None, not {_described(returned)}: declare "
                "allocates_out=False where it writes to out."
            )
        return returned if out is None else (out.copy_(returned[0]), returned[1])


def _is_output(result: Any, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    if not isinstance(result, torch.Tensor) or result.dtype is not dtype or result.shape != shape:
        return False
    return result.is_contiguous()


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        packed = "" if value.is_contiguous() else " that is not contiguous"
        return f"a tensor {list(value.shape)} of {dtype_name(value.dtype)}{packed}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_described, value))})"
    return "None" if value is None else type(value).__name__


class HybridBackend:
    """Composition of a selection's backends.

    backends: an instance for each name that the selection chose; one may fill several roles.
    """

    def __init__(self, selection: Selection, backends: Mapping[str, AttentionBackend]) -> None:
        self._selection = selection
        self._backends = backends

    @property
    def needs_finite_tails(self) -> bool:
        """Whether any of its backends does."""
        return any(backend.capabilities.needs_finite_tails for backend in self._backends.values())

    def plan(self, batch: Batch) -> PlannedStep:
        """Picks the backend by the batch and has it plan."""
        host = batch.host
        load = Load(num_seqs=batch.num_seqs, kv_len=int(host.kv_lens.sum()) // max(batch.num_seqs, 1))
        backend = self._pick(_uniform_qo_len(batch), load, GraphLevel.NEVER)
        return PlannedStep(backend, backend.plan(batch))

    def plan_all(self, batch: Batch) -> dict[str, PlannedStep]:
        """`plan` with each backend that such a batch goes to at some load, by name."""
        backends = self._at_any_load(_uniform_qo_len(batch), GraphLevel.NEVER)
        return {name: PlannedStep(backend, backend.plan(batch)) for name, backend in backends.items()}

    def init_graph(self, batch: Batch, level: GraphLevel) -> PlannedStep:
        """Picks the backend by the graph's sizes, for good: as many sequences, of the typical length or the longest.

        level: of the graph, which says whether all sequences have as many new tokens.
        """
        load = Load(num_seqs=batch.num_seqs, kv_len=min(batch.max_kv_len, TYPICAL_LOAD.kv_len))
        backend = self._pick(_graph_qo_len(batch, level), load, level)
        return PlannedStep(backend, backend.init_graph(batch))

    def init_graph_all(self, batch: Batch, level: GraphLevel) -> dict[str, PlannedStep]:
        """`init_graph` with each backend that such a graph goes to with other sizes, by name."""
        backends = self._at_any_load(_graph_qo_len(batch, level), level)
        return {name: PlannedStep(backend, backend.init_graph(batch)) for name, backend in backends.items()}

    def _pick(self, qo_len: int | None, load: Load, level: GraphLevel) -> AttentionBackend:
        """qo_len: new tokens of each sequence; None where they differ, or where trees mask them."""
        chosen = self._selection
        if qo_len is None:
            return self._backends[chosen.prefill]
        by_load = chosen.decode_by_load
        name = chosen.decode if by_load is None else by_load.pick(load)
        return self._backends[name if self._decodes(name, qo_len, level) else chosen.prefill]

    def _at_any_load(self, qo_len: int | None, level: GraphLevel) -> dict[str, AttentionBackend]:
        """What `_pick` may answer, by name."""
        chosen = self._selection
        names = [chosen.prefill]
        if qo_len is not None:
            decode = chosen.backends("decode")
            names = [name if self._decodes(name, qo_len, level) else chosen.prefill for name in decode]
        return {name: self._backends[name] for name in names}

    def _decodes(self, name: str, qo_len: int, level: GraphLevel) -> bool:
        """Whether a backend of the role of decode serves so many new tokens of each sequence."""
        declared = self._backends[name].capabilities
        # Of one token each, a graph is asked of decode at its own level; of several, it serves what it declares.
        return qo_len == 1 or (qo_len <= declared.decode_qo_len and level <= declared.graph)


def _uniform_qo_len(batch: Batch) -> int | None:
    """New tokens of each sequence; None where they differ, or where trees mask them."""
    uniform = batch.num_tokens == batch.num_seqs * batch.max_qo_len and batch.tree_masks is None
    return batch.max_qo_len if uniform else None


def _graph_qo_len(batch: Batch, level: GraphLevel) -> int | None:
    """Likewise, of a graph's steps."""
    uniform = level != GraphLevel.ALWAYS and batch.tree_masks is None
    return batch.max_qo_len if uniform else None

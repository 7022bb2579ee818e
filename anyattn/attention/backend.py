"""The base class of attention backends: one file that subclasses it and one line of registration make a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.capabilities import Capabilities
from anyattn.errors import ContractError

if TYPE_CHECKING:
    import torch

    from anyattn.attention.batch import Batch
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import LayerKV
    from anyattn.mem_cache.spec import CacheSpec
    from anyattn.platforms.base import Platform


class AttentionBackend(ABC):
    """Computes attention over paged KV for one spec on one device.

    The module must be importable without torch and without the vendor's package, so that what a backend declares can
    be read on any machine; `anyattn.lazy.lazy_import` keeps the code as it would be otherwise.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, spec: AttentionSpec, cache: CacheSpec, platform: Platform) -> None:
        """Called only with what `capabilities` accepts; workspaces belong here."""
        self.spec = spec
        self.cache = cache
        self.platform = platform

    @abstractmethod
    def plan(self, batch: Batch) -> Any:
        """The host work of one step, shared by all layers that run with it. Returns what `run` needs.

        `batch.host` holds the lengths and tables on the host, so no plan has to wait for the device.
        """

    # One with `capabilities.topk` takes `indices: torch.Tensor | None = None` besides, by name; see below.
    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: Any,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None] | None:
        """Attention of one layer, its new keys and values already stored. No host sync, no lookup.

        q: [num_tokens, num_qo_heads, head_dim], spec.dtype; strided, unless `capabilities.contiguous_q`, but its last
            dimension is contiguous.
        out: [num_tokens, num_qo_heads, vo_head_dim], spec.dtype, contiguous; written here. 0 for a row that sees
            nothing. With `capabilities.allocates_out` None: such a tensor, a new one each time, is then returned, in a
            pair with the LSE or None.
        sinks: [num_qo_heads], float32 or bfloat16, as the engine has them; alibi_slopes: [num_qo_heads], float32. Given
            when and only when the spec asks for them.
        indices: [num_tokens, spec.topk], int32, contiguous, for each token the slots of the keys that it sees, in any
            order, -1 standing for none anywhere among them. Passed when and only when spec.topk, so that a backend
            without `capabilities.topk` has no such parameter. kv is then that of a `DSAPool`.

        Returns the LSE, [num_tokens, num_qo_heads], float32, natural log, -inf for a row that sees nothing, when
        spec.return_lse; otherwise None.
        """

    def init_graph(self, batch: Batch) -> Any:
        """A plan with which `run` is captured in a device graph; asked for only where `capabilities.graph` is a level.

        batch: as large as the graph's steps can be, at first without any sequence. Its tensors stay where they are:
            before each replay they hold that step, padded with sequences without tokens (`qo_indptr` and `kv_indptr`
            are flat there, `kv_lens` 0, the block table names the null page). Its numbers (`num_seqs`, `num_tokens`,
            `max_qo_len`, `max_kv_len`) hold for every step; its `host` is that of the step without sequences.

        Whatever `run` reads from the plan on the device must stay where it is too, and what it computes on the host is
        in the graph for good. Rows of padding may get any result, and must not reach others.
        """
        raise ContractError(self._no_graph("init_graph"))

    def refresh_graph(self, plan: Any, batch: Batch) -> None:
        """Brings a plan of `init_graph` up to date for the next replay, in place.

        batch: the one that `init_graph` was given, its tensors holding the new step already, with the step's `host`,
            which is padded likewise. A backend that reads nothing but these tensors has nothing to do here.
        """
        raise ContractError(self._no_graph("refresh_graph"))

    def _no_graph(self, method: str) -> str:
        name, level = type(self).__name__, self.capabilities.graph.name.lower()
        return f"{name} declares graph={level} and has no {method}: implement it, or declare graph=GraphLevel.NEVER."

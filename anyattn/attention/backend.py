"""The base class of attention backends: one file that subclasses it and one line of registration make a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.attention.capabilities import Capabilities

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

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        plan: Any,
        out: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Attention of one layer, its new keys and values already stored. No host sync, no lookup.

        q: [num_tokens, num_qo_heads, head_dim], spec.dtype; strided, unless `capabilities.contiguous_q`, but its last
            dimension is contiguous.
        out: [num_tokens, num_qo_heads, vo_head_dim], spec.dtype, contiguous; written here. 0 for a row that sees
            nothing.
        sinks, alibi_slopes: [num_qo_heads], float32, given when and only when the spec asks for them.

        Returns the LSE, [num_tokens, num_qo_heads], float32, natural log, -inf for a row that sees nothing, when
        spec.return_lse; otherwise None.
        """

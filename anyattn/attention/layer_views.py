"""Views of a layer's pages that a backend makes once: each takes the host longer than much else that a call does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from anyattn.mem_cache.base import LayerKV


class LayerViews:
    """What `make` gives for each layer's pages. For layers of pools only, as it keeps them."""

    def __init__(self, make: Callable[[LayerKV], Any]) -> None:
        self._make = make
        self._kept: dict[int, tuple[LayerKV, Any]] = {}

    def of(self, kv: LayerKV) -> Any:
        """kv: the pool's own object, which is another one once its scales are set."""
        kept = self._kept.get(id(kv))
        if kept is None or kept[0] is not kv:
            kept = self._kept[id(kv)] = (kv, self._make(kv))
        return kept[1]

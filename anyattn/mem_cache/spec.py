"""What one model keeps per token: the geometry of its KV cache, the sizes that follow, and pages for a memory size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from anyattn.errors import SpecError
from anyattn.mem_cache.layouts import page_shape
from anyattn.types import ALL_LAYOUTS, DTYPE_BYTES, KVLayout

CacheKind = Literal["mha", "mla", "dsa", "index"]
CACHE_KINDS: dict[CacheKind, str] = {
    "mha": "keys and values of heads",
    "mla": "MLA latents",
    "dsa": "MLA latents in the fp8 rows of DeepSeek sparse attention",
    "index": "keys of the indexer of DeepSeek sparse attention",
}
"""What a cache keeps, and what that is called."""

DSA_HEAD_DIM = 576
DSA_V_HEAD_DIM = 512
DSA_ROW_BYTES = 656
"""One token in FlashMLA's fp8 format for sparse attention: 512 fp8, 4 float32 scales, 64 bfloat16."""
INDEX_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The KV cache of a model on one device.

    num_layers: none is fine: where all layers have windows, the pool of those without has no bytes, only page ids.
    num_kv_heads, head_dim, v_head_dim: of one layer. "mla" and "dsa" have one head of `head_dim = kv_lora_rank + rope`
        whose first `v_head_dim = kv_lora_rank` elements are the values too, and are stored once, in layout NZ the
        other elements, the rope part, in pages of their own; "dsa" has just 576 and 512. "index" has keys only: one
        head, v_head_dim 0.
    kv_dtype: dtype of the stored elements; fp8 is read as stored value times scale. "dsa" and "index" take
        float8_e4m3fn, and keep the scales among the pages.
    page_size: tokens in a page.
    joined_layers: whether all layers' parts of one page lie together, in one storage whose pages are
        `bytes_per_page` apart; otherwise each part of each layer has a storage of its own.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_dtype: str
    page_size: int
    layout: KVLayout = "NHD"
    kind: CacheKind = "mha"
    joined_layers: bool = False

    def __post_init__(self) -> None:
        if self.kind not in CACHE_KINDS:
            raise SpecError(f"kind must be one of {', '.join(CACHE_KINDS)}, not {self.kind!r}.")
        for name in ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "page_size"):
            least = 0 if name == "num_layers" or (self.kind, name) == ("index", "v_head_dim") else 1
            if getattr(self, name) < least:
                raise SpecError(f"{name} must be at least {least}, not {getattr(self, name)}.")
        if self.kv_dtype not in DTYPE_BYTES:
            raise SpecError(f"kv_dtype must be one of {', '.join(DTYPE_BYTES)}, not {self.kv_dtype!r}.")
        if self.layout not in ALL_LAYOUTS:
            raise SpecError(f"layout must be one of {', '.join(ALL_LAYOUTS)}, not {self.layout!r}.")
        if self.kind != "mha":
            self._check_one_head()
        self.page_shapes()  # raises where the layout's pieces do not divide the sizes

    def _check_one_head(self) -> None:
        wanted: dict[str, object] = {"num_kv_heads": 1}
        if self.kind == "dsa":
            wanted |= {"head_dim": DSA_HEAD_DIM, "v_head_dim": DSA_V_HEAD_DIM}
        if self.kind == "index":
            wanted |= {"v_head_dim": 0}
        if self.kind in ("dsa", "index"):
            wanted |= {"kv_dtype": "float8_e4m3fn", "layout": "NHD"}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise SpecError(f"{name} must be {value!r} where kind is {self.kind!r}, not {getattr(self, name)!r}.")
        if self.kind == "index" and self.head_dim % INDEX_SCALE_BYTES:
            raise SpecError(
                f"head_dim must be a multiple of {INDEX_SCALE_BYTES} where kind is 'index', as the float32 scales lie "
                f"behind the keys; {self.head_dim} is not."
            )
        if self.kind == "mla":
            if self.v_head_dim > self.head_dim:
                raise SpecError(f"v_head_dim must be at most head_dim, {self.head_dim}, not {self.v_head_dim}.")
            self._page_shape("k", self.v_head_dim)  # values are a view of the keys: pieces must end with them

    def _page_shape(self, part: Literal["k", "v"], dim: int) -> tuple[int, ...]:
        return page_shape(
            self.layout,
            part,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            dim=dim,
            itemsize=DTYPE_BYTES[self.kv_dtype],
        )

    def page_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of one page of each part that a layer stores: keys, then values where they are not within the keys.

        For "mla" in layout NZ: latents, then rope parts where there are any. In elements of `kv_dtype`; for "dsa" and
        "index" in bytes.
        """
        if self.kind == "dsa":
            return ((self.page_size, 1, DSA_ROW_BYTES),)
        if self.kind == "index":
            return ((self.page_size, 1, self.head_dim + INDEX_SCALE_BYTES),)
        if self.kind == "mla" and self.layout == "NZ" and self.head_dim > self.v_head_dim:
            return tuple(self._page_shape("k", dim) for dim in (self.v_head_dim, self.head_dim - self.v_head_dim))
        keys = self._page_shape("k", self.head_dim)
        return (keys,) if self.kind == "mla" else (keys, self._page_shape("v", self.v_head_dim))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers together."""
        itemsize = DTYPE_BYTES[self.kv_dtype]
        row = {
            "mha": self.num_kv_heads * (self.head_dim + self.v_head_dim) * itemsize,
            "mla": self.head_dim * itemsize,
            "dsa": DSA_ROW_BYTES,
            "index": self.head_dim + INDEX_SCALE_BYTES,
        }[self.kind]
        return self.num_layers * row

    @property
    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together."""
        return self.bytes_per_token * self.page_size

    def pages_for_bytes(self, memory_bytes: int) -> int:
        """How many pages can be allocated from a pool of at most `memory_bytes`, its null page not counted."""
        return max(memory_bytes // max(self.bytes_per_page, 1) - 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """The layers of a model that share pages: all that see everything, or all that have one window.

    cache: of these layers. window: tokens that a token sees, itself included; None for all of them.
    """

    cache: CacheSpec
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise SpecError(f"window must be at least 1 token, not {self.window}.")


def window_pages(window: int, page_size: int, num_seqs: int, max_new_tokens: int) -> int:
    """The most window pages that a step can need, in pages.

    window, page_size: in tokens. num_seqs: sequences that hold pages at a time. max_new_tokens: new tokens of all
    sequences of a step together (where a prefill's chunk goes with decoding sequences, both).

    A sequence with n new tokens needs the n tokens and the window - 1 before them, which span at most
    `(window + n - 3) // page_size + 2` pages, as they may begin anywhere in a page. One new token each, or none after a
    step with one, makes `num_seqs * (ceil((window - 1) / page_size) + 1)`. The first few more of a sequence may open a
    page where a page's worth of them would open no more, so the worst step spreads its tokens over many sequences.
    A sequence that sits out the steps after a chunk keeps the chunk's pages until its next token: count such chunks to
    max_new_tokens. A fork counts as a sequence, and as one more where it copies a partial page while the shared one is
    still held.
    """
    for name, value, least in (("window", window, 1), ("page_size", page_size, 1), ("num_seqs", num_seqs, 0)):
        if value < least:
            raise SpecError(f"{name} must be at least {least}, not {value}.")
    if num_seqs == 0:
        return 0
    to_next_page = page_size - (window - 2) % page_size + 1  # new tokens of a sequence that open a page more
    openers = min(num_seqs if to_next_page <= page_size else 1, max_new_tokens // to_next_page)
    opened = openers and openers + (max_new_tokens - openers * to_next_page) // page_size
    return num_seqs * ((window - 2) // page_size + 2) + opened


def memory_needed(groups: Sequence[CacheGroup], num_pages: Sequence[int]) -> int:
    """Bytes of the groups' pools with so many usable pages each; every pool has its null page besides."""
    return sum((pages + 1) * group.cache.bytes_per_page for group, pages in zip(groups, num_pages, strict=True))


def pages_for_memory(
    groups: Sequence[CacheGroup], memory_bytes: int, *, num_seqs: int, max_new_tokens: int
) -> tuple[int, ...]:
    """Usable pages of each group's pool, so that all pools with their null pages fit into `memory_bytes`.

    Groups without a window have equally many, as the same page ids name their pages; groups with one have what
    `window_pages(window, page_size, num_seqs, max_new_tokens)` says, but not more than those. That number is the
    largest that fits: one more would not. All are 0 where the memory is too small for one page. Where all layers have
    windows, a group of none names the pages: it has as many as the memory could hold of the smallest group.
    """
    page_bytes = [group.cache.bytes_per_page for group in groups if group.cache.num_layers]
    if not page_bytes:
        raise SpecError("pages_for_memory needs at least one group with layers.")
    sizes = sorted({group.cache.page_size for group in groups})
    if len(sizes) > 1:
        raise SpecError(f"the groups of one model have one page_size, not {' and '.join(map(str, sizes))}.")
    limits = [
        None if group.window is None else window_pages(group.window, sizes[0], num_seqs, max_new_tokens)
        for group in groups
    ]

    def with_full(pages: int) -> tuple[int, ...]:
        return tuple(pages if limit is None else min(limit, pages) for limit in limits)

    low, high = 0, max(memory_bytes // min(page_bytes), 0)
    while low < high:  # the memory grows with the full groups' pages
        middle = (low + high + 1) // 2
        low, high = (middle, high) if memory_needed(groups, with_full(middle)) <= memory_bytes else (low, middle - 1)
    return with_full(low)

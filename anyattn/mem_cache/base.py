"""The contract of allocators and pools: what a plugin implements to bring its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import
from anyattn.mem_cache import indices, layouts, misuse
from anyattn.mem_cache.spec import CACHE_KINDS, CacheKind
from anyattn.types import (
    ALL_LAYOUTS,
    DTYPE_BYTES,
    FP8_DTYPES,
    KV_LAYOUTS,
    MOST_PAGES,
    NULL_PAGE,
    IntSet,
    KVLayout,
    Reason,
    declared_json,
)

if TYPE_CHECKING:
    import numpy as np
    import torch

    from anyattn.mem_cache.indices import Int64s
    from anyattn.mem_cache.kernels.pages import PageMover
    from anyattn.mem_cache.kernels.tails import TailZeroer
    from anyattn.mem_cache.spec import CacheSpec
else:
    np = lazy_import("numpy")
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorCapabilities:
    """What a KV allocator serves. `device_kinds` None means every kind."""

    device_kinds: frozenset[str] | None = None
    page_sizes: IntSet
    priority: int = 0

    def __post_init__(self) -> None:
        _check_declaration(self, page_sizes=IntSet)

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; see `types.declared_json`."""
        return declared_json(self)

    def reject_reasons(self, device_kind: str, page_size: int | None = None) -> list[Reason]:
        """All reasons against this allocator; without a page size, those that hold at every page size."""
        reasons = _device_reasons(self.device_kinds, device_kind)
        if page_size is not None and page_size not in self.page_sizes:
            reasons.append(
                Reason(
                    field="page_size",
                    wanted=str(page_size),
                    supported=str(self.page_sizes),
                    remedy=f"set page_size={self.page_sizes.nearest(page_size)}",
                )
            )
        return reasons

    def require(self, num_pages: int, page_size: int) -> None:
        """Raises ContractError for a number of pages that no allocator has, or a page size that this one has not."""
        if not 1 <= num_pages <= MOST_PAGES:
            raise ContractError(f"num_pages must be 1 to {MOST_PAGES}, not {num_pages}.")
        if page_size not in self.page_sizes:
            raise ContractError(f"page_size must be {self.page_sizes}, not {page_size}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolCapabilities:
    """What a KV pool stores. `device_kinds` None means every kind, `archs` None every one of those devices."""

    device_kinds: frozenset[str] | None = None
    archs: frozenset[str] | None = None
    kind: CacheKind
    """What it keeps; `CACHE_KINDS` has what each means."""
    kv_dtypes: frozenset[str]
    layouts: tuple[KVLayout, ...] = KV_LAYOUTS
    """In order of preference."""
    per_head_scales: bool = False
    """Whether fp8's k_scale and v_scale may have one element for each KV head."""
    joined_layers: bool = False
    """Whether all layers' parts of a page can lie together."""
    priority: int = 0

    def __post_init__(self) -> None:
        flags = {"per_head_scales": bool, "joined_layers": bool}
        _check_declaration(self, archs=_NAMES_OR_NONE, kind=str, kv_dtypes=frozenset, layouts=tuple, **flags)
        if self.kind not in CACHE_KINDS:
            raise ContractError(f"PoolCapabilities: kind cannot be {self.kind!r}.")

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values; see `types.declared_json`."""
        return declared_json(self)

    def reject_reasons(
        self,
        device_kind: str,
        *,
        arch: str | None = None,
        kind: CacheKind,
        kv_dtype: str,
        kv_scale_per_head: bool = False,
        joined_layers: bool = False,
    ) -> list[Reason]:
        """All reasons against this pool, in the words of `AttentionSpec` and of `create_runtime`'s arguments.

        arch: of the device; without it, those that hold on every device of the kind.
        """
        reasons = _device_reasons(self.device_kinds, device_kind)
        if not reasons and self.archs is not None and arch is not None and arch not in self.archs:
            names = ", ".join(sorted(self.archs))
            reasons.append(Reason(field="arch", wanted=arch, supported=names, remedy=f"use a device of arch {names}"))
        if kind != self.kind:
            reasons.append(
                Reason(
                    field="kind",
                    wanted=CACHE_KINDS[kind],
                    supported=CACHE_KINDS[self.kind],
                    remedy="name another pool",
                    another=True,
                )
            )
        if kv_dtype not in self.kv_dtypes:
            supported = sorted(self.kv_dtypes)
            remedy = f"set kv_dtype={supported[0]!r}"
            if kv_scale_per_head and supported[0] not in FP8_DTYPES:  # only fp8 has scales
                remedy += " and kv_scale_per_head=False"
            reasons.append(Reason(field="kv_dtype", wanted=kv_dtype, supported=", ".join(supported), remedy=remedy))
        for name, asked, served in (
            ("kv_scale_per_head", kv_scale_per_head, self.per_head_scales),
            ("joined_layers", joined_layers, self.joined_layers),
        ):
            if asked and not served:
                reasons.append(Reason(field=name, wanted="True", supported="False", remedy=f"set {name}=False"))
        return reasons


_NAMES_OR_NONE = (frozenset, type(None))


def _check_declaration(declared: AllocatorCapabilities | PoolCapabilities, **types: Any) -> None:
    types_of: dict[str, Any] = {"device_kinds": _NAMES_OR_NONE, "priority": int, **types}
    for name, kinds in types_of.items():
        value = getattr(declared, name)
        if not isinstance(value, kinds) or (isinstance(value, frozenset | tuple) and not value):
            raise ContractError(f"{type(declared).__name__}: {name} cannot be {value!r}.")
    known_names = {"device_kinds": None, "archs": None, "kv_dtypes": {*DTYPE_BYTES}, "layouts": {*ALL_LAYOUTS}}
    for name, known in known_names.items():
        for member in getattr(declared, name, None) or ():
            if not isinstance(member, str) or (known is not None and member not in known):
                raise ContractError(f"{type(declared).__name__}: {name} cannot hold {member!r}.")


def _device_reasons(supported: frozenset[str] | None, device_kind: str) -> list[Reason]:
    if supported is None or device_kind in supported:
        return []
    names = ", ".join(sorted(supported))
    return [Reason(field="device_kind", wanted=device_kind, supported=names, remedy=f"use a device of kind {names}")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Extension:
    """What `KVAllocator.extend` took for a batch; arrays of the allocator's engine.

    indptr: [num_seqs + 1], int32, where each sequence's new pages begin in `pages`.
    pages: [indptr[-1]], int32, new page ids, sequence by sequence; on the device, where that number is not known, more
        may follow.
    copied_from: [num_seqs], int32, the page whose KV data goes into the sequence's first new page, which then stands
        in its place; the null page where nothing is copied.
    """

    indptr: Any
    pages: Any
    copied_from: Any


class KVAllocator(ABC):
    """The books of pages: which are free, and how many hold each of the others. Page 0, the null page, is neither.

    Arrays are those of the allocator's engine: numpy on the host, tensors for one that keeps its books on the device.
    In what is shared or freed the null page is padding, and is skipped.
    """

    capabilities: ClassVar[AllocatorCapabilities]

    page_size: int
    debug: bool = False
    """Whether misuse is found when it happens."""
    may_share: bool = True
    """Whether a page may have more than one reference; where none has, `extend` need not look at them."""

    @abstractmethod
    def __init__(self, num_pages: int, page_size: int, device: Any = None, *, debug: bool = False) -> None:
        """Pages 1 to `num_pages` are free.

        device: of the KV data, for engines to whom that matters. debug: find misuse when it happens; see `free`,
            `share` and `extend`, and `mem_cache.misuse` for what books on the host need for it.
        """

    @property
    @abstractmethod
    def num_pages(self) -> int:
        """Pages there are, the null page not counted."""

    @property
    @abstractmethod
    def num_free_pages(self) -> int:
        """Pages that `alloc` can still hand out."""

    @abstractmethod
    def alloc(self, num_pages: int) -> Any:
        """`num_pages` page ids, int32, each with one reference.

        Raises OutOfPagesError, and takes nothing, when fewer are free.
        """

    def extend(
        self, prefix_lens: Any, lengths: Any, last_slots: Any, *, most_new_tokens: int | None = None
    ) -> Extension:
        """Pages for the new tokens of a batch: the last partial page is filled, whole pages follow, then the tail.

        prefix_lens, lengths: [num_seqs], int32 or int64, tokens of each sequence before and after.
        last_slots: [num_seqs], int64, slot of each sequence's last token, 0 where there is none.
        most_new_tokens: what the lengths grow by in sum, at most; wanted by engines whose lengths live on the device.

        A last page that is partial and shared is replaced by a new one (`Extension.copied_from`) and loses one
        reference; should it be the last, the page is free once this call's pages were taken, so that its data can
        still be copied before it is handed out again.

        Raises OutOfPagesError, and takes nothing, when pages are short. In debug mode raises ContractError for a last
        page that is free (use after free), for one that two sequences would write to (aliasing) and for a slot that
        does not fit its prefix (misalignment).

        This one serves engines that keep their books on the host.
        """
        if self.debug:
            misuse.check_extend(self, prefix_lens, lengths, last_slots)
        prefix_lens, lengths = np.asarray(prefix_lens, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        needed = indices.pages_for(lengths, self.page_size) - indices.pages_for(prefix_lens, self.page_size)
        copied_from = np.zeros(needed.size, dtype=np.int32)
        if self.may_share:
            written = (lengths > prefix_lens) & (prefix_lens % self.page_size != 0)
            last_pages = np.where(written, np.asarray(last_slots, dtype=np.int64) // self.page_size, NULL_PAGE)
            copied = self.ref_counts(last_pages) > 1
            copied_from[copied] = last_pages[copied]
            needed = needed + copied
        indptr = np.zeros(needed.size + 1, dtype=np.int32)
        if not np.count_nonzero(needed):  # most steps of a decode
            return Extension(indptr=indptr, pages=indptr[:0], copied_from=copied_from)
        ends = needed.cumsum()
        pages = self.alloc(int(ends[-1]))  # refuses what int32 could not hold either
        indptr[1:] = ends
        if self.may_share:
            self.free(copied_from)
        return Extension(indptr=indptr, pages=pages, copied_from=copied_from)

    @abstractmethod
    def share(self, pages: Any) -> None:
        """Adds a reference to each page, two to one named twice. In debug mode raises ContractError for free ones."""

    @abstractmethod
    def free(self, pages: Any) -> int | None:
        """Takes a reference from each page, and those without any back. Returns how many; None if it has no sync.

        In debug mode raises ContractError, and takes none, when a page has fewer references than are given back
        (double free) or is not one of this allocator's (foreign free).
        """

    @abstractmethod
    def ref_counts(self, pages: Any) -> Any:
        """References of each page, int32; 0 for free ones."""

    @abstractmethod
    def check(self) -> None:
        """Proves the books: every page is either free or referenced, never both. Raises ContractError."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerKV:
    """One layer's pages, as a backend reads them.

    k: [num_pages, page_size, num_kv_heads, head_dim] for NHD, [num_pages, num_kv_heads, page_size, head_dim] for HND;
        `anyattn.mem_cache.layouts` has the vendors' orders. For DeepSeek sparse attention, uint8: see `sparse_pools`.
    v: likewise with v_head_dim; for MLA a view of the first `kv_lora_rank` elements of k.
    v_in_k: whether v is such a view.
    rope: for MLA in layout NZ [num_pages, 1, qk_rope_head_dim / 16, page_size, 16], as k and v are then both just
        latents; None otherwise.
    k_scale, v_scale: what stored values are multiplied with; a float, or a float32 tensor of one element or, where the
        pool serves it, of one for each KV head: [num_kv_heads].
    """

    k: torch.Tensor
    v: torch.Tensor
    layout: KVLayout
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    v_in_k: bool = False
    rope: torch.Tensor | None = None

    @property
    def stored(self) -> list[torch.Tensor]:
        """What the layer keeps, each element once: k, then v where that is not in k, or rope where that is apart."""
        return [self.k, *([] if self.v_in_k else [self.v]), *([] if self.rope is None else [self.rope])]

    def nhd(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as [num_pages, page_size, num_kv_heads, dim]; views, strided where the layout is HND.

        Raises ContractError for other layouts, of which no such view exists.
        """
        if self.layout not in KV_LAYOUTS:
            raise ContractError(
                f"pages in layout {self.layout} have no view as [num_pages, page_size, num_kv_heads, dim]; "
                "gather(pages) copies those that are wanted."
            )
        if self.layout == "NHD":
            return self.k, self.v
        return self.k.transpose(1, 2), self.v.transpose(1, 2)

    def gather(self, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v of some pages in plain order, for every layout: [len(pages), page_size, num_kv_heads, dim].

        pages: [n], int32 or int64, on the device of k. Stored values, not yet multiplied with a scale; contiguous
        copies, but that v is a view of k's copy where `v_in_k`.
        """
        k = layouts.gather(self.k, self.layout, "k", pages)
        if self.rope is not None:
            k = torch.cat([k, layouts.gather(self.rope, self.layout, "k", pages)], dim=-1)
        if self.v_in_k:
            dim_hi, dim_lo = layouts.tokens_view(self.v, self.layout, "k").shape[4:]
            return k, k[..., : dim_hi * dim_lo]
        return k, layouts.gather(self.v, self.layout, "v", pages)


class KVPool(ABC):
    """Owns the KV bytes of all layers and is the only writer of them."""

    capabilities: ClassVar[PoolCapabilities]

    cache: CacheSpec
    num_pages: int
    """Pages that sequences can own; there is one more, the null page."""
    layers: list[LayerKV]
    device: torch.device
    """Where the pages are, as their tensors name it."""
    _page_mover: PageMover | None = None
    _tail_zeroer: TailZeroer | None = None

    @abstractmethod
    def __init__(self, cache: CacheSpec, num_pages: int, device: Any) -> None:
        """Zeroed pages 0 (the null page) to `num_pages`, for every layer."""

    @abstractmethod
    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor) -> None:
        """Writes one layer's new tokens to their slots, without a host sync; inputs may have any strides.

        k: [num_tokens, num_kv_heads, head_dim]; latents and rope parts joined, [num_tokens, kv_lora_rank +
            qk_rope_head_dim], or just latents, [num_tokens, kv_lora_rank]; for indexer keys [num_tokens, head_dim].
        v: [num_tokens, num_kv_heads, v_head_dim]; None, or where k has just latents the rope parts, [num_tokens,
            qk_rope_head_dim].
        slots: [num_tokens], int64, `page_id * page_size + offset`. Tokens in slots of the null page are not stored.
            Slots of other pages differ from each other.
        Shapes and dtypes are the caller's to check: `AttentionRuntime.run` does.
        """

    @abstractmethod
    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        """Sets what `store` divides by and readers multiply with, before anything of the layer is stored.

        A float, or a float32 tensor on the pool's device of one element or, where `capabilities.per_head_scales`, of
        one for each KV head. A tensor's value is not read on the host. Raises ContractError for others, and when the
        pool has no scales to set.
        """

    @abstractmethod
    def parts(self) -> list[torch.Tensor]:
        """The storage, always the same tensors: the first axis is pages, and a page of each is contiguous.

        In the order layer by layer, keys before values; what several layers share is there once.
        """

    def read_pages(self, pages: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copies pages of all layers into records: [len(pages), bytes_per_page], uint8, on the pool's device.

        pages: [n], int32 or int64, on the pool's device, or a numpy array of integers, which is moved there without a
            sync and whose range is checked. The null page may be among them, and pages may repeat.
        out: written and returned where given; [n, bytes_per_page], uint8, contiguous rows.
        A record holds the parts' bytes in their order, so that it does not depend on whether layers are joined.
        """
        return self.page_mover.read(pages, out)

    def write_pages(self, pages: Any, data: torch.Tensor) -> None:
        """Copies records, as `read_pages` made them, into pages; records for the null page are skipped.

        pages: as for `read_pages`, without repeats. data: [len(pages), bytes_per_page], uint8, on the pool's device.
        """
        self.page_mover.write(pages, data)

    def copy_pages(self, src: Any, dst: Any) -> None:
        """Copies pages to pages in all layers, for copy-on-write; what would go to the null page is skipped.

        src, dst: as for `read_pages`, equally many; no page of dst, the null page apart, is in dst twice or in src.
        """
        self.page_mover.copy(src, dst)

    def zero_tails(self, pages: Int64s, used: Int64s) -> None:
        """Zeroes, in all layers, what lies behind the first tokens of some pages, without a host sync.

        pages: [n], int64, pages that one sequence each may write to. used: [n], int64, tokens of each that stay, at
            least one.
        Raises ContractError for pages and numbers of tokens that there are not.
        """
        if not (pages.size and self.layers):
            return
        if pages.min() < 1 or pages.max() > self.num_pages or used.min() < 1 or used.max() > self.cache.page_size:
            raise ContractError(
                f"zero_tails takes pages 1 to {self.num_pages} of which 1 to {self.cache.page_size} tokens stay, not "
                f"pages {pages.min()} to {pages.max()} of {used.min()} to {used.max()}."
            )
        self.tail_zeroer(pages, used)

    @property
    def tail_zeroer(self) -> TailZeroer:
        """What zeroes tails, made from `layers` at the first use."""
        if self._tail_zeroer is None:
            from anyattn.mem_cache.kernels.tails import TailZeroer

            self._tail_zeroer = TailZeroer(self.layers)
        return self._tail_zeroer

    @property
    def page_mover(self) -> PageMover:
        """What moves pages, made from `parts()` at the first use."""
        if self._page_mover is None:
            from anyattn.mem_cache.kernels.pages import PageMover

            self._page_mover = PageMover(self.parts())
        return self._page_mover

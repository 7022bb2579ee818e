"""A pool as the kit drives it: fresh tokens in, a picture of all its bytes out, and what must have changed between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from anyattn.mem_cache.base import KVPool
from anyattn.mem_cache.spec import INDEX_SCALE_BYTES, CacheSpec
from anyattn.platforms.base import Platform
from anyattn.testing.check import CheckFailedError
from anyattn.testing.pools.values import TILE, compared
from anyattn.types import DTYPE_BYTES, FP8_DTYPES

NUM_PAGES = 5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokens:
    """New tokens of one layer, as `KVPool.store` takes them, on the CPU.

    v: None for kinds that keep one row a token.
    """

    k: torch.Tensor
    v: torch.Tensor | None

    def __len__(self) -> int:
        return len(self.k)

    def parts(self) -> list[torch.Tensor]:
        """[num_tokens, num_kv_heads, dim] of each part."""
        return [part if part.ndim == 3 else part[:, None] for part in (self.k, self.v) if part is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Picture:
    """All bytes of a pool.

    rows: by layer and part, [num_pages + 1, page_size, num_kv_heads, bytes of a token], as the layers show them.
    storage: of each part, [num_pages + 1, bytes of a page].
    """

    rows: list[list[torch.Tensor]]
    storage: list[torch.Tensor]


class Bench:
    """One pool under test, and the seed's random numbers."""

    def __init__(
        self, tested: type[KVPool], device: Platform, cache: CacheSpec, seed: int, *, num_pages: int = NUM_PAGES
    ) -> None:
        self.cache = cache
        self.generator = torch.Generator().manual_seed(seed)
        self.pool = tested(cache, num_pages, device.torch_device)
        self.device = torch.empty(0, device=device.torch_device).device  # with its index
        self.num_pages = num_pages

    @property
    def dtype(self) -> torch.dtype:
        """What a model would compute in."""
        name = "bfloat16" if self.cache.kv_dtype in FP8_DTYPES else self.cache.kv_dtype
        found: torch.dtype = getattr(torch, name)
        return found

    def tokens(self, count: int, *, size: float = 3.0, dtype: torch.dtype | None = None) -> Tokens:
        """size: standard deviation of their elements."""
        cache = self.cache

        def drawn(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=self.generator) * size
            if cache.kind in ("dsa", "index"):  # tiles of different sizes, so that each needs its own scale
                sizes = torch.randint(-8, 9, (*shape[:-1], -(-shape[-1] // TILE)), generator=self.generator)
                values *= torch.exp2(sizes.repeat_interleave(TILE, -1)[..., : shape[-1]].float())
            return values.to(dtype or self.dtype)

        if cache.kind != "mha":
            return Tokens(k=drawn(count, cache.head_dim), v=None)
        heads = cache.num_kv_heads
        return Tokens(k=drawn(count, heads, cache.head_dim), v=drawn(count, heads, cache.v_head_dim))

    def slots(self, count: int, *, pages: Sequence[int] | None = None) -> torch.Tensor:
        """Different slots in random order, none of the null page; by default of all other pages, the last included."""
        size = self.cache.page_size
        pages = range(1, self.num_pages + 1) if pages is None else pages
        every = torch.cat([torch.arange(page * size, (page + 1) * size) for page in pages])
        chosen = torch.cat([every[-1:], every[self.order(len(every) - 1)][: count - 1]])
        return chosen[self.order(len(chosen))]

    def order(self, count: int) -> torch.Tensor:
        """A random permutation."""
        return torch.randperm(count, generator=self.generator)

    def store(self, layer: int, tokens: Tokens, slots: torch.Tensor) -> None:
        v = None if tokens.v is None else tokens.v.to(self.device)
        self.pool.store(layer, tokens.k.to(self.device), v, slots.to(self.device))

    def fill(self) -> None:
        """Stores random tokens in every slot of every layer."""
        size = self.cache.page_size
        for layer in range(self.cache.num_layers):
            slots = torch.arange(size, size * (self.num_pages + 1))
            self.store(layer, self.tokens(len(slots)), slots)

    def picture(self) -> Picture:
        pages = torch.arange(self.num_pages + 1, device=self.device)
        return Picture(rows=[self.rows(layer, pages) for layer in range(self.cache.num_layers)], storage=self.storage())

    def rows(self, layer: int, pages: torch.Tensor) -> list[torch.Tensor]:
        """Of one layer, see `Picture.rows`."""
        gathered = self.pool.layers[layer].gather(pages)[: 2 if self.cache.kind == "mha" else 1]
        parts = [part.contiguous().view(torch.uint8).cpu() for part in gathered]
        return [_by_token(parts[0], self.cache)] if self.cache.kind == "index" else parts

    def storage(self) -> list[torch.Tensor]:
        return [part.reshape(len(part), -1).contiguous().view(torch.uint8).cpu() for part in self.pool.parts()]

    def must_have_stored(
        self,
        before: Picture,
        layer: int,
        tokens: Tokens,
        slots: torch.Tensor,
        scales: Sequence[torch.Tensor | float] = (1.0, 1.0),
    ) -> None:
        """Fails unless the tokens are in their slots, where those are not the null page's, and all else is as before.

        scales: of keys and values, on the CPU.
        """
        size = self.cache.page_size
        kept = slots >= size
        named = torch.zeros((self.num_pages + 1) * size, dtype=torch.bool)
        named[slots[kept]] = True
        after = self.picture()
        for number, (was, now) in enumerate(zip(before.rows, after.rows, strict=True)):
            for part, (old, new) in enumerate(zip(was, now, strict=True)):
                what = f"layer {number}'s {'values' if part else 'keys'}"
                changed = (old != new).flatten(2).any(-1).flatten()
                astray = changed & ~named if number == layer else changed
                if astray.any():
                    slot = int(astray.nonzero()[0])
                    raise CheckFailedError(
                        f"store to layer {layer}, slots {_few(slots)}, changed slot {slot} of {what} (page "
                        f"{slot // size}, offset {slot % size}), {self._whose(slot, number == layer)}."
                    )
                if number == layer:
                    stored = new.flatten(0, 1)[slots[kept]]
                    self.must_be(stored, tokens.parts()[part][kept], scales[part], slots[kept], what)
        pages = torch.ones(self.num_pages + 1, dtype=torch.bool)
        pages[slots[kept] // size] = False
        for number, (old, new) in enumerate(zip(before.storage, after.storage, strict=True)):
            if not torch.equal(old[pages], new[pages]):
                raise CheckFailedError(f"store changed bytes of part {number} in pages that no slot is in.")

    def must_be(
        self, stored: torch.Tensor, given: torch.Tensor, scale: torch.Tensor | float, slots: torch.Tensor, what: str
    ) -> None:
        """Fails unless stored rows are what was given: [num_tokens, num_kv_heads, bytes] and [..., dim]."""
        read, wanted, wrong = compared(self.cache, stored, given, scale)
        if wrong.any():
            token, head, element = wrong.nonzero()[0].tolist()
            raise CheckFailedError(
                f"{what}: token {token}, which belongs into slot {int(slots[token])}, is there read as "
                f"{float(read[token, head, element])} in head {head}, element {element}, where "
                f"{float(wanted[token, head, element])} was to be stored; {int(wrong.sum())} of {wrong.numel()} "
                "elements are wrong."
            )

    def _whose(self, slot: int, same_layer: bool) -> str:
        if slot < self.cache.page_size:
            return "which is in the null page"
        return "which no token goes to" if same_layer else "which is another layer's"


def _by_token(pages: torch.Tensor, cache: CacheSpec) -> torch.Tensor:
    """Pages of an indexer's keys, whose scales lie behind all of them, as rows of a key and its scale."""
    flat, keys_end = pages.flatten(1), cache.page_size * cache.head_dim
    keys = torch.unflatten(flat[:, :keys_end], 1, (cache.page_size, cache.head_dim))
    scales = torch.unflatten(flat[:, keys_end:], 1, (cache.page_size, INDEX_SCALE_BYTES))
    return torch.cat([keys, scales], dim=-1)[:, :, None]


def apart(tokens: Tokens, rank: int) -> Tokens:
    """Joined rows as latents and rope parts."""
    return replace(tokens, k=tokens.k[:, :rank], v=tokens.k[:, rank:])


def page_bytes(cache: CacheSpec) -> list[int]:
    """Bytes of one page of each part that a layer stores."""
    itemsize = 1 if cache.kind in ("dsa", "index") else DTYPE_BYTES[cache.kv_dtype]
    return [itemsize * torch.Size(shape).numel() for shape in cache.page_shapes()]


def _few(slots: torch.Tensor) -> str:
    listed = ", ".join(map(str, slots[:12].tolist()))
    return listed if len(slots) <= 12 else f"{listed}, ..."

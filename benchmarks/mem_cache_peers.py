"""What `mem_cache.py` measures against: allocator, index and store work in the formulation that engines use.

Written from its description: free pages are a device tensor, `extend` and `decode` launch one program a request whose
prefix sums run over the whole batch, `free` finds pages by `unique` over token slots and joins free lists by `cat`, an
index kernel has one program a request with a loop over its pages, and a store is an `index_put` for keys and one for
values. Where Triton does not run, vectorised torch does the same. Lengths are on the device and on the host, as in
engines that keep a copy of them, so that how many pages are taken is known without a sync.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyattn.mem_cache.kernels import triton_runs_on

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class TensorAllocator:
    """Free pages and slots as tensors on the device; at page size 1 slots are pages, and slices are all it takes."""

    def __init__(self, num_pages: int, page_size: int, device: torch.device, free_pages: torch.Tensor) -> None:
        """free_pages: [num_pages], int64, in the order in which they are handed out."""
        self.page_size = page_size
        self.device = device
        self.num_pages = num_pages
        self.free_pages = free_pages
        self._triton = triton_runs_on(device)

    def extend(
        self,
        prefix_lens: torch.Tensor,
        lengths: torch.Tensor,
        last_slots: torch.Tensor,
        host_prefix_lens: torch.Tensor,
        host_lengths: torch.Tensor,
    ) -> torch.Tensor:
        """Slots of the new tokens, int64, sequence by sequence.

        prefix_lens, lengths: [num_seqs], int64, tokens before and after; host_...: the same on the CPU.
        last_slots: [num_seqs], int64, of the last token of each, anything where there is none.
        """
        num_tokens = int((host_lengths - host_prefix_lens).sum())
        if self.page_size == 1:
            return self._take(num_tokens)
        num_pages = int((-(-host_lengths // self.page_size) - -(-host_prefix_lens // self.page_size)).sum())
        if num_pages > self.free_pages.numel():
            raise RuntimeError(f"{num_pages} pages needed, {self.free_pages.numel()} free")
        if self._triton:
            out_slots = torch.empty(num_tokens, dtype=torch.int64, device=self.device)
            num_seqs = prefix_lens.numel()
            extend_kernel[(num_seqs,)](
                prefix_lens, lengths, last_slots, self.free_pages, out_slots,
                batch=triton.next_power_of_2(num_seqs), page_size=self.page_size, block=1024,
            )  # fmt: skip
        else:
            out_slots = self._extend_in_torch(prefix_lens, lengths, last_slots, num_tokens)
        self.free_pages = self.free_pages[num_pages:]
        return out_slots

    def decode(self, lengths: torch.Tensor, last_slots: torch.Tensor, host_lengths: torch.Tensor) -> torch.Tensor:
        """As `extend` by one token each; lengths are those after it."""
        num_seqs = lengths.numel()
        if self.page_size == 1:
            return self._take(num_seqs)
        num_pages = int((host_lengths % self.page_size == 1).sum())
        if num_pages > self.free_pages.numel():
            raise RuntimeError(f"{num_pages} pages needed, {self.free_pages.numel()} free")
        if self._triton:
            out_slots = torch.empty(num_seqs, dtype=torch.int64, device=self.device)
            decode_kernel[(num_seqs,)](
                lengths, last_slots, self.free_pages, out_slots,
                batch=triton.next_power_of_2(num_seqs), page_size=self.page_size,
            )  # fmt: skip
        else:
            new = (lengths % self.page_size == 1).long()
            pages = self.free_pages[(new.cumsum(0) - 1).clamp(min=0)]
            out_slots = torch.where(new == 1, pages * self.page_size, last_slots + 1)
        self.free_pages = self.free_pages[num_pages:]
        return out_slots

    def free(self, slots: torch.Tensor) -> None:
        """slots: int64, of all tokens of the sequences that end."""
        pages = slots if self.page_size == 1 else torch.unique(slots // self.page_size)
        self.free_pages = torch.cat((pages, self.free_pages))

    def _take(self, num_pages: int) -> torch.Tensor:
        if num_pages > self.free_pages.numel():
            raise RuntimeError(f"{num_pages} pages needed, {self.free_pages.numel()} free")
        taken = self.free_pages[:num_pages]
        self.free_pages = self.free_pages[num_pages:]
        return taken

    def _extend_in_torch(
        self, prefix_lens: torch.Tensor, lengths: torch.Tensor, last_slots: torch.Tensor, num_tokens: int
    ) -> torch.Tensor:
        page_size = self.page_size
        new_tokens = lengths - prefix_lens
        pages_before = (prefix_lens + page_size - 1) // page_size
        new_pages = (lengths + page_size - 1) // page_size - pages_before
        seq = torch.repeat_interleave(new_tokens, output_size=num_tokens)
        first_token = new_tokens.cumsum(0) - new_tokens
        positions = torch.arange(num_tokens, device=self.device) + (prefix_lens - first_token)[seq]
        page = positions // page_size
        first_page = new_pages.cumsum(0) - new_pages - pages_before
        fresh = page >= pages_before[seq]
        pages = self.free_pages[torch.where(fresh, page + first_page[seq], 0)]
        old = last_slots[seq] + 1 + positions - prefix_lens[seq]
        return torch.where(fresh, pages * page_size + positions % page_size, old)


def kv_indices(
    page_table: torch.Tensor, rows: torch.Tensor, num_pages: torch.Tensor, kv_indptr: torch.Tensor, out: torch.Tensor
) -> None:
    """The page ids of all sequences one after the other.

    page_table: [num_rows, max_pages], int32. rows, num_pages: [num_seqs]. kv_indptr: [num_seqs + 1]. out: int32.
    """
    if triton_runs_on(out.device):
        indices_kernel[(rows.numel(),)](page_table, rows, num_pages, kv_indptr, out, page_table.stride(0), block=512)
    else:
        mask = torch.arange(page_table.shape[1], device=out.device) < num_pages[:, None]
        gathered = page_table[rows][mask]
        out[: gathered.numel()] = gathered


def block_table(page_table: torch.Tensor, rows: torch.Tensor, max_pages: int) -> torch.Tensor:
    """[num_seqs, max_pages], int32: a gather of rows."""
    return page_table[rows, :max_pages]


def store(targets: Sequence[tuple[torch.Tensor, torch.Tensor]], slots: torch.Tensor, scale: float) -> None:
    """One `index_put` for each pair of pages and new tokens, cast before it where they differ.

    targets: [num_pages, page_size, num_kv_heads, dim] and [num_tokens, num_kv_heads, dim]. slots: [num_tokens].
    """
    for pages, new in targets:
        page_size = pages.shape[1]
        if scale != 1.0:
            new = new / scale
        new = new.to(pages.dtype)
        if pages.dtype.itemsize == 1:  # torch has no index_put for fp8
            pages, new = pages.view(torch.uint8), new.view(torch.uint8)
        pages[slots // page_size, slots % page_size] = new


if triton is not None:

    @triton.jit
    def extend_kernel(
        prefix_lens, lengths, last_slots, free_pages, out_slots,  # noqa: ANN001
        batch: tl.constexpr, page_size: tl.constexpr, block: tl.constexpr,
    ) -> None:  # fmt: skip
        """One program writes one sequence's slots, and reads the lengths of all sequences before it."""
        seq = tl.program_id(0)
        others = tl.arange(0, batch)
        before = others < seq
        their_prefix = tl.load(prefix_lens + others, mask=before, other=0)
        their_length = tl.load(lengths + others, mask=before, other=0)
        their_pages = (their_length + page_size - 1) // page_size - (their_prefix + page_size - 1) // page_size
        out_slots += tl.sum(their_length - their_prefix)
        free_pages += tl.sum(their_pages)
        prefix = tl.load(prefix_lens + seq)
        length = tl.load(lengths + seq)
        last_slot = tl.load(last_slots + seq)

        start_of_new = (prefix + page_size - 1) // page_size * page_size  # position where the sequence's pages end
        filled = tl.minimum(length, start_of_new) - prefix
        offsets = tl.arange(0, page_size)
        tl.store(out_slots + offsets, last_slot + 1 + offsets, mask=offsets < filled)

        whole = tl.maximum(length // page_size * page_size - start_of_new, 0)
        for start in range(0, whole, block):
            token = start + tl.arange(0, block)
            page = tl.load(free_pages + token // page_size, mask=token < whole)
            tl.store(out_slots + filled + token, page * page_size + token % page_size, mask=token < whole)

        tail = tl.maximum(length - start_of_new - whole, 0)
        page = tl.load(free_pages + whole // page_size, mask=tail > 0, other=0)
        tl.store(out_slots + filled + whole + offsets, page * page_size + offsets, mask=offsets < tail)

    @triton.jit
    def decode_kernel(
        lengths, last_slots, free_pages, out_slots, batch: tl.constexpr, page_size: tl.constexpr  # noqa: ANN001
    ) -> None:  # fmt: skip
        """One program writes one sequence's slot, and reads the lengths of all sequences before it."""
        seq = tl.program_id(0)
        others = tl.arange(0, batch)
        their_length = tl.load(lengths + others, mask=others < seq, other=0)
        new_before = tl.sum((their_length % page_size == 1).to(tl.int64))
        if tl.load(lengths + seq) % page_size == 1:
            tl.store(out_slots + seq, tl.load(free_pages + new_before) * page_size)
        else:
            tl.store(out_slots + seq, tl.load(last_slots + seq) + 1)

    @triton.jit
    def indices_kernel(page_table, rows, num_pages, kv_indptr, out, row_stride, block: tl.constexpr) -> None:  # noqa: ANN001
        """One program copies one sequence's page ids from its row of the page table."""
        seq = tl.program_id(0)
        source = page_table + tl.load(rows + seq).to(tl.int64) * row_stride
        target = out + tl.load(kv_indptr + seq)
        pages = tl.load(num_pages + seq)
        for start in range(0, pages, block):
            column = start + tl.arange(0, block)
            tl.store(target + column, tl.load(source + column, mask=column < pages), mask=column < pages)

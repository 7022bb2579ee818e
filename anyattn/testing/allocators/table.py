"""A check of an allocator under the host's page table, which is how `create_runtime` uses it."""

from __future__ import annotations

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.page_table import PageTable
from anyattn.testing.allocators.books import Lab, LabCheck, failed
from anyattn.testing.check import CannotRunError


def _page_table(lab: Lab) -> None:
    books, rng = lab.books(30), lab.rng
    if not books.in_numpy:
        raise CannotRunError(
            "anyattn.mem_cache.page_table.PageTable keeps its books on the host and drives allocators whose arrays are "
            "numpy's; this one's are tensors, for engines that have a page table of their own on the device."
        )
    table = PageTable(books.allocator, lab.page_size)
    lengths: dict[int, int] = {}

    def picked(most: int) -> list[int]:
        return rng.sample(list(lengths), rng.randint(0, min(len(lengths), most)))

    for _ in range(150):
        action = rng.choice(["new", "extend", "extend", "extend", "fork", "truncate", "free"])
        if action == "new":
            lengths.update(dict.fromkeys(table.new_sequences(rng.randint(1, 2)), 0))
        elif action == "fork" and lengths:
            seq = rng.choice(list(lengths))
            lengths.update(dict.fromkeys(table.fork(seq, rng.randint(1, 2)), lengths[seq]))
        elif action == "truncate":
            kept = {seq: rng.randint(0, lengths[seq]) for seq in picked(3)}
            table.truncate(list(kept), list(kept.values()))
            lengths.update(kept)
        elif action == "free":
            ended = picked(3)
            table.free(ended)
            for seq in ended:
                del lengths[seq]
        elif action == "extend":
            _extend_table(table, lengths, {seq: rng.randint(0, 2 * lab.page_size + 1) for seq in picked(5)})
        _must_be_whole(table, lengths, action)
    table.free(list(lengths))
    table.check()
    if books.num_free_pages != books.num_pages:
        failed(f"all sequences were freed, and {books.num_free_pages} of {books.num_pages} pages are free.")


def _extend_table(table: PageTable, lengths: dict[int, int], new: dict[int, int]) -> None:
    """All or nothing."""

    def state() -> tuple[int, list[list[int]]]:
        return table.allocator.num_free_pages, [table.pages(seq).tolist() for seq in lengths]

    before = state()
    try:
        table.extend(list(new), list(new.values()))
    except OutOfPagesError as refusal:
        if state() != before:
            failed(f"the page table was refused an extension ({refusal}), and is not as before.")
        if refusal.pages_needed <= refusal.pages_free:
            failed(f"an extension was refused whose pages are there: {refusal}")
        return
    except ValueError as error:
        failed(
            f"the page table cannot use what extend returned, which has indptr[-1] pages where it is numpy's: {error}"
        )
    for seq, count in new.items():
        lengths[seq] += count


def _must_be_whole(table: PageTable, lengths: dict[int, int], action: str) -> None:
    if table.lengths(list(lengths)) != list(lengths.values()):
        failed(f"after {action} the page table's sequences have {table.lengths(list(lengths))} tokens.")
    try:
        table.check()
    except ContractError as error:
        failed(f"after {action} the books of page table and allocator do not fit: {error}")


TABLE_CHECKS: dict[str, LabCheck] = {"a page table driven with it stays whole": _page_table}
"""By name; for each page size."""

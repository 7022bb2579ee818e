"""The kit's checks of allocators: those of anyattn pass, so do others that are right, and each mutant is caught."""

import dataclasses
import random
import types

import numpy as np
import pytest
import torch

from anyattn.errors import ContractError, OutOfPagesError
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.base import AllocatorCapabilities, Extension, KVAllocator
from anyattn.mem_cache.device_allocator import DeviceAllocator
from anyattn.platforms.base import Platform
from anyattn.testing.allocators import checks as allocators
from anyattn.testing.check import CannotRunError, CheckFailedError
from anyattn.testing.target import Target
from anyattn.types import IntSet, ints

CPU = Platform(kind="cpu", vendor="any", name="any CPU", arch="any", torch_device="cpu")


class PlainAllocator(KVAllocator):
    """A stranger's: lists of Python, the lowest free page first."""

    capabilities = AllocatorCapabilities(page_sizes=ints(1, 16))

    def __init__(self, num_pages, page_size, device=None, *, debug=False):
        self.capabilities.require(num_pages, page_size)
        self.page_size, self.strict = page_size, debug
        self.stack = list(range(num_pages, 0, -1))
        self.refs = [0] * (num_pages + 1)

    @property
    def num_pages(self):
        return len(self.refs) - 1

    @property
    def num_free_pages(self):
        return len(self.stack)

    def alloc(self, num_pages):
        if num_pages > len(self.stack):
            raise OutOfPagesError(num_pages, len(self.stack), self.num_pages)
        pages = [self.stack.pop() for _ in range(num_pages)]
        for page in pages:
            self.refs[page] = 1
        return np.array(pages, dtype=np.int32)

    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        if self.strict:
            self.inspect(*(array.tolist() for array in (prefix_lens, lengths, last_slots)))
        return super().extend(prefix_lens, lengths, last_slots)

    def inspect(self, prefix_lens, lengths, last_slots):
        writers = []
        for prefix, length, slot in zip(prefix_lens, lengths, last_slots, strict=True):
            page, offset = divmod(slot, self.page_size)
            if prefix:
                self.refuse_free(page)
                self.refuse_misaligned(offset, prefix)
            if length > prefix and prefix % self.page_size:
                writers.append(page)
        for page in writers:
            self.refuse_aliased(page, writers.count(page))

    def refuse_free(self, page):
        if not self.refs[page]:
            raise ContractError("extended after it was freed")

    def refuse_misaligned(self, offset, prefix):
        if offset != (prefix - 1) % self.page_size:
            raise ContractError("misaligned")

    def refuse_aliased(self, page, times):
        if times > 1 and times > self.refs[page]:
            raise ContractError("aliased")

    def share(self, pages):
        pages = [page for page in pages.tolist() if page]
        if self.strict and not all(self.refs[page] for page in pages):
            raise ContractError("shared after it was freed")
        for page in pages:
            self.refs[page] += 1

    def free(self, pages):
        pages = [page for page in pages.tolist() if page]
        if self.strict:
            self.refuse_frees(pages)
        return sum(self.give_back(page) for page in pages)

    def refuse_frees(self, pages):
        for page in pages:
            if not 1 <= page <= self.num_pages or self.refs[page] < pages.count(page):
                raise ContractError("freed before, or never taken")

    def give_back(self, page):
        self.refs[page] -= 1
        if self.refs[page]:
            return 0
        self.stack.append(page)
        return 1

    def ref_counts(self, pages):
        return np.array([self.refs[page] for page in pages.tolist()], dtype=np.int32)

    def check(self):
        held = {page for page, count in enumerate(self.refs) if count > 0}
        if held & set(self.stack) or len(held) + len(set(self.stack)) != self.num_pages:
            raise ContractError("the books are wrong")


class WithoutCounting(PlainAllocator):
    """Says nothing of how many pages became free, as the contract allows, and keeps one page size."""

    capabilities = AllocatorCapabilities(
        page_sizes=IntSet(minimum=2048, multiple_of=2048), device_kinds=frozenset({"cpu"})
    )
    may_share = True

    def free(self, pages):
        super().free(pages)


class RandomPages(PlainAllocator):
    """Hands out whichever page it likes."""

    def alloc(self, num_pages):
        random.Random(len(self.stack)).shuffle(self.stack)
        return super().alloc(num_pages)


def target(allocator):
    place = f"{allocator.__module__}:{allocator.__name__}"
    return Target(kind="allocator", name=allocator.__name__, place=place, loaded=allocator)


def all_checks(allocator):
    return [*allocators.contract_checks(target(allocator)), *allocators.checks(allocator, CPU)]


def memory_checks(allocator):
    return {check.name: check for check in allocators.checks(allocator, CPU)}


def failure(check, seed=0):
    """What the check says against its target, or None; None too where it cannot be made."""
    try:
        check.run(seed)
    except CannotRunError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def cannot_run(checks):
    found = {}
    for check in checks:
        try:
            check.run(0)
        except CannotRunError as reason:
            found[check.name] = str(reason)
    return found


SEED = 20
RIGHT = [PagedAllocator, DeviceAllocator, PlainAllocator, WithoutCounting, RandomPages]


@pytest.mark.parametrize("allocator", RIGHT, ids=lambda allocator: allocator.__name__)
def test_an_allocator_that_is_right_passes_every_check(allocator):
    # A test's module cannot be imported in a fresh process.
    checks = [check for check in all_checks(allocator) if "imported" not in check.name or allocator in RIGHT[:2]]
    assert {check.id: said for check in checks if (said := failure(check, SEED))} == {}


def test_only_an_allocator_on_the_device_cannot_be_driven_by_the_page_table():
    name = "a page table driven with it stays whole, page size 16"
    assert cannot_run([memory_checks(PagedAllocator)[name]]) == {}
    (reason,) = cannot_run([memory_checks(DeviceAllocator)[name]]).values()
    assert "keeps its books on the host" in reason
    names = {check.name for check in allocators.checks(DeviceAllocator, CPU) if "page table" not in check.name}
    assert cannot_run([memory_checks(DeviceAllocator)[name] for name in sorted(names)[::7]]) == {}


def test_names_are_the_same_in_every_run_and_each_is_there_once():
    for allocator in (PagedAllocator, PlainAllocator):
        names = [check.id for check in all_checks(allocator)]
        assert names == [check.id for check in all_checks(allocator)]
        assert len(set(names)) == len(names)
    assert {check.tier for check in allocators.checks(PagedAllocator, CPU)} == {"memory"}


def test_every_check_says_which_capability_it_belongs_to():
    fields = {field.name for field in dataclasses.fields(AllocatorCapabilities)}
    named = {check.capability for check in all_checks(PagedAllocator)}
    assert named - fields <= {"contract", "packages"}
    assert {"device_kinds", "page_sizes"} <= named


def test_only_declared_page_sizes_are_tried():
    def sizes(declared):
        class Declared(PlainAllocator):
            capabilities = AllocatorCapabilities(page_sizes=declared)

        return {int(name.rsplit(" ", 1)[1]) for name in memory_checks(Declared) if ", page size " in name}

    assert sizes(ints(1)) == {1}
    assert sizes(ints(7, 64)) == {7, 64}
    assert sizes(IntSet(maximum=48, multiple_of=24)) == {24, 48}
    assert sizes(IntSet()) == {1, 2, 3, 16, 64, 128, 256, 1000, 1024, 4096}


def test_pages_of_one_token_have_no_checks_of_partial_pages():
    class OneToken(PlainAllocator):
        capabilities = AllocatorCapabilities(page_sizes=ints(1))

    assert "debug mode refuses two writers of one page" in memory_checks(PlainAllocator)
    assert "debug mode refuses two writers of one page" not in memory_checks(OneToken)
    assert [name for name, check in memory_checks(OneToken).items() if failure(check)] == []


def test_on_a_device_that_is_not_declared_nothing_can_be_checked():
    class OfAnother(PlainAllocator):
        capabilities = AllocatorCapabilities(page_sizes=ints(16), device_kinds=frozenset({"cuda"}))

    checks = list(allocators.checks(OfAnother, CPU))
    reasons = cannot_run(checks)
    assert len(reasons) == len(checks) > 20
    assert all("device_kind: wanted cpu, supported cuda" in reason for reason in reasons.values())


# What is wrong, and the check that says so


class TwiceAfterSharing(PlainAllocator):
    def free(self, pages):
        pages = [page for page in pages.tolist() if page]
        for page in pages:
            self.refs[page] -= 1
        freed = [page for page in pages if self.refs[page] == 0]  # a page that is named twice is there twice
        self.stack += freed
        return len(set(freed))


class FreedByTheFirstHolder(PlainAllocator):
    def give_back(self, page):
        self.refs[page] = 1
        return super().give_back(page)


class TwiceAtRandom(PlainAllocator):
    def __init__(self, *arguments, **named):
        super().__init__(*arguments, **named)
        self.random = random.Random(0)

    def alloc(self, num_pages):
        held = [page for page, count in enumerate(self.refs) if count]
        pages = super().alloc(num_pages)
        if num_pages and held and self.random.random() < 0.1:
            pages[0] = self.random.choice(held)
        return pages


class PagesFromZero(PlainAllocator):
    def __init__(self, num_pages, page_size, device=None, *, debug=False):
        super().__init__(num_pages, page_size, device, debug=debug)
        self.stack = list(range(num_pages - 1, -1, -1))


class PaddingFreedLikePages(PlainAllocator):
    def free(self, pages):
        self.refs[0] += np.count_nonzero(pages == 0)
        return sum(self.give_back(page) for page in pages.tolist())


class PaddingRaises(PlainAllocator):
    def free(self, pages):
        if (pages == 0).any():
            raise ContractError("page 0 is not allocated")
        return super().free(pages)


class PaddingShared(PlainAllocator):
    def share(self, pages):
        for page in pages.tolist():
            self.refs[page] += 1


class AllocLosesAPageWhenRefused(PlainAllocator):
    def alloc(self, num_pages):
        pages = []
        for _ in range(num_pages):
            if not self.stack:
                self.stack += pages[1:]
                raise OutOfPagesError(num_pages, len(self.stack) + 1, self.num_pages)
            pages.append(self.stack.pop())
        for page in pages:
            self.refs[page] = 1
        return np.array(pages, dtype=np.int32)


class AllocHidesALostPage(AllocLosesAPageWhenRefused):
    @property
    def num_free_pages(self):
        return self.num_pages - sum(count > 0 for count in self.refs)

    def check(self):
        pass


class ExtendKeepsWhatItTookWhenRefused(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        batch = list(zip(prefix_lens.tolist(), lengths.tolist(), last_slots.tolist(), strict=True))
        parts = [KVAllocator.extend(self, *(np.array([each]) for each in sequence)) for sequence in batch]
        indptr = np.cumsum([0, *(part.pages.size for part in parts)]).astype(np.int32)
        pages = np.concatenate([indptr[:0], *(part.pages for part in parts)])
        return Extension(
            indptr=indptr, pages=pages, copied_from=np.concatenate([indptr[:0], *(part.copied_from for part in parts)])
        )


class ExtendGivesTheSharedPageBackWhenRefused(PlainAllocator):
    def alloc(self, num_pages):
        if num_pages > len(self.stack):
            for page, count in enumerate(self.refs):
                self.refs[page] = min(count, 1)
        return super().alloc(num_pages)


class FreeCountsReferences(PlainAllocator):
    @property
    def num_free_pages(self):
        return self.num_pages - sum(self.refs)


class FirstReferencesAreTwo(PlainAllocator):
    def alloc(self, num_pages):
        pages = super().alloc(num_pages)
        for page in pages:
            self.refs[page] = 2
        return pages


class LastPageNeverHandedOut(PlainAllocator):
    def alloc(self, num_pages):
        if num_pages > len(self.stack) - 1:
            raise OutOfPagesError(num_pages, len(self.stack), self.num_pages)
        return super().alloc(num_pages)


class NothingIsOnePage(PlainAllocator):
    def alloc(self, num_pages):
        return super().alloc(max(num_pages, 1))


class RefusalNumbersSwapped(PlainAllocator):
    def alloc(self, num_pages):
        if num_pages > len(self.stack):
            raise OutOfPagesError(len(self.stack), num_pages, self.num_pages)
        return super().alloc(num_pages)


class RefusedExtendForgetsTheCopy(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        needed = -(-lengths // self.page_size) + prefix_lens // -self.page_size
        try:
            return super().extend(prefix_lens, lengths, last_slots)
        except OutOfPagesError as error:
            raise OutOfPagesError(int(needed.sum()), error.pages_free, self.num_pages) from error


class ShareIgnoresRepeats(PlainAllocator):
    def share(self, pages):
        super().share(np.unique(pages))


class FreeIgnoresRepeats(PlainAllocator):
    def free(self, pages):
        return super().free(np.unique(pages))


class FreeReturnsHowManyWereNamed(PlainAllocator):
    def free(self, pages):
        super().free(pages)
        return len(pages)


class NothingIsEverShared(PlainAllocator):
    may_share = False


class Int64Pages(PlainAllocator):
    def alloc(self, num_pages):
        return super().alloc(num_pages).astype(np.int64)


class PageIdsOf16Bits(PlainAllocator):
    def alloc(self, num_pages):
        return super().alloc(num_pages) & 0xFFFF


class AnyPageSize(PlainAllocator):
    def __init__(self, num_pages, page_size, device=None, *, debug=False):
        super().__init__(num_pages, 16, device, debug=debug)
        self.page_size = page_size


class NoPagesAtAll(PlainAllocator):
    def __init__(self, num_pages, page_size, device=None, *, debug=False):
        super().__init__(max(num_pages, 1), page_size, device, debug=debug)


class ExtendKeepsTheSharedReference(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        extension = super().extend(prefix_lens, lengths, last_slots)
        self.share(extension.copied_from)
        return extension


class ExtendHandsOutWhatItCopiesFrom(PlainAllocator):
    """Gives the copied pages back before it takes new ones."""

    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        written = (lengths > prefix_lens) & (prefix_lens % self.page_size != 0)
        pages = np.where(written, last_slots // self.page_size, 0)
        copied = np.where(self.ref_counts(pages) > 1, pages, 0)
        for page in copied[copied > 0].tolist():
            self.give_back(page)
        needed = -(-lengths // self.page_size) + prefix_lens // -self.page_size + (copied > 0)
        indptr = np.concatenate([[0], np.cumsum(needed)]).astype(np.int32)
        return Extension(indptr=indptr, pages=self.alloc(int(indptr[-1])), copied_from=copied.astype(np.int32))


class ExtendCopiesEveryPartialPage(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        refs = list(self.refs)
        self.refs = [count + (count == 1) for count in refs]
        try:
            return super().extend(prefix_lens, lengths, last_slots)
        finally:
            for page, count in enumerate(refs):
                self.refs[page] -= count == 1


class ExtendNeverCopies(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        return super().extend(prefix_lens, lengths, np.zeros_like(last_slots))


class ExtendForNothingTakesTheNextPage(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        fills = (lengths == prefix_lens) & (lengths % self.page_size == 0)
        return super().extend(prefix_lens, lengths + fills, last_slots)


class OnePageMoreForWholePages(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        return super().extend(prefix_lens, lengths + ((lengths > prefix_lens) & (lengths % 16 == 0)), last_slots)


class TakesTheBoundForTheNumber(PlainAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        extension = super().extend(prefix_lens, lengths, last_slots)
        if most_new_tokens is not None:
            self.alloc((most_new_tokens - int((lengths - prefix_lens).sum())) // self.page_size)
        return extension


class MorePagesThanTold(PlainAllocator):
    """Which the contract allows; the page table on the host reads all of them."""

    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        extension = super().extend(prefix_lens, lengths, last_slots)
        return dataclasses.replace(extension, pages=np.append(extension.pages, np.int32(0)))


class LeaksAfterAWhile(PlainAllocator):
    freed = 0

    def free(self, pages):
        before, freed = self.freed, super().free(pages)
        self.freed += freed
        if before < 40 <= self.freed:
            self.stack.pop()
        return freed


class DoubleFreesAccepted(PlainAllocator):
    def refuse_frees(self, pages):
        for page in pages:
            if not 1 <= page <= self.num_pages:
                raise ContractError("not this allocator's")


class DoubleFreesRefusedHalfway(PlainAllocator):
    def refuse_frees(self, pages):
        for page in pages:
            if not 1 <= page <= self.num_pages or self.refs[page] < 1:
                raise ContractError("freed before, or never taken")
            self.refs[page] -= 1
        for page in pages:
            self.refs[page] += 1


class ForeignFreesAccepted(PlainAllocator):
    def refuse_frees(self, pages):
        super().refuse_frees([page for page in pages if 1 <= page <= self.num_pages])

    def give_back(self, page):
        return super().give_back(page) if 1 <= page <= self.num_pages else 0


class SharedAfterFree(PlainAllocator):
    def share(self, pages):
        debug, self.strict = self.strict, False
        super().share(pages)
        self.strict = debug


class ExtendedAfterFree(PlainAllocator):
    def refuse_free(self, page):
        pass


class Misaligned(PlainAllocator):
    def refuse_misaligned(self, offset, prefix):
        pass


class Aliased(PlainAllocator):
    def refuse_aliased(self, page, times):
        pass


class DeviceSharesOnce(DeviceAllocator):
    def share(self, pages):
        super().share(torch.unique(pages))


class DeviceExtendKeepsTheSharedReference(DeviceAllocator):
    def extend(self, prefix_lens, lengths, last_slots, *, most_new_tokens=None):
        extension = super().extend(prefix_lens, lengths, last_slots, most_new_tokens=most_new_tokens)
        self.share(extension.copied_from)
        return extension


class DeviceCountsInInt64(DeviceAllocator):
    def ref_counts(self, pages):
        return super().ref_counts(pages).long()


ALLOC = "alloc refuses when pages are short, and takes nothing"
EXTEND = "extend refuses when pages are short, and takes nothing, page size 16"
COPIES = "extend copies a partial last page that is shared, and no other, page size 16"
GIVES_BACK = "extend gives its reference to a copied page back, page size 16"
NEEDS = "extend takes what the growth of each sequence needs, page size 16"
DOUBLE_FREE = "debug mode refuses a double free, and changes nothing"

MUTANTS = {
    TwiceAfterSharing: "a page that was shared comes back once",
    FreedByTheFirstHolder: "a page is free when its last reference was given back, and not before",
    TwiceAtRandom: "no page is handed out twice",
    PagesFromZero: "page 0 is never handed out",
    PaddingFreedLikePages: "page 0 is never handed out",
    PaddingRaises: "free skips page 0, which is padding",
    PaddingShared: "share skips page 0, which is padding",
    AllocLosesAPageWhenRefused: ALLOC,
    AllocHidesALostPage: ALLOC,
    ExtendKeepsWhatItTookWhenRefused: EXTEND,
    ExtendGivesTheSharedPageBackWhenRefused: EXTEND,
    FreeCountsReferences: "num_free_pages counts the free pages",
    FirstReferencesAreTwo: "a page has one reference when it is handed out, free ones and page 0 have none",
    LastPageNeverHandedOut: "all pages can be taken, and again after they were freed",
    NothingIsOnePage: "calls for nothing change nothing",
    RefusalNumbersSwapped: "a refused alloc says how many pages were needed and free",
    RefusedExtendForgetsTheCopy: "a refused extend says how many pages were needed and free, page size 16",
    ShareIgnoresRepeats: "a page named twice in one share gets two references",
    FreeIgnoresRepeats: "a page named twice in one free loses two references",
    FreeReturnsHowManyWereNamed: "free returns how many pages became free, or None",
    NothingIsEverShared: "may_share is true while a page has several references",
    Int64Pages: "pages are numbered 1 to num_pages, in int32",
    PageIdsOf16Bits: "100003 pages are taken, shared and freed like few",
    AnyPageSize: "a page size that is not declared is refused",
    NoPagesAtAll: "fewer pages than one are refused",
    ExtendKeepsTheSharedReference: GIVES_BACK,
    ExtendHandsOutWhatItCopiesFrom: GIVES_BACK,
    ExtendCopiesEveryPartialPage: COPIES,
    ExtendNeverCopies: COPIES,
    ExtendForNothingTakesTheNextPage: "extend by no tokens takes nothing, page size 16",
    OnePageMoreForWholePages: NEEDS,
    TakesTheBoundForTheNumber: NEEDS,
    MorePagesThanTold: "a page table driven with it stays whole, page size 16",
    LeaksAfterAWhile: "random use agrees with a model of the books, page size 16",
    DoubleFreesAccepted: DOUBLE_FREE,
    DoubleFreesRefusedHalfway: DOUBLE_FREE,
    ForeignFreesAccepted: "debug mode refuses to free a page that is not the allocator's",
    SharedAfterFree: "debug mode refuses to share a free page",
    ExtendedAfterFree: "debug mode refuses to extend into a free page",
    Misaligned: "debug mode refuses a last slot that does not fit its prefix",
    Aliased: "debug mode refuses two writers of one page",
    DeviceSharesOnce: "a page named twice in one share gets two references",
    DeviceExtendKeepsTheSharedReference: GIVES_BACK,
    DeviceCountsInInt64: "a page has one reference when it is handed out, free ones and page 0 have none",
}
"""Each with the check whose name says what is wrong."""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught_by_the_check_that_names_what_is_wrong(mutant, seed):
    assert failure(memory_checks(mutant)[MUTANTS[mutant]], seed)


def test_what_a_check_says_has_numbers():
    said = {mutant: failure(memory_checks(mutant)[name]) for mutant, name in MUTANTS.items()}
    assert said[FreeReturnsHowManyWereNamed].startswith("CheckFailedError: free([")
    assert "pages_needed=5, pages_free=6" in said[RefusalNumbersSwapped]
    assert "num_free_pages went from 5 to 4" in said[AllocLosesAPageWhenRefused]
    assert "ref_counts says 2 for page 1, which is held 1 times" in said[FirstReferencesAreTwo]
    assert "is to be Tensor of int32 with one axis, not torch.int64 of shape" in said[DeviceCountsInInt64]
    raised = {mutant.__name__ for mutant, text in said.items() if not text.startswith("CheckFailedError: ")}
    assert raised == {"PaddingRaises"}


# Declarations


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NeverRefuses(AllocatorCapabilities):
    def reject_reasons(self, device_kind, page_size=None):
        return []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusesAll(AllocatorCapabilities):
    def reject_reasons(self, device_kind, page_size=None):
        return AllocatorCapabilities(page_sizes=ints(5), device_kinds=frozenset({"none"})).reject_reasons(
            device_kind, page_size
        )


@pytest.mark.parametrize("declaration", [NeverRefuses, RefusesAll], ids=lambda declaration: declaration.__name__)
def test_a_declaration_that_refuses_too_little_or_too_much_is_caught(declaration):
    class Declared(PlainAllocator):
        capabilities = declaration(page_sizes=ints(1, 16), device_kinds=frozenset({"cpu"}))

    checks = {check.name: check for check in allocators.contract_checks(target(Declared))}
    for field in ("device_kinds", "page_sizes"):
        with pytest.raises(CheckFailedError, match="reject_reasons"):
            checks[f"reject_reasons is about {field} as declared"].run(0)


def test_what_is_no_allocator_has_checks_of_the_contract_alone():
    for loaded in (types.SimpleNamespace(), PlainAllocator.alloc, KVAllocator):
        wrong = Target(kind="allocator", name="wrong", place="some.module:wrong", loaded=loaded)
        assert any(failure(check) for check in allocators.contract_checks(wrong))
        assert list(allocators.checks(loaded, CPU)) == []


def test_a_class_that_lacks_methods_is_caught():
    class Unfinished(PlainAllocator):
        check = KVAllocator.check

    Unfinished.__abstractmethods__ = frozenset({"check"})
    checks = {check.name: check for check in allocators.contract_checks(target(Unfinished))}
    with pytest.raises(CheckFailedError, match="check"):
        checks["has all methods of KVAllocator"].run(0)

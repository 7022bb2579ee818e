"""Which replacements of a contract's methods can be called as anyattn calls them, and what is said of the others."""

import dataclasses
import functools

import pytest

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.reference import ReferenceBackend
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.base import KVAllocator, KVPool
from anyattn.mem_cache.empty_pool import EmptyPool
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.plugins.signatures import missing_methods, wrong_signatures
from anyattn.types import ANY_INT


class Base:
    def __init__(self, spec, cache):
        pass

    def plan(self, batch: "Batch") -> "Plan":  # noqa: F821 annotations are not part of what is compared
        pass

    def read(self, pages, out=None):
        pass

    def run(self, q, kv, *, sinks=None, slopes=None):
        pass

    @property
    def size(self):
        return 0

    def _private(self, x):
        pass


def wrong(**methods):
    """What is said of a class with these replacements."""
    return wrong_signatures(type("Theirs", (Base,), methods), Base)


def undecorated(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def decorated(function):
    return functools.wraps(function)(undecorated(function))


class Callable:
    def __call__(self, batch):
        pass


def with_more(self, way, batch):
    pass


FITTING = {
    "as it is": {},
    "other names of positional parameters": {"plan": lambda self, step: None},
    "positional-only parameters": {"plan": lambda self, step, /: None},
    "more parameters with defaults": {"plan": lambda self, batch, more=1, *, other=2: None},
    "any parameters": {"run": lambda *args, **kwargs: None},
    "keyword parameters that may be positional": {"run": lambda self, q, kv, sinks=None, slopes=None: None},
    "other keyword parameters taken together": {"run": lambda self, q, kv, **kwargs: None},
    "an optional parameter of another name": {"read": lambda self, pages, target=None: None},
    "a wrapper that hides what it wraps": {"plan": undecorated(lambda self, batch: None)},
    "a wrapper that shows what it wraps": {"plan": decorated(lambda self, batch: None)},
    "a static method": {"plan": staticmethod(lambda batch: None)},
    "a class method": {"plan": classmethod(lambda cls, batch: None)},
    "a partial method": {"plan": functools.partialmethod(with_more, "fast")},
    "an object that can be called": {"plan": Callable()},
    "a function in C without a signature": {"plan": vars(dict)["update"]},
    "another property": {"size": 3},
    "another private method": {"_private": lambda self: None},
    "another constructor": {"__init__": lambda self, spec, cache, *, workspace=None: None},
}


@pytest.mark.parametrize("methods", FITTING.values(), ids=FITTING)
def test_what_can_be_called_in_the_methods_place_fits(methods):
    assert wrong(**methods) == []


CALLED = "which cannot be called as"
MISFITS = {
    "a parameter less": ({"plan": lambda self: None}, f"plan: it is (self), {CALLED} (self, batch): too many"),
    "a parameter more": (
        {"plan": lambda self, batch, stream: None},
        f"plan: it is (self, batch, stream), {CALLED} (self, batch): missing a required argument: 'stream'",
    ),
    "a keyword parameter less": (
        {"run": lambda self, q, kv, *, sinks=None: None},
        f"run: it is (self, q, kv, *, sinks=None), {CALLED} (self, q, kv, *, sinks=None, slopes=None): got an",
    ),
    "a keyword parameter of another name": (
        {"run": lambda self, q, kv, *, sinks=None, alibi=None: None},
        "got an unexpected keyword argument 'slopes'",
    ),
    "a keyword parameter without a default": (
        {"run": lambda self, q, kv, *, sinks, slopes=None: None},
        "missing a required argument: 'sinks'",
    ),
    "an optional parameter less": ({"read": lambda self, pages: None}, "read: it is (self, pages), "),
    "an optional parameter without a default": (
        {"read": lambda self, pages, out: None},
        "missing a required argument: 'out'",
    ),
    "no self": ({"plan": lambda batch: None}, f"plan: it is (batch), {CALLED} (self, batch): too many"),
    "a static method with self": (
        {"plan": staticmethod(lambda self, batch: None)},
        f"plan: it is (self, batch), {CALLED} (batch): missing a required argument: 'batch'",
    ),
    "a class method without batch": ({"plan": classmethod(lambda cls: None)}, f"plan: it is (), {CALLED} (batch)"),
    "an object that is called otherwise": ({"read": Callable()}, f"read: it is (batch), {CALLED} (pages, out=None)"),
    "a wrapper around what does not fit": ({"plan": decorated(lambda self: None)}, "plan: it is (self), "),
    "nothing": ({"plan": None}, "plan: it is None, not a method"),
    "a number": ({"plan": 3}, "plan: it is of type int, not a method"),
    "a property": ({"plan": property(lambda self: None)}, "plan: it is of type property, not a method"),
    "another constructor": (
        {"__init__": lambda self, spec: None},
        f"__init__: it is (self, spec), {CALLED} (self, spec, cache): too many positional arguments",
    ),
}


@pytest.mark.parametrize(("methods", "text"), MISFITS.values(), ids=MISFITS)
def test_what_cannot_be_called_in_the_methods_place_is_named_with_both_signatures(methods, text):
    (said,) = wrong(**methods)
    assert text in said


def test_each_method_that_does_not_fit_is_named():
    said = wrong(plan=lambda self: None, run=None, read=lambda self, pages, out=None: None)
    assert [text.partition(":")[0] for text in said] == ["plan", "run"]


def test_a_replacement_further_up_among_the_classes_counts():
    mixin = type("Mixin", (), {"plan": lambda self: None})
    assert len(wrong_signatures(type("Theirs", (mixin, Base), {}), Base)) == 1
    assert len(wrong_signatures(type("Below", (type("Theirs", (Base,), {"plan": None}),), {}), Base)) == 1


class Raises:
    """As broken as a plugin's descriptor can be."""

    def __init__(self, error):
        self.error = error

    def __get__(self, instance, owner):
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3)], ids=["RuntimeError", "SystemExit"])
def test_a_method_that_cannot_be_read_is_named_with_the_error(error):
    (said,) = wrong(plan=Raises(error))
    assert said.startswith("plan: it cannot be read: RuntimeError: ")
    assert str(error) in said


def test_a_signature_that_raises_counts_as_none():
    class Strange:
        def __call__(self, batch):
            pass

        @property
        def __signature__(self):
            raise RuntimeError("boom")

    assert wrong(plan=Strange()) == []


@pytest.mark.parametrize("name", [name for name in FITTING if name != "a function in C without a signature"])
def test_what_fits_can_indeed_be_called(name):
    theirs = type("Theirs", (Base,), FITTING[name])(1, 2)
    theirs.plan(1)
    theirs.read(1)
    theirs.read(1, 2)
    theirs.run(1, 2)
    theirs.run(1, 2, sinks=3, slopes=4)


@pytest.mark.parametrize(
    ("implementation", "base"),
    [
        (ReferenceBackend, AttentionBackend),
        (PagedAllocator, KVAllocator),
        (MHAPool, KVPool),
        (MLAPool, KVPool),
        (EmptyPool, KVPool),
    ],
)
def test_the_built_in_classes_fit(implementation, base):
    assert missing_methods(implementation) == []
    assert wrong_signatures(implementation, base) == []


def test_the_methods_that_a_class_leaves_open_are_named_in_order():
    assert missing_methods(AttentionBackend) == ["plan", "run"]
    assert missing_methods(dict) == []


@pytest.mark.parametrize(
    ("topk", "parameters", "fits"),
    [
        (None, "*, sinks=None, alibi_slopes=None", True),
        (ANY_INT, "*, sinks=None, alibi_slopes=None", False),
        (ANY_INT, "*, sinks=None, alibi_slopes=None, indices=None", True),
        (ANY_INT, "**more", True),
    ],
)
def test_indices_are_taken_by_backends_that_declare_a_topk_and_asked_of_no_other(topk, parameters, fits):
    run = eval(f"lambda self, q, kv, plan, out, {parameters}: None")
    capabilities = dataclasses.replace(ReferenceBackend.capabilities, topk=topk)
    theirs = type("Theirs", (ReferenceBackend,), {"run": run, "capabilities": capabilities})
    said = wrong_signatures(theirs, AttentionBackend)
    assert (said == []) == fits
    assert fits or "indices=None" in said[0]


def test_a_declaration_that_cannot_be_read_asks_for_no_parameter():
    class Broken:
        @property
        def topk(self):
            raise OSError

    theirs = type("Theirs", (ReferenceBackend,), {"capabilities": Broken()})
    assert wrong_signatures(theirs, AttentionBackend) == []

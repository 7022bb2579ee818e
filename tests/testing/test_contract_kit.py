"""The kit's contract tier passes the built-in backends, and finds each way in which a class or declaration is wrong."""

import dataclasses
import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.spec import AttentionSpec
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.plugins.manager import PluginManager
from anyattn.testing.check import CannotRunError
from anyattn.testing.contract import backends as backend_contract
from anyattn.testing.contract import questions as refusal_questions
from anyattn.testing.target import Target, find_targets
from anyattn.types import ANY_INT, GraphLevel, IntSet, Reason, ints

pytestmark = pytest.mark.usefixtures("one_look_at_each_import")

BUILTIN = PluginManager(entry_points=())


def outcomes(target):
    """By name, what became of each check: None where it passed."""
    found = {}
    for check in backend_contract.checks(target):
        assert check.tier == "contract"
        assert check.name not in found
        try:
            found[check.name] = check.run(0)
        except Exception as error:
            found[check.name] = error
    return found


def failures(target):
    """By name, the text of each check that failed; what could not be checked is left out."""
    return {
        name: str(error)
        for name, error in outcomes(target).items()
        if error is not None and not isinstance(error, CannotRunError)
    }


def of_class(loaded):
    return Target(
        kind="backend", name="tested", place="anyattn.attention.torch_native:TorchNativeBackend", loaded=loaded
    )


class Plain(AttentionBackend):
    """Declares next to nothing, so that there is a lot to refuse."""

    capabilities = Capabilities(
        device_kinds=frozenset({"cuda"}),
        archs=frozenset({"sm90", "sm80"}),
        features=frozenset(),
        packages=("torch>=2.9",),
        dtypes=frozenset({"bfloat16", "float16"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        quantizes_q=True,
        quantizes_probs=True,
        head_dims=ints(64, 128),
        group_sizes=ints(1, 4, 8),
        page_sizes=ints(16),
        layouts=("NHD",),
        phases=frozenset({"prefill", "decode", "mixed"}),
        priority=lambda platform, spec, role, load: 50.0 if load.num_seqs < 8 else 5,
        run_on=frozenset({"sm90"}),
    )

    def plan(self, batch):
        return batch

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None, indices=None):
        pass


def declaring(**fields):
    """A backend like the plain one, but for these fields of its declaration."""
    kind = fields.pop("kind", Capabilities)
    names = [field.name for field in dataclasses.fields(Capabilities)]
    declared = kind(**{**{name: getattr(Plain.capabilities, name) for name in names}, **fields})
    return type("Tested", (Plain,), {"capabilities": declared})


def with_methods(**methods):
    return type("Tested", (Plain,), methods)


@pytest.mark.parametrize("name", BUILTIN.attention_backends())
def test_every_built_in_backend_keeps_the_contract(name):
    (target,) = (target for target in find_targets(name, BUILTIN) if target.kind == "backend")
    found = outcomes(target)
    assert {name: error for name, error in found.items() if error is not None} == {}
    assert "its plugin states this contract version" in found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"device_kinds": None, "archs": None, "run_on": frozenset()},
        {"device_kinds": frozenset({"strange"}), "archs": frozenset({"one"}), "run_on": frozenset({"one"})},
        {"device_kinds": frozenset({"cpu"}), "archs": None, "features": frozenset({"amx_bf16"}), "priority": 3},
        {"head_dims": None, "head_dim_pairs": frozenset({(192, 128)})},
        {"head_dims": None, "mla_dims": frozenset({(512, 64)}), "group_sizes": ints(16, 128)},
        {"head_dims": ints(77), "dtypes": frozenset({"float64"}), "causal": frozenset({False})},
        {"head_dims": None, "kv_dtypes": frozenset(), "quantizes_q": False, "quantizes_probs": False,
         "topk": ints(100)},
        {"topk": ANY_INT, "mla_dims": frozenset({(512, 64)}), "group_sizes": ints(64)},
        {"topk": ints(64), "not_together": (("topk", "return_lse"), ("mla", "fp8")), "lse": True, "sinks": True,
         "mla_dims": frozenset({(512, 64)})},
        {"phases": frozenset({"decode"}), "tree_mask": True},
        {"phases": frozenset({"decode"}), "decode_qo_len": 8},
        {"not_together": (("tree_mask", "sinks"), ("non_causal", "bfloat16")), "mla_dims": frozenset({(512, 64)})},
        {"not_together": (("mla", "fp8"), ("fp8", "value_head_dim")), "mla_dims": frozenset({(512, 64)}),
         "kv_dtypes": frozenset({"float8_e4m3fn"}), "head_dim_pairs": frozenset({(192, 128)})},
        {"num_qo_heads": IntSet(maximum=127)},
        {"num_qo_heads": ints(32), "group_sizes": ints(1, 4, 8), "mla_dims": frozenset({(512, 64)})},
        {"phases": frozenset({"prefill", "mixed"})},
        {"graph": GraphLevel.NEVER, "page_sizes": ANY_INT, "layouts": ("5D", "NZ", "NHD")},
    ],
    ids=lambda fields: ", ".join(fields) or "plain",
)
def test_declarations_of_all_kinds_keep_the_contract(fields):
    assert failures(of_class(declaring(**fields))) == {}


@pytest.mark.parametrize(
    "fields",
    [
        {"graph": GraphLevel.DECODE},
        {"graph": GraphLevel.ALWAYS, "phases": frozenset({"prefill", "mixed"})},
        {"graph": GraphLevel.UNIFORM, "phases": frozenset({"decode"}), "decode_qo_len": 8},
    ],
    ids=lambda fields: fields["graph"].name.lower(),
)
def test_pairs_with_graphs_are_asked_of_the_role_that_has_them(fields):
    methods = {"init_graph": lambda self, batch: batch, "refresh_graph": lambda self, plan, batch: None}
    pairs = {"not_together": (("graph", "sinks"), ("return_lse", "graph")), "lse": True, "sinks": True}

    def tested(**changes):
        declared = declaring(**fields, **pairs, **changes).capabilities
        return type("Tested", (Plain,), {"capabilities": declared, **methods})

    assert failures(of_class(tested())) == {}
    found = failures(of_class(tested(kind=Altered, field="sinks", drops=True)))
    assert list(found) == ["sinks together with graph is refused with a reason that names sinks"]


def test_a_pair_with_graphs_that_are_not_declared_never_comes_up():
    (text,) = failures(of_class(declaring(not_together=(("graph", "sinks"),), sinks=True))).values()
    assert "no spec has both graph and sinks of not_together: leave out the pair" in text


def test_everything_that_a_spec_can_ask_for_is_asked_for():
    bare = declaring(features=frozenset({"f"}), phases=frozenset({"decode"})).capabilities
    asked = {refusal.field for refusal in refusal_questions.refusals(bare) if refusal.values}
    # The group size, the pair of head dims and MLA's rank stand for these; a scale is a number to every backend.
    not_refused = {"num_kv_heads", "v_head_dim", "sm_scale", "qk_rope_head_dim", "qk_nope_head_dim"}
    assert {field.name for field in dataclasses.fields(AttentionSpec)} - not_refused <= asked
    assert asked >= {"page_size", "layout", "joined_layers", "phase", "device_kind", "arch", "features"}


def test_every_field_of_a_declaration_has_a_check():
    declared = declaring(
        extra="cuda", graph=GraphLevel.DECODE, phases=frozenset({"prefill", "mixed", "decode", "verify"}),
        tree_mask=True, features=frozenset({"f"}), device_kinds=frozenset({"k"}), emulated_on=frozenset({"k"}),
        contract_tested_on=frozenset({"k"}), contract_tested_with="vendor-kernels 1.2", decode_qo_len=3,
        not_together=(("sinks", "return_lse"),), num_qo_heads=IntSet(maximum=256),
    )  # fmt: skip
    rows = {check.capability for check in backend_contract.checks(of_class(declared))}
    rows |= {check.capability for check in backend_contract.checks(of_class(Plain))}
    # Two say that nothing is refused; the others are a wish or are for the runtime, and checked when declared.
    implied = {"any_head_dim_pair", "any_mla_dims", "preferred_page_size", "contiguous_q", "programs",
               "allocates_out", "needs_finite_tails"}
    assert {field.name for field in dataclasses.fields(Capabilities)} - implied <= rows


@dataclass(frozen=True, kw_only=True)
class Altered(Capabilities):
    """Gives its reasons otherwise: those about one field are dropped, renamed, or lack a part."""

    field: str = ""
    drops: bool = False
    renames: str = ""
    empties: str = ""

    def reject_reasons(self, spec, platform, role, **paging):
        given = super().reject_reasons(spec, platform, role, **paging)
        of_field = [reason for reason in given if reason.field == self.field]
        others = [reason for reason in given if reason.field != self.field]
        if self.drops:
            return others
        changes = {"field": self.renames} if self.renames else {self.empties: " "}
        return [*others, *(dataclasses.replace(reason, **changes) for reason in of_field)]


BARE = {
    "per_head_scales": False,
    "features": frozenset({"f"}),
    "device_kinds": frozenset({"k"}),
    "archs": frozenset({"a"}),
    "run_on": frozenset({"a"}),
}
REFUSED = {
    refusal.field: {
        other.what
        for other in refusal_questions.refusals(declaring(**BARE).capabilities)
        if other.field == refusal.field
    }
    for refusal in refusal_questions.refusals(declaring(**BARE, phases=frozenset({"decode"})).capabilities)
    if refusal.values
}
"""By the field of a reason, what is refused with it."""


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_accepted_in_silence_is_found_by_the_check_that_names_it(field):
    changes = BARE | ({"phases": frozenset({"decode"})} if field == "phase" else {})
    found = failures(of_class(declaring(kind=Altered, field=field, drops=True, **changes)))
    assert found
    assert {name.partition(" is refused")[0] for name in found} <= REFUSED[field]
    for name, text in found.items():
        assert name.endswith((f"names {field}", "names it"))
        # A tree mask also needs a phase that is not declared.
        assert "is not declared, and reject_reasons gave no reason for " in text or field == "tree_mask"
        assert f"refused with a reason whose field is {field!r}." in text


def test_a_reason_that_names_another_field_is_found():
    found = failures(of_class(declaring(kind=Altered, field="sinks", renames="extras")))
    assert list(found) == ["sinks is refused with a reason that names it"]
    assert "sinks=True is not declared, and reject_reasons gave reasons that name extras for " in found.popitem()[1]


@pytest.mark.parametrize("part", ["wanted", "supported", "remedy"])
def test_a_reason_without_one_of_its_parts_is_found(part):
    found = failures(of_class(declaring(kind=Altered, field="page_size", empties=part)))
    assert list(found) == ["another page_size is refused with a reason that names it"]
    assert f"the reason against page_size=1 has ' ' for {part}" in found.popitem()[1]


class Deaf(Capabilities):
    """Looks at the fields that it knows, whatever else a spec asks for."""

    def reject_reasons(self, spec, platform, role, **paging):
        known = {field.name: getattr(spec, field.name) for field in dataclasses.fields(AttentionSpec)}
        return super().reject_reasons(AttentionSpec(**known), platform, role, **paging)


class Wary(Capabilities):
    """Refuses whatever has a field that it does not know."""

    def reject_reasons(self, spec, platform, role, **paging):
        given = super().reject_reasons(spec, platform, role, **paging)
        unknown = dataclasses.fields(spec)[len(dataclasses.fields(AttentionSpec)) :]
        return [*given, *(Reason(field=f.name, wanted="w", supported="s", remedy="r") for f in unknown)]


class Grumbling(Capabilities):
    def reject_reasons(self, spec, platform, role, **paging):
        return [*super().reject_reasons(spec, platform, role, **paging), "never on a Friday"]


class Closed(Capabilities):
    def reject_reasons(self, spec, platform, role, **paging):
        return [Reason(field="mood", wanted="good", supported="bad", remedy="wait")]


class Exiting(Capabilities):
    def reject_reasons(self, spec, platform, role, **paging):
        raise SystemExit(3)


class Loose(Capabilities):
    __setattr__ = object.__setattr__


@dataclass(frozen=True, kw_only=True)
class Private(Capabilities):
    handle: object = dataclasses.field(default_factory=object)


@dataclass(frozen=True, kw_only=True)
class Growing(Capabilities):
    tuned: list = dataclasses.field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Forgetful(Capabilities):
    def to_json(self):
        document = super().to_json()
        del document["sinks"]
        return document


def not_a_number(platform, spec, role, load):
    return math.nan if load.num_seqs == 512 and role == "decode" else 1


def failing(platform, spec, role, load):
    return 10 / (load.kv_len - 65536)


def moody(platform, spec, role, load):
    return random.random()


LATER = "a field of a later version"
NAMES_IT = "is refused with a reason that names it"
PRIORITY = "the priority is a finite number for every load"
METHODS = "its methods are called like those of AttentionBackend"
MUTANTS = {
    "a field that is not known": (
        declaring(kind=Deaf),
        f"{LATER} {NAMES_IT}",
        "a_later_field=True is not declared, and ",
    ),
    "a neutral field": (
        declaring(kind=Wary),
        f"{LATER} changes nothing at its neutral value",
        "at its neutral value, is",
    ),
    "a field without JSON": (declaring(kind=Private), "its declaration can be written as JSON", "object is not JSON"),
    "a field left out": (declaring(kind=Forgetful), "its declaration can be written as JSON", "leaves out sinks"),
    "an unfrozen declaration": (declaring(kind=Loose), "its declaration is frozen", "device_kinds can be assigned"),
    "a list in it": (declaring(kind=Growing), "its declaration is frozen", "unhashable type: 'list'"),
    "a priority that is NaN": (
        declaring(priority=not_a_number),
        PRIORITY,
        "512 sequences of 1 tokens: a value of type",
    ),
    "a priority that fails": (declaring(priority=failing), PRIORITY, "sequences of 65536 tokens: ZeroDivisionError"),
    "a priority that changes": (declaring(priority=moody), PRIORITY, "and when asked again"),
    "a graph without its methods": (
        declaring(graph=GraphLevel.DECODE),
        "init_graph and refresh_graph come with a graph level",
        "declares graph=decode and has no init_graph and no refresh_graph: implement both, or",
    ),
    "a graph that is not refreshed": (
        type("Tested", (declaring(graph=GraphLevel.ALWAYS),), {"init_graph": lambda self, batch: batch}),
        "init_graph and refresh_graph come with a graph level",
        "declares graph=always and has no refresh_graph",
    ),
    "a parameter less": (
        with_methods(run=lambda self, q, kv, out: None),
        METHODS,
        "run: it is (self, q, kv, out), which",
    ),
    "another constructor": (
        with_methods(__init__=lambda self, spec: None),
        METHODS,
        "__init__: it is (self, spec), which",
    ),
    "a graph method": (with_methods(init_graph=lambda self: None), METHODS, "init_graph: it is (self), which"),
    "a role": (
        declaring(phases=frozenset({"prefill"})),
        "the phases fill at least one role",
        "phases prefill fill no role: decode needs the phase decode",
    ),
    "half of a role": (
        declaring(phases=frozenset({"prefill", "decode"})),
        "the phases prefill and mixed come together",
        "the phase mixed is not declared: the role prefill is filled only",
    ),
    "a requirement": (
        declaring(packages=("torch >> 2",)),
        "packages are requirement strings",
        "'torch >> 2' in packages",
    ),
    "an extra": (
        declaring(extra="mine"),
        "the extra is one of anyattn's",
        'the remedy `pip install "anyattn[mine]"` would',
    ),
    "trees without verify": (
        declaring(tree_mask=True),
        "tree_mask and the phase verify come together",
        "tree_mask is declared without the phase verify",
    ),
    "verify without trees": (
        declaring(phases=frozenset({"prefill", "mixed", "verify"})),
        "tree_mask and the phase verify come together",
        "the phase verify is declared without tree_mask",
    ),
    "a window without causal masks": (
        declaring(sliding_window=True, causal=frozenset({False})),
        "sliding_window comes with causal masks",
        "sliding_window is declared with causal={False}",
    ),
    "rounding without fp8": (
        declaring(kv_dtypes=frozenset(), quantizes_probs=False),
        "quantizes_q comes with an fp8 cache",
        "quantizes_q is declared, and kv_dtypes hold none of float8_e4m3fn, float8_e4m3fnuz, float8_e5m2",
    ),
    "pages that cannot be cut": (
        declaring(layouts=("NHD", "5D"), page_sizes=ints(3)),
        "layout 5D can hold pages of declared sizes",
        "layout 5D is declared, and none of the declared page sizes",
    ),
    "a claim": (
        declaring(emulated_on=frozenset({"sm90", "sm120"})),
        "emulated_on names devices that are declared",
        "emulated_on claims sm120, which neither device_kinds nor archs declare",
    ),
}
"""By what is wrong: a class, the check that fails and no other, and what it says."""


@pytest.mark.parametrize("what", MUTANTS)
def test_a_mutant_fails_the_check_that_names_what_is_wrong_and_no_other(what):
    loaded, name, text = MUTANTS[what]
    found = failures(of_class(loaded))
    if what == "a role":  # that of one phase is half of another role, and every spec is refused
        assert "the phases prefill and mixed come together" in found
    else:
        assert list(found) == [name]
    assert text in found[name]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (Closed, "no plain spec that is declared is accepted. [8/2 heads of 64, bfloat16, v_head_dim=None"),
        (Exiting, "reject_reasons raised RuntimeError: SystemExit: 3 for prefill of ["),
    ],
)
def test_a_declaration_that_accepts_nothing_is_told_by_a_check_of_its_own(kind, text):
    found = failures(of_class(declaring(kind=kind)))
    assert text.partition(",")[0] in found["a plain spec that it declares is accepted"]


def test_a_declaration_without_sizes_of_heads_is_told_so():
    found = failures(of_class(declaring(head_dims=None)))
    assert "declare no size of heads" in found["a plain spec that it declares is accepted"]


def test_a_reason_of_another_type_is_found():
    found = failures(of_class(declaring(kind=Grumbling)))
    assert "'never on a Friday', which is no anyattn.types.Reason" in found["a plain spec that it declares is accepted"]


class Incomplete(AttentionBackend):
    capabilities = Plain.capabilities

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        pass


class Undeclared(TorchNativeBackend):
    capabilities = None


class Metaclass(type(AttentionBackend)):
    @property
    def capabilities(cls):
        raise SystemExit(3)


class Unreadable(AttentionBackend, metaclass=Metaclass):
    plan = Plain.plan
    run = Plain.run


@pytest.mark.parametrize(
    ("loaded", "name", "text"),
    [
        (Incomplete, "has all methods of AttentionBackend", "Incomplete leaves plan of AttentionBackend open"),
        (Undeclared, "declares Capabilities", "its capabilities are None: set the class attribute capabilities ="),
        (Unreadable, "declares Capabilities", "SystemExit: 3"),
        (Path, "is a subclass of AttentionBackend", "what is offered is a subclass of AttentionBackend"),
        (AttentionBackend, "is a subclass of AttentionBackend", "what is offered is a subclass of AttentionBackend"),
        (Plain.run, "is a subclass of AttentionBackend", "what is offered is a subclass of AttentionBackend"),
    ],
    ids=["a method", "capabilities", "capabilities that raise", "another class", "the base class", "a function"],
)
def test_what_is_no_whole_backend_fails_the_check_that_says_so_and_no_other(loaded, name, text):
    found = failures(of_class(loaded))
    assert list(found) == [name]
    assert text in found[name]

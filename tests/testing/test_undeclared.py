"""What a backend does not declare is tried: what works is found, and no crash, hang or error ends the trial."""

import dataclasses
import importlib
import os
import sys

import pytest

from anyattn import ContractError, GraphLevel, discovery
from anyattn.attention.capabilities import Capabilities
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.testing.undeclared import probes as undeclared
from anyattn.testing.undeclared.attempts import attempt, attempts
from anyattn.testing.undeclared.probes import Probed, probe
from anyattn.types import ints

CPU = discovery.usable_device("cpu")

BACKENDS = """
import dataclasses, os, signal, sys, time

if os.environ.get("UNDECLARED_PARENT", str(os.getpid())) != str(os.getpid()):
    raise ImportError("not in another process")

import torch
from anyattn.attention.reference import ReferenceBackend

def without(*names, **others):
    return dataclasses.replace(ReferenceBackend.capabilities, topk=None, **dict.fromkeys(names, False), **others)


class Deaf(ReferenceBackend):
    capabilities = without("sinks", "lse")

    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        if sinks is not None:
            sinks = torch.full_like(sinks, -torch.inf)
        return super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes)


class Fragile(ReferenceBackend):
    capabilities = without("logits_soft_cap", "sinks", "alibi", "lse", "tree_mask", contiguous_q=True)

    def __init__(self, spec, cache, platform):
        super().__init__(spec, cache, platform)
        print("a word")
        os.write(1, b"and more\\n")
        if spec.logits_soft_cap is not None:
            os.kill(os.getpid(), signal.SIGSEGV)
        if spec.sinks:
            raise RuntimeError("no such kernel")
        if spec.alibi:
            time.sleep(600)
        if spec.return_lse:
            print("a library gave up", file=sys.stderr)
            os._exit(5)


class Elsewhere(ReferenceBackend):
    capabilities = without(device_kinds=frozenset({"cuda"}), archs=frozenset({"sm90"}))


class Unimportable:
    pass


def local():
    class Local(ReferenceBackend):
        pass

    return Local
"""


@pytest.fixture
def backends(tmp_path, monkeypatch):
    (tmp_path / "undeclared_backends.py").write_text(BACKENDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("undeclared_backends")
    sys.modules.pop("undeclared_backends", None)


def by_field(found):
    fields = [tried.field for tried in found]
    assert len(set(fields)) == len(fields)
    return {tried.field: tried for tried in found}


@pytest.mark.slow
def test_what_works_is_found_and_what_is_ignored_in_silence_does_not_work(backends):
    found = by_field(probe(backends.Deaf, CPU, 0))
    assert {field: (tried.value, tried.works) for field, tried in found.items()} == {
        "sinks": ("True", False),
        "lse": ("True", True),
    }
    assert found["lse"].note.startswith("right in ")
    assert found["lse"].note.endswith(" cases")
    assert "sinks" in found["sinks"].note.partition(":")[0]
    assert "float64" in found["sinks"].note


@pytest.mark.slow
def test_after_a_crash_a_hang_and_an_error_the_trial_goes_on(backends):
    found = by_field(probe(backends.Fragile, CPU, 0, limit_s=10.0))  # seconds: no case takes so long on a loaded host
    works = {field: tried.works for field, tried in found.items()}
    assert works == {
        "logits_soft_cap": False, "sinks": False, "alibi": False, "lse": False, "tree_mask": True, "contiguous_q": True,
    }  # fmt: skip
    for field, text in (
        ("logits_soft_cap", "crashed (signal 11)"),
        ("sinks", "RuntimeError: no such kernel"),
        ("alibi", "did not end within 10 s"),
        ("lse", "ended with status 5: a library gave up"),
    ):
        case, _, note = found[field].note.partition(": ")
        assert case
        assert note == text


@pytest.mark.slow
def test_where_the_device_is_not_declared_either_it_is_tried_first_and_alone(backends):
    first, *others = probe(backends.Elsewhere, CPU, 0)
    assert (first.field, first.value, first.works) == ("device_kinds", "cpu", True)
    assert others == []


def test_a_class_that_another_process_does_not_find_is_refused(backends):
    with pytest.raises(ContractError, match="does not name this class to another process"):
        probe(backends.local(), CPU, 0)


def test_a_module_that_another_process_cannot_import_is_told_so(backends, monkeypatch):
    monkeypatch.setenv("UNDECLARED_PARENT", str(os.getpid()))
    with pytest.raises(ContractError, match="process of its own: ended with status 1: ImportError: not in another"):
        probe(backends.Deaf, CPU, 0)


def test_a_process_that_does_not_start_in_time_is_told_so(backends, monkeypatch):
    monkeypatch.setattr(undeclared, "_BOOT", "import time; time.sleep(600)")
    monkeypatch.setattr(undeclared, "_START_S", 0.2)
    with pytest.raises(ContractError, match=r"in a process of its own: did not start within 0\.2 s"):
        probe(backends.Deaf, CPU, 0, limit_s=0.2)


class Undeterministic(TorchNativeBackend):
    """With few features, as the trial of determinism runs all cases that the declaration has."""

    features = ("any_mla_dims", "sliding_window", "logits_soft_cap", "sinks", "alibi", "tree_mask", "deterministic")
    capabilities = dataclasses.replace(
        TorchNativeBackend.capabilities,
        dtypes=frozenset({"bfloat16"}),
        kv_dtypes=frozenset(),
        **dict.fromkeys(features, False),
    )


class BatchMatesMatter(Undeterministic):
    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        lse = super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes)
        out *= 1 + 2**-8 * (len(plan) % 2)  # one step of bfloat16, so that nothing but determinism fails
        return lse


def one_attempt(backend, field, device=CPU):
    wanted = next(each for each in attempts(backend.capabilities, device) if each.field == field)
    return attempt(backend, device, wanted, 0, lambda name: None)


def test_whether_rows_depend_on_their_batch_is_told_by_the_checks_of_determinism():
    tried = one_attempt(Undeterministic, "deterministic")
    assert tried.works
    assert tried.note.endswith(" checks")
    assert not one_attempt(BatchMatesMatter, "deterministic").works


def test_a_graph_level_without_its_methods_does_not_work():
    tried = one_attempt(TorchNativeBackend, "graph", dataclasses.replace(CPU, graph=GraphLevel.DECODE))
    assert not tried.works
    assert "has no init_graph" in tried.note


def test_where_no_process_can_be_started_again_each_value_says_so(backends, monkeypatch):
    work = undeclared._work
    starts = []

    def once(request, limit_s):
        starts.append(request[-1])
        return work(request, limit_s) if len(starts) == 1 else ({}, "ended with status 1")

    monkeypatch.setattr(undeclared, "_work", once)
    found = probe(backends.Fragile, CPU, 0)
    assert "crashed" in found[0].note
    assert {tried.note for tried in found[1:]} == {"could not be tried: a new process ended with status 1"}


def test_what_was_raised_on_a_device_that_no_longer_answers_ends_the_process(backends):
    assert undeclared.answers(CPU)
    assert not undeclared.answers(dataclasses.replace(CPU, torch_device="meta"))  # it has no numbers to give


def tried(capabilities, device=CPU):
    return {(each.field, each.value) for each in attempts(capabilities, device)}


def test_everything_that_is_not_declared_is_tried():
    bare = Capabilities(
        dtypes=frozenset({"bfloat16"}),
        head_dims=ints(64),
        group_sizes=ints(1),
        page_sizes=ints(16),
        layouts=("NHD",),
        phases=frozenset({"decode"}),
        contiguous_q=True,
    )
    found = tried(bare, dataclasses.replace(CPU, graph=GraphLevel.UNIFORM))
    fields = {field for field, _ in found}
    assert fields == {
        "dtypes", "kv_dtypes", "per_head_scales", "head_dims", "head_dim_pairs", "mla_dims", "group_sizes",
        "page_sizes", "layouts", "strided_pages", "phases", "causal", "sliding_window", "logits_soft_cap", "sinks",
        "alibi", "tree_mask", "lse", "graph", "deterministic", "contiguous_q",
    }  # fmt: skip
    assert {value for field, value in found if field == "graph"} == {"decode", "uniform"}
    assert {
        ("dtypes", "float16"),
        ("kv_dtypes", "float8_e5m2"),
        ("layouts", "5D"),
        ("phases", "prefill, mixed"),
    } <= found
    assert ("dtypes", "bfloat16") not in found
    assert not {("head_dims", "64"), ("group_sizes", "1"), ("page_sizes", "16"), ("causal", "True")} & found


def test_a_pair_with_graphs_is_tried_by_the_checks_of_graphs():
    pairs = (("graph", "sinks"), ("sinks", "return_lse"))
    declared = dataclasses.replace(ReferenceBackend.capabilities, graph=GraphLevel.DECODE, not_together=pairs)
    found = {each.value: each.checks for each in attempts(declared, CPU) if each.field == "not_together"}
    assert found["graph and sinks"] is not None
    assert found["sinks and return_lse"] is None


def test_what_declares_everything_leaves_nothing_to_try():
    assert tried(ReferenceBackend.capabilities) == set()


def test_values_are_tried_in_the_same_order_in_every_process():
    assert list(attempts(TorchNativeBackend.capabilities, CPU)) == list(attempts(TorchNativeBackend.capabilities, CPU))


def test_a_result_is_data():
    assert Probed(field="f", value="v", works=True, note="n") == Probed(field="f", value="v", works=True, note="n")

"""The compliance kit passes the built-in backends, and no mutant of a good one."""

import dataclasses
import math
import secrets

import pytest
import torch

from anyattn import discovery
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.testing.__main__ import main
from anyattn.testing.cases import cases_for
from anyattn.testing.numerics import check_case
from anyattn.types import ints

CPU = discovery.usable_device("cpu")
BACKENDS = [ReferenceBackend, TorchNativeBackend]


def cases(backend):
    name = backend.__name__
    return [pytest.param(backend, case, id=f"{name} {case.name}") for case in cases_for(backend.capabilities)]


@pytest.mark.parametrize(("backend", "case"), [case for backend in BACKENDS for case in cases(backend)])
def test_a_built_in_backend_is_right_in_every_case_that_it_declares(backend, case):
    seed = secrets.randbelow(1 << 31)
    result = check_case(backend, case, CPU, seed)
    assert result.failure is None, f"seed {seed}: {result.failure}"


class Mutant(TorchNativeBackend):
    """Wrong in one way, by what it does to the spec, the plan's input, the KV or the result."""

    def __init__(self, spec, cache, platform):
        super().__init__(spec.replace(**self.changed(spec)), cache, platform)

    def changed(self, spec):
        return {}


class WindowOneTooLong(Mutant):
    def changed(self, spec):
        return {"sliding_window": spec.sliding_window + 1}


class WindowOneTooShort(Mutant):
    def changed(self, spec):
        return {"sliding_window": max(spec.sliding_window - 1, 1)}


class WindowIgnored(Mutant):
    def changed(self, spec):
        return {"sliding_window": None}


class SoftCapIgnored(Mutant):
    def changed(self, spec):
        return {"logits_soft_cap": None}


class ScaleIgnored(Mutant):
    def changed(self, spec):
        return {"sm_scale": 1.0}


class TreeIgnored(Mutant):
    def plan(self, batch):
        return super().plan(dataclasses.replace(batch, tree_masks=None))


class LastPartialPageDropped(Mutant):
    def plan(self, batch):
        lens = batch.host.kv_lens // batch.page_size * batch.page_size
        lens = lens.clip(min=batch.host.qo_lens)
        return super().plan(dataclasses.replace(batch, host=dataclasses.replace(batch.host, kv_lens=lens)))


class PageBeyondTheLengthRead(Mutant):
    def plan(self, batch):
        host = dataclasses.replace(batch.host, kv_lens=batch.host.num_pages * batch.page_size)
        return super().plan(dataclasses.replace(batch, host=host))


class PagesInOrder(Mutant):
    def plan(self, batch):
        return super().plan(dataclasses.replace(batch, kv_indices=batch.kv_indices.sort().values))


class OnRun(Mutant):
    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        q, kv, sinks, alibi_slopes = self.before(q, kv, sinks, alibi_slopes)
        lse = super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes)
        return self.after(out, lse)

    def before(self, q, kv, sinks, slopes):
        return q, kv, sinks, slopes

    def after(self, out, lse):
        return lse


class LSEInBase2(OnRun):
    def after(self, out, lse):
        return lse / math.log(2)


class LSEWithHeadsFirst(OnRun):
    def after(self, out, lse):
        return lse.T


class KScaleIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, k_scale=1.0), sinks, slopes


class VScaleIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, v_scale=1.0), sinks, slopes


class SinkIgnored(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, kv, None, slopes


class SinkCountedInTheLSE(OnRun):
    def before(self, q, kv, sinks, slopes):
        self.sinks = sinks
        return q, kv, sinks, slopes

    def after(self, out, lse):
        return torch.logaddexp(lse, self.sinks)


class ALiBiWithTheWrongSign(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, kv, sinks, -slopes


class HeadsInterleaved(OnRun):
    def before(self, q, kv, sinks, slopes):
        group, heads = self.spec.group_size, self.spec.num_kv_heads
        return q.reshape(-1, group, heads, q.shape[-1]).transpose(1, 2).flatten(1, 2), kv, sinks, slopes


class OutputNotWrittenForTheLastToken(OnRun):
    def after(self, out, lse):
        out[-1:] = 0
        return lse


class BatchMatesMatter(OnRun):
    def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None):
        super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes)
        out *= 1 + 2**-7 * (len(plan) % 2)


class ScalesOfOtherHeads(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, k_scale=kv.k_scale.flip(0), v_scale=kv.v_scale.flip(0)), sinks, slopes


class OneScaleForAllHeads(OnRun):
    def before(self, q, kv, sinks, slopes):
        return q, dataclasses.replace(kv, v_scale=kv.v_scale[:1]), sinks, slopes


def packed(shape):
    return torch.empty(shape, device="meta").stride()


class PagesTakenToLieOneBehindTheOther(OnRun):
    def before(self, q, kv, sinks, slopes):
        k, v = (pages.as_strided(pages.shape, packed(pages.shape)) for pages in (kv.k, kv.v))
        return q, dataclasses.replace(kv, k=k, v=v), sinks, slopes


class OneLayoutTakenForAnother(ReferenceBackend):
    def run(self, q, kv, plan, out, **per_head):
        return super().run(q, dataclasses.replace(kv, layout="5D"), plan, out, **per_head)


class NullPageMultipliedByZero(ReferenceBackend):
    """Right with every window, but that it multiplies the values behind one by zero, where NaN stays NaN."""

    def run(self, q, kv, plan, out, **per_head):
        super().run(q, kv, plan, out, **per_head)
        for i in range(plan.num_seqs):
            rows = slice(int(plan.host.qo_indptr[i]), int(plan.host.qo_indptr[i + 1]))
            pages = plan.kv_indices[int(plan.host.kv_indptr[i]) : int(plan.host.kv_indptr[i + 1])]
            behind = (int(plan.host.kv_lens[i]) - int(plan.host.qo_lens[i])) // plan.page_size
            out[rows] += 0.0 * kv.gather(pages[:behind])[1].sum()


MUTANTS = {
    WindowOneTooLong: "sliding_window=33",
    WindowOneTooShort: "sliding_window=33",
    WindowIgnored: "sliding_window=33",
    SoftCapIgnored: "logits_soft_cap=3.0",
    ScaleIgnored: "plain",
    TreeIgnored: "tree_mask=True",
    LastPartialPageDropped: "plain",
    PageBeyondTheLengthRead: "plain",
    PagesInOrder: "plain",
    LSEInBase2: "return_lse=True",
    LSEWithHeadsFirst: "return_lse=True",
    KScaleIgnored: "KV float8_e4m3fn, float scales",
    VScaleIgnored: "KV float8_e4m3fn, tensor scales",
    SinkIgnored: "sinks=True",
    SinkCountedInTheLSE: "sinks=True, return_lse=True",
    ALiBiWithTheWrongSign: "alibi=True",
    HeadsInterleaved: "plain",
    OutputNotWrittenForTheLastToken: "plain",
    BatchMatesMatter: "deterministic=True",
    ScalesOfOtherHeads: "KV float8_e4m3fn, a scale for each head",
    OneScaleForAllHeads: "KV float8_e5m2, a scale for each head",
    PagesTakenToLieOneBehindTheOther: "joined layers, NHD",
    OneLayoutTakenForAnother: "page size 64, NZ",
    NullPageMultipliedByZero: "sliding_window=33",
}
"""Each with the case whose failure names what is wrong."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_caught(mutant):
    case = next(case for case in cases_for(mutant.capabilities) if case.name == MUTANTS[mutant])
    try:
        failure = check_case(mutant, case, CPU, 0).failure
    except Exception as error:
        failure = str(error)
    assert failure


def test_pages_that_are_all_kept_would_not_show_who_reads_the_null_page():
    name = "sliding_window=33, in pages that are all kept"
    case = next(case for case in cases_for(ReferenceBackend.capabilities) if case.name == name)
    assert check_case(NullPageMultipliedByZero, case, CPU, 0).failure is None


def test_cases_are_only_those_whose_pages_can_be_made():
    pieces = dataclasses.replace(ReferenceBackend.capabilities, layouts=("5D", "NZ"), page_sizes=ints(1, 3, 16))
    found = {case.name: case for case in cases_for(pieces)}
    assert {(case.layout, case.page_size) for case in found.values()} >= {("5D", 16), ("NZ", 1), ("NZ", 3)}
    assert "page size 3, 5D" not in found
    assert found["head dim 72, 72"].layout == "5D"
    for case in found.values():
        case.spec.cache_spec(num_layers=1, page_size=case.page_size, layout=case.layout)


class DecodeOnly(TorchNativeBackend):
    capabilities = dataclasses.replace(TorchNativeBackend.capabilities, phases=frozenset({"decode"}))

    def plan(self, batch):
        assert batch.phase == "decode"
        return super().plan(batch)


def test_a_backend_of_one_phase_is_checked_in_that_phase():
    case = next(case for case in cases_for(DecodeOnly.capabilities) if case.name == "plain")
    assert check_case(DecodeOnly, case, CPU, 0).failure is None


def test_the_command_prints_a_table_and_says_yes(capsys):
    assert main(["anyattn.attention.torch_native:TorchNativeBackend", "--device", "cpu", "--only", "head dim"]) == 0
    output = capsys.readouterr().out
    assert "head dim 80, 80" in output
    assert output.rstrip().endswith("passed, 0 failed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["anyattn.attention.no:Such"], "cannot be imported"),
        (["torch_native"], "is not package.module:Class"),
        (["anyattn.attention.backend:AttentionBackend"], "declares no capabilities"),
        (["anyattn.errors:SpecError"], "no subclass of anyattn.AttentionBackend"),
        (["anyattn.attention.torch_native:TorchNativeBackend", "--device", "npu"], "No device 'npu'"),
        (["anyattn.hardware_backend.cuda.flashinfer:FlashInferBackend", "--device", "cpu"], "device_kind"),
    ],
)
def test_the_command_says_why_it_cannot_run(capsys, arguments, message):
    assert main(arguments) == 1
    assert message in capsys.readouterr().err


def test_a_run_without_a_single_case_says_so(capsys):
    assert main(["anyattn.attention.torch_native:TorchNativeBackend", "--device", "cpu", "--only", "no such case"]) == 1
    assert "no case's name holds 'no such case'" in capsys.readouterr().err

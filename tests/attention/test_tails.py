"""A backend that multiplies what lies behind a sequence's end in its last page finds finite values there."""

import dataclasses

import pytest
import torch

from anyattn.attention.reference import ReferenceBackend
from anyattn.discovery import usable_device
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime, layer_kv, run_step
from anyattn.testing.numerics.inputs import PerHead, Step
from anyattn.testing.numerics.scenarios import checks as scenarios

NOTHING = PerHead(sinks=None, alibi_slopes=None)
CPU = usable_device("cpu")


class ReadsTails(ReferenceBackend):
    """The reference, whose output has 0 times everything that is in the sequence's last page."""

    capabilities = dataclasses.replace(ReferenceBackend.capabilities, needs_finite_tails=True)

    def plan(self, batch):
        return super().plan(batch), batch

    def run(self, q, kv, plan, out, **more):
        plan, batch = plan
        lse = super().run(q, kv, plan, out, **more)
        begins, lengths = batch.qo_indptr.tolist(), batch.kv_lens.tolist()
        for i, length in enumerate(lengths):
            if length and begins[i] < begins[i + 1]:
                _, values = kv.gather(batch.block_table[i, (length - 1) // batch.page_size][None])
                out[begins[i] : begins[i + 1]] += (0 * values.float().sum()).to(out.dtype)
        return lse


class Careless(ReadsTails):
    capabilities = dataclasses.replace(ReadsTails.capabilities, needs_finite_tails=False)


CASES = {case.name: case for case in cases_for(ReadsTails.capabilities)}
NAMES = [
    "plain", "decode", "mixed", "page size 3, NHD", "page size 64, HND", "joined layers, HND", "33 sequences",
    "KV float8_e4m3fn, float scales", "one plan for two layers", "sequences without tokens", "MLA 512+64 plain",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_pages_are_zeroed_behind_the_end_as_they_are_opened(name):
    assert check_case(ReadsTails, CASES[name], CPU, 0).failure is None
    assert "NaN" in check_case(Careless, CASES[name], CPU, 0).failure


def test_other_sequences_and_plans_matter_as_little_as_ever():
    for check in scenarios(ReadsTails, CPU):
        if not check.name.startswith(("MLA", "64-bit offsets")):
            check.run(0)


def steps(rt, case, seqs, counts, *, spoilt=()):
    """One step of random tokens; those of `spoilt` are NaN. Returns the output."""
    step = Step.draw(case.spec, counts, torch.Generator().manual_seed(0))
    for row in spoilt:
        step.k[row] = step.v[row] = float("nan")
    out, *_ = run_step(rt, step, rt.plan(rt.extend(seqs, counts)), NOTHING)
    return out


@pytest.mark.parametrize("page_size", [8, 32])
def test_what_a_sequence_was_shortened_by_is_zeroed_before_it_goes_on(page_size):
    """As NaN in a draft that was rejected would stay in its page."""
    case = dataclasses.replace(CASES["plain"], page_size=page_size, steps=((60, 60),))
    rt = build_runtime(ReadsTails, case, CPU, 0)
    seqs = rt.new_sequences(2)
    steps(rt, case, seqs, [9, 3])
    steps(rt, case, seqs, [3, 1], spoilt=(1, 2))
    rt.truncate([seqs[0]], [10])
    (fork,) = rt.fork(seqs[0])
    for batch in ([seqs[1]], [seqs[0]], [fork, seqs[0]], [seqs[0]]):
        assert steps(rt, case, batch, [1] * len(batch)).isfinite().all()


def test_what_others_have_in_a_shared_page_stays():
    """A shorter fork that gets no new tokens does not write to a page whose later tokens are another's."""
    case = dataclasses.replace(CASES["plain"], page_size=16, steps=((60, 60),))
    rt = build_runtime(ReadsTails, case, CPU, 0)
    (seq,) = rt.new_sequences(1)
    steps(rt, case, [seq], [12])
    (fork,) = rt.fork(seq)
    rt.truncate([fork], [5])
    pages = torch.from_numpy(rt.table.pages(seq))
    before = [part.clone() for part in layer_kv(rt, 0).gather(pages)]
    rt.extend([fork, seq], [0, 0])
    assert all(torch.equal(a, b) for a, b in zip(before, layer_kv(rt, 0).gather(pages), strict=True))
    assert steps(rt, case, [fork], [1]).isfinite().all()
    assert all(torch.equal(a[:, :12], b[:, :12]) for a, b in zip(before, layer_kv(rt, 0).gather(pages), strict=True))


def test_layers_with_a_window_have_their_own_pages_zeroed():
    case = dataclasses.replace(CASES["sliding_window=33"], page_size=8, steps=((60, 41), (1, 1), (9, 1)))
    rt = build_runtime(ReadsTails, case, CPU, 0)
    assert len(rt.pools) == 2
    seqs = rt.new_sequences(2)
    for counts in case.steps:
        steps(rt, case, seqs, counts)
        for seq, length in zip(seqs, rt.table.lengths(seqs), strict=True):
            page = rt.table.pages(seq)[-1:]
            own = torch.from_numpy(rt.table.windows[0].page_of[page])
            for part in layer_kv(rt, 0).gather(own):
                assert part[0, (length - 1) % 8 + 1 :].eq(0).all()

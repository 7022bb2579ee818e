"""The kit finds what backends get wrong about sparse MLA, and its inputs are what it says."""

import dataclasses

import pytest
import torch

from anyattn import Platform
from anyattn.attention.reference import ReferenceBackend
from anyattn.testing.check import CheckFailedError
from anyattn.testing.numerics import scenarios
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.inputs import Step
from anyattn.testing.numerics.sparse_cases import sparse_cases
from anyattn.types import ints

CPU = Platform(kind="cpu", vendor="intel", name="Test", arch="x86_64", torch_device="cpu")
SMALL = dataclasses.replace(
    ReferenceBackend.capabilities, topk=ints(7, 64, 1024), group_sizes=ints(2), page_sizes=ints(16)
)
CASES = list(sparse_cases(SMALL))
PLAIN = CASES[0]


def seed():
    return torch.seed() % (1 << 31)


def mistaken(change):
    """The reference, but that `change` says what it sees: from slots and the batch to other slots."""

    class Mistaken(ReferenceBackend):
        capabilities = SMALL

        def run(self, q, kv, plan, out, *, sinks=None, alibi_slopes=None, indices=None):
            changed = change(indices, plan)
            return super().run(q, kv, plan, out, sinks=sinks, alibi_slopes=alibi_slopes, indices=changed)

    return Mistaken


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_reference_is_right_in_every_case_of_sparse_attention(case):
    assert check_case(ReferenceBackend, case, CPU, seed()).failure is None


@pytest.mark.parametrize("check", ["two plans", "NaN in one", "KV cache as it is", "beside out", "inputs as they are"])
def test_what_must_hold_beside_single_cases_is_asked_of_sparse_attention_too(monkeypatch, check):
    monkeypatch.setattr(scenarios, "cases_for", sparse_cases)
    (wanted,) = (each for each in scenarios.checks(mistaken(lambda slots, batch: slots), CPU) if check in each.name)
    wanted.run(seed())


MISTAKES = {
    "what stands for no key is taken for the null page": lambda slots, batch: slots.clamp(min=0),
    "keys behind the first -1 are left out": lambda slots, batch: slots.masked_fill((slots < 0).cumsum(1) > 0, -1),
    "the first of the keys is left out": lambda slots, batch: slots.masked_fill(torch.arange(64) == 0, -1),
    "a key of the token before": lambda slots, batch: slots.roll(1, 0),
    "the first page only": lambda slots, batch: slots.masked_fill(slots >= 32, -1),
}


@pytest.mark.parametrize("change", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_found(change):
    assert check_case(mistaken(change), PLAIN, CPU, seed()).failure


def test_a_backend_that_writes_to_the_slots_is_found(monkeypatch):
    monkeypatch.setattr(scenarios, "cases_for", sparse_cases)
    changing = mistaken(lambda slots, batch: slots.clamp_(min=16))
    (wanted,) = (each for each in scenarios.checks(changing, CPU) if "inputs as they are" in each.name)
    with pytest.raises(CheckFailedError, match="run changed indices"):
        wanted.run(seed())


def test_the_positions_of_a_step_are_the_same_whenever_they_are_asked_for_and_those_of_its_sequences():
    generator = torch.Generator()
    generator.seed()
    step, prefixes = Step.draw(PLAIN.spec, (40, 0, 60), generator), (100, 3, 0)
    indices = step.indices(prefixes)
    assert indices.shape == (100, 64)
    assert torch.equal(step.indices(prefixes), indices)
    assert torch.equal(step.of_sequences([2, 0]).indices((0, 100)), torch.cat([indices[40:], indices[:40]]))
    positions = [*range(100, 140), *range(60)]
    for row, position in zip(indices.tolist(), positions, strict=True):
        seen = [each for each in row if each >= 0]
        assert len(set(seen)) == len(seen)
        assert all(each <= position for each in seen)
    lengths = (indices >= 0).sum(1)
    assert 0 in lengths  # of 100 rows one in eight
    assert 64 in lengths
    full = indices[:40][lengths[:40] == 64]
    assert (full.diff(dim=1) < 0).any(dim=1).all()

"""Backends whose kernels make their outputs: what they return is what the engine gets, or is copied where it says."""

import dataclasses

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError
from anyattn.attention.hybrid import PlannedStep
from anyattn.attention.reference import ReferenceBackend
from anyattn.discovery import usable_device
from anyattn.testing.check import CheckFailedError
from anyattn.testing.numerics.cases import cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.scenarios import checks as scenarios

CPU = usable_device("cpu")
MLA = AttentionSpec.mla(
    num_qo_heads=3, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, sm_scale=0.2,
    dtype="float32",
)  # fmt: skip


class Allocates(ReferenceBackend):
    capabilities = dataclasses.replace(ReferenceBackend.capabilities, allocates_out=True)

    def run(self, q, kv, plan, out, **more):
        assert out is None
        result = q.new_empty(q.shape[0], q.shape[1], self.spec.vo_head_dim)
        return result, super().run(q, kv, plan, result, **more)


CASES = {case.name: case for case in cases_for(Allocates.capabilities)}


@pytest.mark.parametrize("name", ["plain", "mixed", "causal False, return_lse=True", "MLA 512+64 plain"])
def test_they_are_right_wherever_the_output_is_wanted(name):
    assert check_case(Allocates, CASES[name], CPU, 0).failure is None


def test_nothing_beside_a_step_matters_to_it_or_is_changed_by_it():
    for check in scenarios(Allocates, CPU):
        if not check.name.startswith(("MLA", "64-bit offsets")):
            check.run(0)


def test_one_that_writes_every_output_to_the_same_memory_is_found():
    class Shares(Allocates):
        memory = torch.empty(1 << 20, dtype=torch.bfloat16)

        def run(self, *args, **more):
            result, lse = super().run(*args, **more)
            return self.memory[: result.numel()].view(result.shape).copy_(result), lse

    (check,) = [check for check in scenarios(Shares, CPU) if check.name == "run returns a new output"]
    with pytest.raises(CheckFailedError, match="changed the output of an earlier step"):
        check.run(0)


def returning(function):
    class Returns(Allocates):
        def run(self, *args, **more):
            return function(*super().run(*args, **more))

    return Returns


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda out, lse: None, "not None: declare"),
        (lambda out, lse: out, r"not a tensor \[2, 4, 16\] of float32:"),
        (lambda out, lse: (out[:1], lse), r"not \(a tensor \[1, 4, 16\] of float32, None\)"),
        (lambda out, lse: (out.flatten(1), lse), r"a tensor \[2, 64\]"),
        (lambda out, lse: (out.double(), lse), "of float64, None"),
        (lambda out, lse: (out.transpose(0, 1).contiguous().transpose(0, 1), lse), "that is not contiguous, None"),
    ],
    ids=["None", "a tensor", "a row", "flat", "another dtype", "gaps"],
)
@pytest.mark.parametrize("with_out", [False, True])
def test_what_is_returned_in_another_form_is_refused_by_name(function, message, with_out):
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype="float32")
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=8, page_size=4, device="cpu", backend="reference")
    plan = rt.plan(rt.extend(rt.new_sequences(2), [1, 1]))
    (step,) = plan.steps
    backend = returning(function)(spec, step.backend.cache, step.backend.platform)
    plan = dataclasses.replace(plan, steps=(PlannedStep(backend, step.plan),))
    q, k = torch.randn(2, 4, 16), torch.randn(2, 2, 16)
    with pytest.raises(ContractError, match=f"Returns declares allocates_out.*{message}"):
        rt.run(0, q, k, k, plan, out=torch.empty(2, 4, 16) if with_out else None)


@pytest.mark.parametrize("with_out", [False, True])
def test_up_projections_work_with_them(with_out):
    outs = []
    for allocates in (False, True):
        torch.manual_seed(0)
        rt = anyattn.create_runtime(MLA, num_layers=1, num_pages=80, page_size=4, device="cpu", backend="reference")
        rt.bind_mla(0, torch.randn(3, 16, 32), torch.randn(3, 32, 12))
        plan = rt.plan(rt.extend(rt.new_sequences(2), [5, 1]))
        step = plan.mla[0].absorbed
        if allocates:
            step = PlannedStep(Allocates(MLA, step.backend.cache, step.backend.platform), step.plan)
            plan = dataclasses.replace(plan, mla=(dataclasses.replace(plan.mla[0], absorbed=step),))
        given = torch.empty(6, 3, 12) if with_out else None
        out = rt.run(0, torch.randn(6, 3, 24), torch.randn(6, 40), None, plan, out=given)
        assert given is None or out is given
        outs.append(out)
    assert torch.equal(*outs)

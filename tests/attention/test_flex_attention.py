"""flex_attention: cases of all that it declares without the compiler, some with it, and how often it is asked."""

import contextlib
import dataclasses
import os
import secrets
import shutil

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from anyattn import AttentionSpec, discovery
from anyattn.attention import flex_attention
from anyattn.attention.flex_attention import FlexAttentionBackend, FlexAttentionCPUBackend
from anyattn.plugins.manager import PluginManager
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.checks import check_case
from anyattn.testing.numerics.driver import build_runtime

CPU = discovery.usable_device("cpu")
# What torch says to whoever calls it without the compiler, which is what most of these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
TOGETHER = "sliding_window=64, logits_soft_cap=3.0, alibi=True"


class Everywhere(FlexAttentionBackend):
    """All that either device declares, with the GPU's tiles. Without the compiler it runs on the CPU too.

    MLA of any dims: those that the kit takes first then are small.
    """

    capabilities = dataclasses.replace(
        FlexAttentionBackend.capabilities,
        device_kinds=None,
        archs=None,
        packages=(),
        any_head_dim_pair=True,
        mla_dims=frozenset(),
        any_mla_dims=True,
    )


def cases(backend, *names):
    """Those of these names; without names all, but of the matrix's, which take long here, each fourth."""
    found = [case for case in cases_for(backend.capabilities) if not names or case.name in names]
    assert len(found) == len(names) or not names
    of_matrix = [case for case in found if "matrix: " in case.name]
    return [pytest.param(case, id=case.name) for case in found if case not in of_matrix or case in of_matrix[::4]]


def sample(backend):
    """Of each capability, of MLA and of other layers, the first case and each fourth after it; of what shapes the
    steps, all. Without the compiler a case takes half a second, and on a GPU there are all of them. MLA of 512 + 64 is
    the same with larger tensors: once."""
    groups = {}
    for case in cases_for(backend.capabilities):
        if case.name.startswith("MLA 512+64") and case.name != "MLA 512+64 plain":
            continue
        groups.setdefault((case.spec.is_mla, case.capability), []).append(case)
    whole = {(False, "phases"), (False, "tree_mask")}
    some = [case for key, group in groups.items() for case in (group if key in whole else group[::4])]
    return [pytest.param(case, id=case.name) for case in some]


def case_of(steps, page_size=16, layout="NHD", **fields):
    return Case(name="", spec=AttentionSpec(**fields), page_size=page_size, layout=layout, steps=steps)


def check(backend, case, device=CPU):
    seed = secrets.randbelow(1 << 31)
    result = check_case(backend, case, device, seed)
    assert result.failure is None, f"seed {seed}: {result.failure}"


def drive(backend, case, device, poisoned=None):
    """Output of the last step, with inputs that are always the same; `poisoned`: the sequence whose keys are NaN."""
    spec, generator = case.spec, torch.Generator().manual_seed(0)
    rt = build_runtime(backend, case, device, 0)
    seqs = rt.new_sequences(len(case.steps[0]))
    for counts in case.steps:
        q, k, v = (
            torch.randn(sum(counts), heads, spec.head_dim, generator=generator).to(getattr(torch, spec.dtype))
            for heads in (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
        )
        if poisoned is not None:
            start = sum(counts[:poisoned])
            for x in (k, v):
                x[start : start + counts[poisoned]] = float("nan")
        out = rt.run(0, *(x.to(rt.device) for x in (q, k, v)), rt.plan(rt.extend(seqs, counts)))
    return out.cpu()


@pytest.fixture
def uncompiled():
    flex_attention._kernel.cache_clear()
    with torch.compiler.set_stance("force_eager"):
        yield
    flex_attention._kernel.cache_clear()


@pytest.fixture
def compiler():
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        pytest.skip(f"needs a C++ compiler: {name} is not on the PATH")
    if "avx2" not in CPU.features:
        pytest.skip("needs a CPU with AVX2")


@pytest.fixture(scope="module")
def gpu():
    return discovery.usable_device("cuda")


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("case", sample(Everywhere))
def test_a_declared_case_is_right_without_the_compiler(case):
    check(Everywhere, case)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("case", cases(FlexAttentionCPUBackend, "plain", "float32", "tree_mask=True", TOGETHER))
def test_a_compiled_kernel_is_right_on_the_cpu(case):
    check(FlexAttentionCPUBackend, case)


def random_steps(generator):
    num_seqs = int(generator.integers(1, 6))
    prefill = generator.choice([0, 1, 2, 5, 40, 129, 300], num_seqs)
    return tuple(map(tuple, [prefill.tolist(), [1] * num_seqs, generator.integers(0, 4, num_seqs).tolist()]))


def check_that_nothing_is_compiled_anew(backend, case, device):
    check(backend, case, device)
    compiled = counters["stats"]["unique_graphs"]
    generator = np.random.default_rng(secrets.randbelow(1 << 31))
    modes = [contextlib.nullcontext, torch.no_grad, torch.inference_mode]
    for trial in range(24):
        page_size, layout = int(generator.choice([1, 16, 40])), str(generator.choice(["NHD", "HND"]))
        with modes[trial % 3]():
            steps = random_steps(generator)
            check(backend, dataclasses.replace(case, steps=steps, page_size=page_size, layout=layout), device)
    assert counters["stats"]["unique_graphs"] == compiled


@pytest.mark.usefixtures("compiler")
def test_other_batches_page_sizes_layouts_and_modes_of_torch_compile_nothing_anew():
    (case,) = cases(FlexAttentionCPUBackend, TOGETHER)
    check_that_nothing_is_compiled_anew(FlexAttentionCPUBackend, case.values[0], CPU)


@pytest.mark.usefixtures("compiler")
def test_nan_in_a_sequence_reaches_none_of_its_batch():
    (case,) = cases(FlexAttentionCPUBackend, "float32")
    case = dataclasses.replace(case.values[0], steps=((70, 40, 3), (1, 2, 1)))
    clean, poisoned = (drive(FlexAttentionCPUBackend, case, CPU, which) for which in (None, 1))
    assert torch.equal(poisoned[[0, 3]], clean[[0, 3]])
    assert poisoned[1:3].isnan().all()


@pytest.mark.usefixtures("uncompiled")
def test_what_lies_behind_the_window_is_not_gathered():
    fields = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 16, "sliding_window": 64}
    steps = ((1000, 900, 0, 0), (1, 3, 0, 10))
    rt = build_runtime(Everywhere, case_of(steps, **fields), CPU, 0)
    seqs = rt.new_sequences(4)
    rt.extend(seqs, steps[0])
    plan = rt.plan(rt.extend(seqs, steps[1]))
    assert plan.steps[0].plan.pages.numel() == 3 * flex_attention._BLOCK


@pytest.mark.usefixtures("uncompiled")
def test_a_row_that_sees_nothing_gives_zero_and_minus_infinity():
    fields = {"num_qo_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    rt = build_runtime(Everywhere, case_of(((2,),), tree_mask=True, return_lse=True, **fields), CPU, 0)
    batch = rt.extend(rt.new_sequences(1), [2], tree_masks=[torch.tensor([[False, False], [True, False]])])
    out, lse = rt.run(0, *(torch.randn(2, heads, 16) for heads in (2, 1, 1)), rt.plan(batch))
    assert (out[0] == 0).all()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("fields", [{"causal": True}, {"tree_mask": True}], ids=str)
def test_a_step_of_more_tiles_and_tree_nodes_than_usual_is_right(monkeypatch, fields):
    monkeypatch.setattr(flex_attention, "_TILES", 2)
    monkeypatch.setattr(flex_attention, "_TREE_BITS", 4)
    check(Everywhere, case_of(((40, 129), (3, 5)), num_qo_heads=32, num_kv_heads=1, head_dim=16, **fields))


@pytest.mark.usefixtures("uncompiled")
def test_a_plan_stays_valid_while_others_are_made_and_run():
    rt = build_runtime(Everywhere, case_of(((90, 30, 60),), num_qo_heads=4, num_kv_heads=2, head_dim=16), CPU, 0)
    first, second = rt.new_sequences(1), rt.new_sequences(2)
    tensors = [torch.randn(90, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    plan = rt.plan(rt.extend(first, [90]))
    wanted = rt.run(0, *tensors, plan)
    rt.run(0, *(torch.randn_like(x) for x in tensors), rt.plan(rt.extend(second, [30, 60])))
    assert torch.equal(rt.run(0, *tensors, plan), wanted)


@pytest.mark.parametrize("compiler_name", ["", "no-such-compiler"])
def test_a_cpu_without_a_compiler_is_told_what_to_do(monkeypatch, tmp_path, compiler_name):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", compiler_name)
    found = discovery.candidates(PluginManager(entry_points=[])).backends
    (reason,) = next(candidate for candidate in found if candidate.name == "flex_attention_cpu").missing
    assert (reason.field, reason.wanted) == ("program", compiler_name or "g++")
    assert reason.remedy == f"install {compiler_name or 'g++'}, or set CXX to another"


@pytest.mark.cuda
@pytest.mark.parametrize("case", cases(FlexAttentionBackend))
def test_every_declared_case_is_right_on_a_gpu(gpu, case):
    check(FlexAttentionBackend, case, gpu)


@pytest.mark.cuda
def test_other_batches_compile_nothing_anew_on_a_gpu(gpu):
    (case,) = cases(FlexAttentionBackend, "sliding_window=33, return_lse=True")
    check_that_nothing_is_compiled_anew(FlexAttentionBackend, case.values[0], gpu)


@pytest.mark.cuda
def test_nan_in_a_sequence_reaches_none_of_its_batch_on_a_gpu(gpu):
    (case,) = cases(FlexAttentionBackend, "plain")
    case = dataclasses.replace(case.values[0], steps=((70, 40, 3), (1, 2, 1)))
    clean, poisoned = (drive(FlexAttentionBackend, case, gpu, which) for which in (None, 1))
    assert torch.equal(poisoned[[0, 3]], clean[[0, 3]])


@pytest.mark.cuda
def test_neither_plan_nor_run_waits_for_the_gpu(gpu):
    (case,) = cases(FlexAttentionBackend, "sinks=True, return_lse=True")
    rt = build_runtime(FlexAttentionBackend, case.values[0], gpu, 0)
    spec, seqs = case.values[0].spec, rt.new_sequences(2)
    heads = (spec.num_qo_heads, spec.num_kv_heads, spec.num_kv_heads)
    tensors = [torch.randn(8, n, spec.head_dim, dtype=torch.bfloat16, device=rt.device) for n in heads]
    sinks = torch.zeros(spec.num_qo_heads, device=rt.device)

    def step(counts):
        rt.run(0, *(x[: sum(counts)] for x in tensors), rt.plan(rt.extend(seqs, counts)), sinks=sinks)

    for counts in ([5, 3], [1, 1]):
        step(counts)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for counts in ([3, 5], [1, 1]):
            step(counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")

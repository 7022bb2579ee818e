"""The benchmark of the `triton` backend on the CPU: its rows, their limits, its verdicts, and a run of small rows."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn import AttentionSpec
from anyattn.attention.reference import reference_attention
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.discovery import usable_device

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def files(monkeypatch):
    """The benchmark's files, by what follows "triton_" in their names; triton_backend.py is `main`."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = ("triton_backend", "triton_rows", "triton_measure", "triton_results", "nvidia_rows", "nvidia_measure")
    main, rows, measure, results, shapes, nvidia = [importlib.import_module(name) for name in names]
    return types.SimpleNamespace(main=main, rows=rows, measure=measure, results=results, shapes=shapes, nvidia=nvidia)


def test_rows_are_there_at_each_page_size_and_ragged_where_there_are_several_sequences(files):
    groups = files.rows.groups()
    names = {files.rows.name_of(group, row) for group in groups for row in group.rows}
    assert len(names) == sum(len(group.rows) for group in groups)
    assert {group.page_size for group in groups} == {1, 16, 64}
    for group in groups:
        assert ("FlashMLA" in group.kernel_names) == (group.spec.is_mla and group.page_size == 64)
        for row in group.rows:
            if not row.ragged:
                assert (f"{files.rows.name_of(group, row)}, ragged" in names) == (row.batch > 1)


def test_ragged_rows_have_about_as_many_tokens_and_always_the_same(files):
    decode = files.rows.ragged(files.shapes.Row(batch=32, length=8192))
    verify = files.rows.ragged(files.shapes.Row(batch=32, length=4096, num_new=8))
    chunk = files.rows.ragged(files.shapes.Row(batch=4, length=16384, num_new=512), with_new=True)
    prompts = files.rows.ragged(files.shapes.Row(batch=4, length=8192, num_new=8192), with_new=True)
    for row in (decode, verify, chunk, prompts):
        assert row.kv_lens.sum() == pytest.approx(row.batch * row.length, rel=0.03)
        assert (row.kv_lens >= row.qo_lens).all()
        assert len(set(row.kv_lens)) > row.batch // 2
    assert set(decode.qo_lens) == {1}
    assert set(verify.qo_lens) == {8}
    assert chunk.qo_lens.sum() == pytest.approx(4 * 512, rel=0.03)
    assert len(set(chunk.qo_lens)) == 4
    assert list(prompts.qo_lens) == list(prompts.kv_lens)
    assert files.rows.ragged(files.shapes.Row(batch=32, length=8192)) == decode


def test_one_batch_has_lengths_from_one_to_the_longest(files):
    lens = files.rows.spread(16, 131072).kv_lens
    assert (lens.size, lens.min(), lens.max()) == (16, 1, 131072)


@pytest.mark.parametrize(("only", "sizes"), [(["page 1,"], {1}), (["GQA", "page 6"], {64}), ([], {1, 16, 64})])
def test_rows_are_selected_by_parts_of_their_names(files, only, sizes):
    assert {group.page_size for group, _ in files.rows.select(only)} == sizes
    assert files.rows.select(["no such row"]) == []


def test_limits_are_of_the_lengths_as_they_are(files):
    group = next(group for group in files.rows.groups() if group.name == "GQA prefill" and group.page_size == 16)
    alike = files.shapes.Row(batch=2, length=100, num_new=30)
    named = dataclasses.replace(alike, ragged=((100, 30), (100, 30)))
    differ = dataclasses.replace(alike, ragged=((40, 40), (160, 20)))
    for figure in (group.operations, group.num_bytes, group.pages_of, group.limit_us):
        assert figure(named) == figure(alike)
    assert group.pages_of(differ) == 3 + 10
    assert group.num_bytes(differ) == 200 * 2 * 8 * 128 * 2 + 60 * 2 * 32 * 128 * 2
    assert group.operations(differ) == 2 * 2 * 32 * 128 * (40 * 41 // 2 + 20 * 140 + 20 * 21 // 2)


def result_of(files, group, batch, peers, triton, plain):
    """A measured row. peers: microseconds of each kernel of the group; None where it was not measured."""
    found = next(each for each in files.rows.groups() if each.name == group and each.page_size == 64)
    row = next(each for each in found.rows if each.batch == batch)
    times = dict(zip([*found.kernel_names, "triton", "plain"], [*peers, triton, plain], strict=True))
    times_us = {way: [us] for way, us in times.items() if us is not None}
    return files.results.RowResult(group=found, row=row, times_us=times_us)


def test_ratios_are_to_the_fastest_peer(files):
    result = result_of(files, "GQA decode", 8, (30, 20), 10, None)
    assert (result.best_peer, result.ratio("triton"), result.ratio("plain")) == (("FlashInfer decode", 20), 0.5, None)
    assert result_of(files, "GQA decode", 8, (None, None), 10, 10).ratio("triton") is None


def test_verdicts_are_geometric_means_and_largest_ratios(files):
    results = [
        result_of(files, "MLA decode, 128 heads", 1, (100, 100, 100), 80, 300),
        result_of(files, "MLA decode, 128 heads", 8, (100, 100, 100), 125, 300),
        result_of(files, "GQA decode", 1, (100, 200), 50, 50),
        result_of(files, "GQA decode", 8, (100, 200), 104, 102),
    ]
    found = {(each.target.name, each.target.way): each for each in files.results.verdicts(results)}
    assert {name: (round(each.geomean, 3), each.met) for name, each in found.items()} == {
        ("MLA decode, 128 heads", "triton"): (1.0, True),
        ("MLA decode, 128 heads, batch 1", "triton"): (0.8, True),
        ("GQA decode", "triton"): (0.721, False),
        ("GQA decode", "plain"): (0.714, True),
    }
    above = {"GQA decode, batch 8, length 4096, page 64": 1.04}
    assert found["GQA decode", "triton"].above == above
    assert found["GQA decode", "triton"].largest == next(iter(above.items()))


def test_every_target_is_of_groups_that_are_there(files):
    names = {group.name for group in files.rows.groups()}
    assert {name for target in files.results.TARGETS for name in target.groups} == names


def test_without_an_nvidia_gpu_it_says_so_and_exits_with_2():
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / "triton_backend.py")],
        cwd=BENCHMARKS.parent, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.startswith("triton_backend.py needs an NVIDIA GPU: ")


def reference(step):
    """In a vendor's place: attention over the step's pages."""
    starts = step.qo_indptr.tolist()

    def attend():
        for i, length in enumerate(step.kv_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            keys, values = (part[step.block_table[i].long()].flatten(0, 1)[:length] for part in (step.k, step.v))
            step.out[rows] = reference_attention(step.spec, step.q[rows], keys, values)[0].to(step.out.dtype)
        return step.out

    return attend


def missing(step):
    raise ImportError("it is not here")


@pytest.fixture
def whole(files, monkeypatch, tmp_path):
    """Runs all of triton_backend.py over two rows, torch_native in its backend's place; gives exit code and JSON."""
    rows = [files.shapes.Row(batch=1, length=20), files.rows.ragged(files.shapes.Row(batch=3, length=9, num_new=2))]
    spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=16)
    group = files.shapes.Group(name="small", spec=spec, page_size=4, rows=rows, kernels={"triton": ["A", "B"]})
    create = anyattn.create_runtime
    platform = usable_device("cpu")
    instead = {"backend": "torch_native"}
    monkeypatch.setattr(anyattn, "create_runtime", lambda spec, **more: create(spec, **{**more, **instead}))
    monkeypatch.setattr(files.measure, "PlainTriton", TorchNativeBackend)
    monkeypatch.setattr(files.measure, "KERNELS", {"A": reference, "B": missing})
    monkeypatch.setattr(files.nvidia, "captured", lambda call: (call, call()))
    monkeypatch.setattr(files.main, "select", lambda only: [(group, rows)])
    monkeypatch.setattr(files.main, "nvidia_gpu", lambda name: platform)
    monkeypatch.setattr(files.main, "TURNS", 1)
    for name in ("synchronize", "set_device", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)

    def run(most):
        target = files.results.Target(name="small", way="triton", groups=("small",), geomean=most)
        monkeypatch.setattr(files.results, "TARGETS", [target])
        file = tmp_path / "figures.json"
        return files.main.main(["--rounds", "2", "--json", str(file)]), json.loads(file.read_text())

    return run


@pytest.mark.parametrize(("most", "code"), [(float("inf"), 0), (0.0, 1)])
def test_the_exit_code_tells_whether_all_targets_are_met(whole, capsys, most, code):
    found, figures = whole(most)
    shown = capsys.readouterr().out
    assert found == code, shown
    assert figures["failures"] == []
    assert [row["row"] for row in figures["rows"]] == ["batch 1, length 20", "2 new after 7, batch 3"]
    for row in figures["rows"]:
        assert set(row["median_us"]) == {"A", "triton", "plain"}
        assert row["best_peer"][0] == "A"
        assert row["reasons"] == {"B": "ImportError: it is not here"}
    assert "B: ImportError: it is not here" in shown
    assert f"{1 - code} of 1 targets met, 0 failures" in shown


def test_a_wrong_result_is_a_failure(whole, monkeypatch):
    monkeypatch.setattr(TorchNativeBackend, "run", lambda self, q, kv, plan, out, **more: out.normal_())
    code, figures = whole(float("inf"))
    assert code == 1
    wrong = "small, batch 1, length 20, page 4, plain: ArithmeticError: WRONG"
    assert any(wrong in failure for failure in figures["failures"])

"""What a step's kernels read, as engines ask for it: refusals, preallocated buffers, and counts of compiled kernels."""

import importlib
import importlib.util
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.errors import ContractError
from anyattn.mem_cache.index_buffers import IndexBuffers
from anyattn.mem_cache.kernels import indices

CPU = torch.device("cpu")


def _load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = _load(Path(__file__).with_name("triton") / "test_indices_triton.py")
kernel_keys = _load(Path(__file__).with_name("kernel_keys.py"))
INPUTS = ("rows", "prefix_lens", "kv_lens", "qo_indptr", "kv_indptr")
SIZES = {"max_seqs": 6, "max_tokens": 70, "max_pages": 200, "max_pages_per_seq": 50}


@settings(max_examples=60)
@given(
    seqs=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), max_size=12),
    page_size=st.integers(1, 70),
    padding=st.integers(0, 3),
    spare=st.integers(0, 9),
    shift=st.integers(0, 3),
    mapped=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_batch_gives_what_the_host_computes(seqs, page_size, padding, spare, shift, mapped, seed):
    prefix_lens, new = [prefix for prefix, _ in seqs], [count for _, count in seqs]
    case = cases.make_case(
        np.random.default_rng(seed), CPU, page_size, prefix_lens, new, padding=padding, spare=spare, shift=shift,
        table_shift=shift, mapped=mapped,
    )  # fmt: skip
    case.check(case.run(indices))


def good_arguments():
    case = cases.make_case(np.random.default_rng(0), CPU, 4, [5, 0], [3, 7], padding=1, spare=2)
    arguments = {"page_table": case.page_table, **case.batch, "page_size": 4, **case.new_outputs(CPU)}
    return arguments | {"mapping": torch.zeros(100, dtype=torch.int32)}


REFUSALS = {
    "page size 0": ({"page_size": 0}, "page_size must be an int of at least 1, not 0"),
    "a float page size": ({"page_size": 4.0}, "page_size must be an int of at least 1, not 4.0"),
    "a flat page table": ({"page_table": torch.zeros(9, dtype=torch.int32)}, r"page_table .* two dimensions .* \[9\]"),
    "an int64 page table": ({"page_table": torch.zeros(9, 9, dtype=torch.int64)}, "page_table .* torch.int64"),
    "a transposed page table": ({"page_table": torch.zeros(9, 8, dtype=torch.int32).T}, "stride is 8"),
    "float rows": ({"rows": torch.zeros(3)}, r"rows must be a torch.int32 tensor .* torch.float32 \[3\]"),
    "too few lengths": ({"kv_lens": torch.zeros(2, dtype=torch.int32)}, r"kv_lens must .* of 3 elements .* \[2\]"),
    "strided prefixes": ({"prefix_lens": torch.zeros(6, dtype=torch.int32)[::2]}, "prefix_lens .* stride is 2"),
    "a short indptr": ({"qo_indptr": torch.zeros(3, dtype=torch.int32)}, "qo_indptr must .* of 4 elements"),
    "int64 page pointers": ({"kv_indptr": torch.zeros(4, dtype=torch.int64)}, "kv_indptr .* torch.int64"),
    "int64 indices": ({"kv_indices": torch.zeros(4, dtype=torch.int64)}, "kv_indices .* torch.int64"),
    "int32 slots": ({"out_slots": torch.zeros(4, dtype=torch.int32)}, "out_slots must be a torch.int64"),
    "positions without slots": ({"positions": torch.zeros(4, dtype=torch.int64)}, r"positions must .* of 12 elements"),
    "a table of other height": ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, "block_table .* with 3 rows"),
    "a mapping of two dimensions": ({"mapping": torch.zeros(2, 4, dtype=torch.int32)}, "mapping .* one dimension"),
    "a mapping elsewhere": ({"mapping": torch.zeros(9, dtype=torch.int32, device="meta")}, "mapping .* on meta"),
}


@pytest.mark.parametrize(("wrong", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_does_not_fit_is_refused_before_anything_is_written(wrong, message):
    arguments = good_arguments() | wrong
    with pytest.raises(ContractError, match=message):
        indices.step_indices(**arguments)
    for name in set(cases.OUTPUTS) - set(wrong):
        assert (arguments[name] == cases.UNREAD).all()


def test_the_arguments_that_the_refusals_spoil_are_accepted_as_they_are():
    indices.step_indices(**good_arguments())


@pytest.mark.parametrize("num_seqs", [-1, 4, torch.tensor([1]), torch.zeros(2, dtype=torch.int32)])
def test_a_number_of_sequences_that_the_lengths_cannot_have_is_refused(num_seqs):
    ints = [torch.zeros(size, dtype=torch.int32) for size in (3, 3, 3, 4, 4, 3)]
    outputs = dict(zip(("kv_lens", "qo_indptr", "kv_indptr", "kv_last_page_len"), ints[2:], strict=True))
    with pytest.raises(ContractError, match="num_seqs must be"):
        indices.step_lengths(*ints[:2], num_seqs, 4, **outputs)
    indices.step_lengths(*ints[:2], 3, 4, **outputs)


def test_new_pages_of_another_dtype_are_refused():
    table, rows, indptr = (torch.zeros(shape, dtype=torch.int32) for shape in ((3, 4), (2,), (3,)))
    with pytest.raises(ContractError, match=r"pages must be a torch.int32 .* torch.int64 \[5\]"):
        indices.write_new_pages(table, rows, rows, indptr, torch.zeros(5, dtype=torch.int64))


def test_empty_buffers_are_a_batch_without_sequences():
    buffers = IndexBuffers.empty("cpu", **SIZES)
    shapes = {name: tuple(getattr(buffers, name).shape) for name in IndexBuffers.__dataclass_fields__}
    assert shapes == {
        "rows": (6,),
        "prefix_lens": (6,),
        "kv_lens": (6,),
        "qo_indptr": (7,),
        "kv_indptr": (7,),
        "kv_last_page_len": (6,),
        "kv_indices": (200,),
        "block_table": (6, 50),
        "out_slots": (70,),
        "positions": (70,),
    }
    for name in shapes:
        assert not getattr(buffers, name).any()
        assert getattr(buffers, name).dtype == (torch.int64 if name in {"out_slots", "positions"} else torch.int32)
    buffers.fill(torch.zeros(0, 0, dtype=torch.int32), 16)
    assert not any(getattr(buffers, name).any() for name in shapes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("value", [0, -3, 2.0])
def test_buffers_without_room_are_refused(size, value):
    with pytest.raises(ContractError, match=f"{size} must be an int of at least 1, not {value}"):
        IndexBuffers.empty("cpu", **SIZES | {size: value})


def test_buffers_of_tensors_that_do_not_fit_one_another_are_refused():
    tensors = {name: getattr(IndexBuffers.empty("cpu", **SIZES), name) for name in IndexBuffers.__dataclass_fields__}
    with pytest.raises(ContractError, match=r"kv_indptr must .* of 7 elements"):
        IndexBuffers(**tensors | {"kv_indptr": tensors["kv_lens"]})


def test_buffers_take_no_page_table_that_they_cannot_read():
    buffers = IndexBuffers.empty("cpu", **SIZES)
    table = torch.zeros(3, 4, dtype=torch.int32)
    with pytest.raises(ContractError, match="page_table is on meta, and these buffers are on cpu"):
        buffers.fill(table.to("meta"), 16)
    with pytest.raises(ContractError, match="page_table must be"):
        buffers.fill(table.long(), 16)
    with pytest.raises(ContractError, match="mapping must be"):
        buffers.fill(table, 16, table)
    with pytest.raises(ContractError, match="page_size must be"):
        buffers.fill(table, 0)


def test_buffers_made_in_inference_mode_are_filled_outside_of_it():
    with torch.inference_mode():
        buffers = IndexBuffers.empty("cpu", **SIZES)
    buffers.fill(torch.zeros(1, 1, dtype=torch.int32), 16)


@settings(max_examples=30)
@given(
    batches=st.lists(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 11)), max_size=6), min_size=1, max_size=3),
    page_size=st.sampled_from([2, 3, 16]),
    mapped=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_buffers_hold_one_batch_after_the_other_and_null_past_its_end(batches, page_size, mapped, seed):
    rng = np.random.default_rng(seed)
    buffers = IndexBuffers.empty("cpu", **SIZES)
    for seqs in batches:
        prefix_lens, new = [prefix for prefix, _ in seqs], [count for _, count in seqs]
        case = cases.make_case(rng, CPU, page_size, prefix_lens, new, padding=6 - len(seqs), mapped=mapped)
        last_page_lens = (case.batch["kv_lens"] - 1) % page_size + 1
        buffers.rows.copy_(case.batch["rows"])
        # Lengths and pointers come from the device's lengths, as they do for an engine that keeps them there.
        indices.step_lengths(
            case.batch["prefix_lens"], case.batch["kv_lens"], torch.tensor([len(seqs)], dtype=torch.int32), page_size,
            kv_lens=buffers.kv_lens, qo_indptr=buffers.qo_indptr, kv_indptr=buffers.kv_indptr,
            kv_last_page_len=buffers.kv_last_page_len,
        )  # fmt: skip
        buffers.prefix_lens.copy_(case.batch["prefix_lens"])
        buffers.fill(case.page_table, page_size, case.mapping)
        for name in set(INPUTS) - {"rows", "prefix_lens"}:
            assert torch.equal(getattr(buffers, name), case.batch[name]), name
        assert torch.equal(buffers.kv_last_page_len, last_page_lens * (buffers.kv_lens > 0))
        for name, expected in case.expected.items():
            filled = tuple(slice(size) for size in expected.shape)
            out = getattr(buffers, name).clone()
            assert torch.equal(out[filled], expected), name
            out[filled] = 0
            assert not out.any(), f"{name} is not null past the batch"


@pytest.mark.parametrize("target", kernel_keys.TARGETS, ids=kernel_keys.TARGET_IDS)
def test_no_batch_no_alignment_and_no_capacity_asks_for_another_compiled_kernel(monkeypatch, target):
    kernel_keys.compiler()
    module = importlib.import_module("anyattn.mem_cache.kernels.indices_triton")
    recorders = kernel_keys.record(monkeypatch, module, target)
    assert set(recorders) == {"step_indices_kernel", "step_lengths_kernel", "write_new_pages_kernel"}
    rng = np.random.default_rng(0)
    for num_seqs, shift, spare in itertools.product((1, 7, 8, 16, 255, 256), (0, 1, 2, 4), (0, 1, 16)):
        lengths = cases.random_lengths(rng, num_seqs, 200, 40)
        lengths[0][0] += 1
        case = cases.make_case(rng, CPU, 16, *lengths, spare=spare, shift=shift, table_shift=shift)
        cases.every_call(module, case, CPU)()
    assert {name: len(recorder.keys) for name, recorder in recorders.items()} == dict.fromkeys(recorders, 1)
    assert len({grid for recorder in recorders.values() for grid in recorder.grids}) > 5


def test_what_tells_launches_of_a_step_apart_tells_compiled_kernels_apart(monkeypatch):
    kernel_keys.compiler()
    module = importlib.import_module("anyattn.mem_cache.kernels.indices_triton")
    recorders = kernel_keys.record(monkeypatch, module, kernel_keys.TARGETS[0])
    for page_size, mapped, shift in itertools.product((1, 2, 16, 30), (False, True), (0, 1)):
        case = cases.make_case(np.random.default_rng(0), CPU, page_size, [9, 2], [1, 8], mapped=mapped, shift=shift)
        outputs = case.new_outputs(CPU)
        for left_out in ((), ("kv_indices",), ("block_table",), ("positions",), ("out_slots", "positions")):
            asked = {name: tensor for name, tensor in outputs.items() if name not in left_out}
            module.step_indices(case.page_table, **case.batch, page_size=page_size, mapping=case.mapping, **asked)
        lengths = [torch.zeros(2 + indptr, dtype=torch.int32) for indptr in (0, 0, 0, 1, 1, 0)]
        into = dict(zip(("kv_lens", "qo_indptr", "kv_indptr", "kv_last_page_len"), lengths[2:], strict=True))
        for num_seqs in (1, 2, torch.ones(1, dtype=torch.int32)):
            module.step_lengths(*lengths[:2], num_seqs, page_size, **into)
    assert {name: len(recorders[name].variants) for name in recorders} == {
        "step_indices_kernel": 4 * 2 * 5,
        "step_lengths_kernel": 4 * 2,
        "write_new_pages_kernel": 0,
    }
    assert all(len(keys) == 1 for recorder in recorders.values() for keys in recorder.variants.values())


def test_a_kernel_that_depends_on_sizes_and_alignments_is_found(monkeypatch):
    triton = kernel_keys.compiler()
    module = importlib.import_module("anyattn.mem_cache.kernels.indices_triton")
    recorder = kernel_keys.BoundRecorder(triton.jit(module.write_new_pages_kernel.fn), kernel_keys.TARGETS[0])
    monkeypatch.setattr(module, "_write_new_pages", recorder)
    for num_pages, shift in itertools.product((1, 5, 16), (0, 1)):
        table, zeros = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        pages = torch.zeros(num_pages + shift, dtype=torch.int32)[shift:]
        module.write_new_pages(table, zeros[:2], zeros[:2], zeros, pages)
    assert len(recorder.keys) == len(*recorder.variants.values()) == 6


def test_long_lists_move_16_bytes_at_a_time_without_known_alignment(monkeypatch, tmp_path):
    compiler = kernel_keys.compiler()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    listed = _load(Path(__file__).with_name("offline_kernels") / "indices.py")
    kernel, types, constants = listed.KERNELS[2]
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    ptx = compiler.compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    assert "ld.global.v4" in ptx
    assert "st.global.v4" in ptx


def test_nothing_is_launched_where_there_is_nothing_to_write(monkeypatch):
    pytest.importorskip("triton")
    module = importlib.import_module("anyattn.mem_cache.kernels.indices_triton")
    monkeypatch.setattr(module, "_step_indices", None)
    monkeypatch.setattr(module, "_write_new_pages", None)
    case = cases.make_case(np.random.default_rng(0), CPU, 16, [], [])
    case.run(module)
    none = torch.zeros(0, dtype=torch.int32)
    module.write_new_pages(case.page_table, none, none, case.batch["kv_indptr"], none)

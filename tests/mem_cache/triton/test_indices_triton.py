"""Slots, CSR and block table built on the device, by Triton and by torch, against the host's arithmetic."""

import importlib
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from anyattn.mem_cache import indices as host

INT32_MAX = 2**31 - 1
UNREAD = -(2**30)  # stands where nothing may be read: as a page id it shows in the output, and no mapping has it
OUTPUTS = ("kv_indices", "block_table", "out_slots", "positions")


@pytest.fixture(params=["triton", "torch"])
def kernels(request):
    return importlib.import_module(f"anyattn.mem_cache.kernels.indices_{request.param}")


def int32s(device, values, *, padding=0, pad_with=UNREAD, shift=1):
    """values, padded, on the device; what lies before and behind them in memory is not to be read."""
    memory = np.full(shift + len(values) + padding + 8, UNREAD, dtype=np.int32)
    memory[shift:-8] = np.pad(values, (0, padding), constant_values=pad_with)
    return torch.from_numpy(memory).to(device)[shift:-8]


@dataclass
class Case:
    """A page table, a batch of some of its rows, and what the host makes of them."""

    page_table: torch.Tensor
    batch: dict
    expected: dict
    page_size: int
    mapping: torch.Tensor | None
    shift: int

    def new_outputs(self, device):
        """Outputs filled with garbage, `shift` elements into their memory, the table's rows farther apart than wide."""
        outputs = {}
        for name, value in self.expected.items():
            spare = 3 if value.ndim == 2 else 0
            shape = (*value.shape[:-1], value.shape[-1] + spare)
            memory = torch.full((self.shift + int(np.prod(shape)),), UNREAD, dtype=value.dtype, device=device)
            outputs[name] = memory[self.shift :].view(shape)[..., : value.shape[-1]]
        return outputs

    def run(self, kernels, names=OUTPUTS):
        outputs = {name: out for name, out in self.new_outputs(self.page_table.device).items() if name in names}
        kernels.step_indices(self.page_table, **self.batch, page_size=self.page_size, **outputs, mapping=self.mapping)
        return outputs

    def check(self, outputs):
        for name, out in outputs.items():
            torch.testing.assert_close(
                out.cpu(), self.expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def make_case(
    rng, device, page_size, prefix_lens, new, *, padding=0, spare=0, shift=0, table_shift=0, mapped=False, big_ids=False
):
    """prefix_lens, new: of each sequence. padding: rows of padding after them. spare: room past the end of each output.

    shift: where outputs begin, in elements past an aligned address; table_shift the same for the page table.
    """
    prefix_lens, new = (np.array(values, dtype=np.int64) for values in (prefix_lens, new))
    lengths = prefix_lens + new
    num_pages = -(-lengths // page_size)
    num_seqs, columns = lengths.size, int(num_pages.max(initial=0))

    total = int(num_pages.sum())
    ids = rng.permutation(total).astype(np.int32) + 1
    if big_ids:
        ids = INT32_MAX - ids + 1
    mapping = None
    if mapped:
        mapping = rng.permutation(total + 1).astype(np.int32)
        mapping[ids[rng.random(total) < 0.2]] = 0  # pages whose window page was let go
    row_ids = rng.permutation(num_seqs + 3)[:num_seqs]
    memory = np.full((num_seqs + 3) * (columns + spare + table_shift % 4) + table_shift, UNREAD, dtype=np.int32)
    table = memory[table_shift:].reshape(num_seqs + 3, -1)[:, : columns + spare]
    kv_indptr = host.indptr(num_pages)
    for row, start, stop in zip(row_ids, kv_indptr, kv_indptr[1:], strict=False):
        table[row, : stop - start] = ids[start:stop]

    seen = np.where(table > 0, table, 0) if mapping is None else mapping[np.where(table > 0, table, 0)]
    rows = np.where(np.arange(columns) < num_pages[:, None], seen[row_ids, :columns], 0)
    owner, positions = host.token_positions(prefix_lens, lengths)
    expected = {
        "kv_indices": np.pad(host.kv_indices(rows, num_pages), (0, spare)),
        "block_table": np.pad(rows, ((0, padding), (0, spare))),
        "out_slots": np.pad(host.slots(rows, owner, positions, page_size), (0, spare)),
        "positions": np.pad(positions, (0, spare)),
    }

    def to_device(values, pad_with=0):
        return int32s(device, values, padding=padding, pad_with=pad_with, shift=table_shift)

    on_device = torch.from_numpy(memory).to(device)[table_shift:].view(num_seqs + 3, -1)[:, : columns + spare]
    qo_indptr = host.indptr(new)
    return Case(
        page_table=on_device,
        batch={
            "rows": to_device(row_ids, UNREAD),
            "kv_lens": to_device(lengths),
            "prefix_lens": to_device(prefix_lens, UNREAD),
            "qo_indptr": to_device(qo_indptr, int(qo_indptr[-1])),
            "kv_indptr": to_device(kv_indptr, int(kv_indptr[-1])),
        },
        expected={name: torch.from_numpy(value) for name, value in expected.items()},
        page_size=page_size,
        mapping=None if mapping is None else torch.from_numpy(mapping).to(device),
        shift=shift,
    )


def random_lengths(rng, num_seqs, most_prefix, most_new):
    """Prefixes and new tokens; a third of the sequences has none of the one, a third none of the other."""
    prefix = rng.integers(1, most_prefix + 1, num_seqs) * (rng.random(num_seqs) > 1 / 3)
    return prefix, rng.integers(1, most_new + 1, num_seqs) * (rng.random(num_seqs) > 1 / 3)


@pytest.mark.parametrize("mapped", [False, True], ids=["own ids", "mapped ids"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_every_output_is_what_the_host_computes(device, kernels, rng, page_size, mapped):
    lengths = random_lengths(rng, 11, 200, 90)
    case = make_case(rng, device, page_size, *lengths, padding=3, spare=9, shift=1, table_shift=3, mapped=mapped)
    case.check(case.run(kernels))


@pytest.mark.parametrize("names", [(name,) for name in OUTPUTS] + [()], ids=[*OUTPUTS, "none"])
def test_outputs_that_are_not_given_are_left_out(device, kernels, rng, names):
    case = make_case(rng, device, 4, *random_lengths(rng, 5, 40, 20), padding=1, spare=2)
    case.check(case.run(kernels, names))


@pytest.mark.parametrize(("shift", "table_shift"), [(0, 0), (0, 1), (3, 0), (2, 2)])
@pytest.mark.parametrize("mapped", [False, True], ids=["own ids", "mapped ids"])
def test_sequences_of_many_blocks_are_copied_whole(device, kernels, rng, shift, table_shift, mapped):
    # They end at a block's end, one before it, one after it, and anywhere.
    lengths = [1024, 1023, 2050, 0, 3000], [0, 0, 0, 0, 1]
    case = make_case(rng, device, 1, *lengths, spare=1500, shift=shift, table_shift=table_shift, mapped=mapped)
    case.check(case.run(kernels, ("kv_indices",)))


@pytest.mark.parametrize("capacity", [0, 700, 1500])
def test_outputs_that_are_too_small_are_filled_and_nothing_behind_them_is_written(device, kernels, rng, capacity):
    case = make_case(rng, device, 1, [1900, 900], [600, 900])
    memory = {name: torch.full_like(case.expected[name], UNREAD, device=device) for name in ("kv_indices", "out_slots")}
    outputs = {name: out[:capacity] for name, out in memory.items()}
    kernels.step_indices(case.page_table, **case.batch, page_size=1, **outputs)
    for name, out in memory.items():
        assert torch.equal(out[:capacity].cpu(), case.expected[name][:capacity]), name
        assert (out[capacity:] == UNREAD).all(), name


@pytest.mark.parametrize(("num_seqs", "padding"), [(506, 5), (507, 5), (1700, 5), (1705, 0)])
def test_more_sequences_than_one_look_takes_in_are_found(device, kernels, rng, num_seqs, padding):
    # One look takes in 511. Of 1705 it looks at every fourth, and the last one is alone behind the last of these.
    prefix_lens, new = random_lengths(rng, num_seqs, 3, 2)
    new[-1] += 2
    case = make_case(rng, device, 2, prefix_lens, new, padding=padding, spare=3 * (padding > 0))
    case.check(case.run(kernels, ("kv_indices", "out_slots", "positions")))


@pytest.mark.parametrize("page_size", [1, 64])
def test_page_ids_up_to_two_to_the_31_and_slots_past_it_are_right(device, kernels, rng, page_size):
    case = make_case(rng, device, page_size, [0, 300, 0], [130, 1, 70], big_ids=True, padding=1, spare=2)
    assert case.expected["kv_indices"].max() == INT32_MAX
    if page_size > 1:
        assert case.expected["out_slots"].max() >= 2**36
    case.check(case.run(kernels))


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("spare", [0, 6])
def test_a_batch_without_sequences_gives_null_pages_alone(device, kernels, rng, padding, spare):
    case = make_case(rng, device, 16, [], [], padding=padding, spare=spare)
    case.check(case.run(kernels))


def test_sequences_without_tokens_give_null_pages_alone(device, kernels, rng):
    case = make_case(rng, device, 16, [0, 0], [0, 0], spare=5)
    case.check(case.run(kernels))


@pytest.mark.parametrize("on_device", [True, False], ids=["count on the device", "count on the host"])
@pytest.mark.parametrize(("num_seqs", "max_seqs"), [(0, 0), (0, 4), (5, 8), (255, 255), (1024, 1100), (2500, 2500)])
def test_lengths_give_the_hosts_indptr_and_last_page_lengths(device, kernels, rng, num_seqs, max_seqs, on_device):
    page_size = int(rng.choice([1, 7, 16, 64]))
    prefix_lens, new = random_lengths(rng, num_seqs, 200, 90)
    lengths, padding = prefix_lens + new, max_seqs - num_seqs

    expected = {
        "kv_lens": np.pad(lengths, (0, padding)),
        "qo_indptr": np.pad(host.indptr(new), (0, padding), mode="edge"),
        "kv_indptr": np.pad(host.indptr(-(-lengths // page_size)), (0, padding), mode="edge"),
        "kv_last_page_len": np.pad(host.last_page_len(lengths, page_size), (0, padding)),
    }
    outputs = {name: torch.full((v.size,), UNREAD, dtype=torch.int32, device=device) for name, v in expected.items()}
    count = torch.tensor([num_seqs], dtype=torch.int32, device=device) if on_device else num_seqs
    before, after = (int32s(device, values, padding=padding) for values in (prefix_lens, lengths))
    kernels.step_lengths(before, after, count, page_size, **outputs)
    for name, values in expected.items():
        assert outputs[name].cpu().tolist() == values.tolist(), name


@pytest.mark.parametrize("num_seqs", [0, 1, 9, 600])
def test_new_pages_land_behind_the_old_ones_and_nowhere_else(device, kernels, rng, num_seqs):
    padding, columns = 3, 40
    table = rng.integers(1, INT32_MAX, (num_seqs + 2, columns)).astype(np.int32)
    rows = rng.permutation(num_seqs + 2)[:num_seqs]
    first_columns = rng.integers(0, columns // 2, num_seqs)
    counts = rng.integers(1, columns // 2, num_seqs) * (rng.random(num_seqs) > 0.4)
    indptr = host.indptr(counts)
    pages = rng.integers(1, INT32_MAX, int(indptr[-1]) + 7).astype(np.int32)
    expected = table.copy()
    for row, column, start, stop in zip(rows, first_columns, indptr, indptr[1:], strict=False):
        expected[row, column : column + stop - start] = pages[start:stop]

    memory = torch.from_numpy(np.pad(table, ((0, 0), (1, 2)), constant_values=UNREAD)).to(device)
    kernels.write_new_pages(
        memory[:, 1:-2],
        int32s(device, rows, padding=padding),
        int32s(device, first_columns, padding=padding),
        int32s(device, indptr, padding=padding, pad_with=indptr[-1]),
        torch.from_numpy(pages).to(device),
    )
    assert (memory[:, 1:-2].cpu().numpy() == expected).all()
    assert (memory[:, :1] == UNREAD).all()
    assert (memory[:, -2:] == UNREAD).all()


def test_new_pages_that_are_fewer_than_said_are_all_that_is_written(device, kernels):
    table = torch.zeros(2, 8, dtype=torch.int32, device=device)
    pages = int32s(device, [5, 6, 7])
    kernels.write_new_pages(table, *(int32s(device, values) for values in ([1, 0], [2, 0], [0, 2, 6])), pages)
    assert table.tolist() == [[7, *[0] * 7], [0, 0, 5, 6, 0, 0, 0, 0]]


def test_without_new_pages_the_page_table_stays_as_it_is(device, kernels):
    table = torch.arange(12, dtype=torch.int32, device=device).view(3, 4)
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    for pages in (torch.full((5,), UNREAD, dtype=torch.int32, device=device), zeros[:0]):
        kernels.write_new_pages(table, zeros[:2], zeros[:2], zeros, pages)
        assert table.flatten().tolist() == list(range(12))


def test_page_tables_of_more_than_two_to_the_31_entries_are_read_and_written_right(device, kernels):
    stride = 2**30
    try:  # 8 GiB, of which two pages are touched
        memory = torch.empty(2 * stride + 8, dtype=torch.int32, device=device)
    except RuntimeError as error:
        pytest.skip(f"needs 8 GiB of address space on {device}: {error}")
    table = memory.as_strided((3, 8), (stride, 1))

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    kernels.write_new_pages(table, ints(2, 0), ints(0, 0), ints(0, 3, 4), ints(7, 5, 6, 3))
    assert table[2, :3].tolist() == [7, 5, 6]
    out = torch.zeros(4, dtype=torch.int32, device=device)
    kernels.step_indices(
        table, ints(2, 0), ints(48, 16), ints(48, 16), ints(0, 0, 0), ints(0, 3, 4), 16, kv_indices=out
    )
    assert out.tolist() == [7, 5, 6, 3]


def test_where_triton_runs_it_is_what_the_room_uses(device, rng):
    module = importlib.import_module("anyattn.mem_cache.kernels.indices")
    assert module._kernels(device).__name__ == "anyattn.mem_cache.kernels.indices_triton"
    case = make_case(rng, device, 16, *random_lengths(rng, 5, 40, 20), padding=1)
    case.check(case.run(module))


@pytest.fixture
def gpu(device):
    """The device, where kernels are compiled for it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs a GPU: the interpreter compiles nothing and captures no graph")
    return device


def compiled(module):
    kernels = (module.step_indices_kernel, module.step_lengths_kernel, module.write_new_pages_kernel)
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


def every_call(kernels, case, device):
    """A function that calls all three functions, with everything that they need allocated beforehand."""
    outputs, batch = case.new_outputs(device), case.batch
    count = torch.tensor([1], dtype=torch.int32, device=device)
    lengths = {name: torch.empty_like(batch[name]) for name in ("kv_lens", "qo_indptr", "kv_indptr")}
    last, zeros = torch.empty_like(batch["kv_lens"]), torch.zeros_like(batch["kv_lens"])
    table = case.page_table.clone()

    def run():
        kernels.step_indices(case.page_table, **batch, page_size=case.page_size, **outputs, mapping=case.mapping)
        kernels.step_lengths(
            batch["prefix_lens"], batch["kv_lens"], count, case.page_size, **lengths, kv_last_page_len=last
        )
        kernels.write_new_pages(table, batch["rows"], zeros, batch["kv_indptr"], outputs["kv_indices"])

    return run


def test_no_batch_and_no_alignment_compiles_another_kernel(gpu, rng):
    module = importlib.import_module("anyattn.mem_cache.kernels.indices_triton")
    every_call(module, make_case(rng, gpu, 16, *random_lengths(rng, 5, 300, 40)), gpu)()
    before = compiled(module)
    assert before >= 3
    for num_seqs in (1, 7, 8, 16, 255, 256):
        for shift, table_shift in ((0, 0), (1, 0), (0, 3), (3, 2), (4, 4)):
            prefix, new = random_lengths(rng, num_seqs, int(rng.choice([1, 16, 3000])), 40)
            prefix[0] += 1
            case = make_case(
                rng, gpu, 16, prefix, new, shift=shift, table_shift=table_shift, spare=int(rng.integers(9))
            )
            every_call(module, case, gpu)()
            case.check(case.run(module))
    assert compiled(module) == before


def test_a_captured_graph_serves_other_batches_of_the_same_capacity(gpu, kernels, rng):
    if gpu.type != "cuda":
        pytest.skip(f"needs graphs of torch.cuda, and the device is {gpu}")
    sizes = (4, 500, 60)
    first, second = (make_case(rng, gpu, 4, *random_lengths(rng, *sizes), mapped=True) for _ in range(2))
    # Capacities that hold both batches, with what is left over as padding.
    padded = {
        name: max(first.expected[name].shape, second.expected[name].shape) for name in ("kv_indices", "out_slots")
    }
    columns = max(case.page_table.shape[1] for case in (first, second))
    page_table = torch.zeros(7, columns, dtype=torch.int32, device=gpu)
    mapping = torch.zeros(max(len(case.mapping) for case in (first, second)), dtype=torch.int32, device=gpu)
    batch = {name: torch.zeros_like(value) for name, value in first.batch.items()}
    outputs = {
        "kv_indices": torch.empty(padded["kv_indices"], dtype=torch.int32, device=gpu),
        "block_table": torch.empty(4, columns, dtype=torch.int32, device=gpu),
        "out_slots": torch.empty(padded["out_slots"], dtype=torch.int64, device=gpu),
        "positions": torch.empty(padded["out_slots"], dtype=torch.int64, device=gpu),
    }

    def load(case):
        page_table[:, : case.page_table.shape[1]] = case.page_table
        mapping[: len(case.mapping)] = case.mapping
        for name, value in case.batch.items():
            batch[name].copy_(value)

    def run():
        kernels.step_indices(page_table, **batch, page_size=4, **outputs, mapping=mapping)

    load(first)
    run()  # compiles, which no capture may
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for case in (second, first):
        load(case)
        for out in outputs.values():
            out.fill_(UNREAD)
        graph.replay()
        for name, expected in case.expected.items():
            filled = tuple(slice(size) for size in expected.shape)
            assert torch.equal(outputs[name][filled].cpu(), expected), name
            assert int(outputs[name].sum()) == int(expected.sum()), f"{name} is not null past the batch"


def test_no_call_waits_for_the_device(gpu, kernels, rng):
    if gpu.type != "cuda":
        pytest.skip(f"needs the sync debug mode of torch.cuda, and the device is {gpu}")
    run = every_call(kernels, make_case(rng, gpu, 16, *random_lengths(rng, 8, 300, 40), padding=2, mapped=True), gpu)
    run()  # compiles, and that may wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_triton_allocates_nothing_on_the_device(gpu, rng):
    if gpu.type != "cuda":
        pytest.skip(f"needs the allocation counts of torch.cuda, and the device is {gpu}")
    module = importlib.import_module("anyattn.mem_cache.kernels.indices")
    run = every_call(module, make_case(rng, gpu, 16, *random_lengths(rng, 8, 300, 40), padding=2, mapped=True), gpu)
    run()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before

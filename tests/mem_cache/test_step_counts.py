"""What a step costs, in what can be counted: tensors allocated, waits for the device, kernels compiled, memory kept."""

import importlib
import itertools

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import anyattn
from anyattn.attention.batch import Batch
from anyattn.mem_cache import device_table, step_view
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.windows import WindowPages

READS = {
    "_local_scalar_dense", "_unique2", "bincount", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "repeat_interleave", "unique_consecutive", "unique_dim",
}  # fmt: skip
"""Operators whose result, or its size, is only known when the device is done."""


class Operators(TorchDispatchMode):
    """names: of the operators that ran. allocating: of those, once for each tensor that has memory of its own.

    reading: of those that make the host wait for the device, or would if the tensors were on one.
    """

    def __init__(self):
        super().__init__()
        self.names, self.allocating, self.reading = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket).removeprefix("aten.")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made_tensors = [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.Tensor)]
        known = {id_of_memory(tensor) for tensor in given}
        self.names.append(name)
        self.allocating += [name for tensor in made_tensors if id_of_memory(tensor) not in known]
        by_mask = name.startswith(("index", "_index")) and any(tensor.dtype == torch.bool for tensor in given[1:])
        to_host = any(tensor.device.type == "cpu" for tensor in made_tensors) and any(
            tensor.device.type != "cpu" for tensor in given
        )
        if name in READS or by_mask or to_host:
            self.reading.append(name)
        return made


def id_of_memory(tensor):
    return tensor.untyped_storage()._cdata


def new_table(device="cpu", *, num_pages=6000, page_size=16, windows=()):
    """Page ids are in random order, as after some use."""
    allocator = PagedAllocator(num_pages, page_size)
    allocator.free(np.random.permutation(allocator.alloc(num_pages)))
    made = [
        WindowPages(window, PagedAllocator(num_pages, page_size), num_pages=num_pages, page_size=page_size)
        for window in windows
    ]
    return PageTable(allocator, page_size, device=device, windows=made)


# By name: what of a step's view is asked for, by how many tokens it grows, the table's windows, and the most tensors
# that may be allocated on a CPU. There the step's own arrays are the host's memory; a batch is four outputs and what
# vectorised torch needs to compute them: less than 60 in all, and 70 for a window, whose pages are looked up once more.
STEPS = {
    "slots of a decode": (lambda view: view.out_slots(), 1, (), 0),
    "slots of an extend": (lambda view: view.out_slots(), 5, (), 30),
    "tensors": (lambda view: view.tensors(), 1, (), 0),
    "tensors with a window": (lambda view: view.tensors(), 1, (24,), 0),
    "batch": (lambda view: Batch.from_view(view, view.tensors()), 1, (), 60),
    "batch of an extend": (lambda view: Batch.from_view(view, view.tensors()), 5, (), 60),
    "batch with a window": (lambda view: Batch.from_view(view, view.tensors()), 1, (24,), 130),
}


def steps_of_table(name, num_seqs, device="cpu"):
    """Makes one step after the other, of random lengths; each call is one. The table does not have to grow for them."""
    ask, num_new, windows, _ = STEPS[name]
    table = new_table(device, windows=windows)
    table.free([seq for seq in table.new_sequences(1) if table.extend([seq], 1000)])
    seqs = table.new_sequences(num_seqs)
    table.extend(seqs, np.random.randint(1, 40, num_seqs)).tensors()
    return lambda: ask(table.extend(seqs, num_new))


def steps_of_runtime(num_seqs):
    spec = anyattn.AttentionSpec(num_qo_heads=2, num_kv_heads=1, head_dim=8, dtype="float32")
    runtime = anyattn.create_runtime(spec, num_layers=1, num_pages=4000, page_size=16, device="cpu")
    seqs = runtime.new_sequences(num_seqs)
    runtime.extend(seqs, np.random.randint(1, 40, num_seqs))
    return lambda: runtime.extend(seqs, [1] * num_seqs)


def counted(make_steps, sizes=(4, 256), num_steps=40):
    """The operators of one step, which have to be the same in every one of many, at every size of the batch."""
    seen = []
    for num_seqs in sizes:
        step = make_steps(num_seqs)
        for _ in range(num_steps):
            with Operators() as operators:
                step()
            seen.append(operators)
    first = seen[0]
    assert all(operators.names == first.names for operators in seen)
    assert all(operators.allocating == first.allocating for operators in seen)
    return first


@pytest.mark.parametrize("name", STEPS)
def test_a_step_allocates_as_many_tensors_for_256_sequences_as_for_4(name):
    operators = counted(lambda num_seqs: steps_of_table(name, num_seqs))
    assert len(operators.allocating) <= STEPS[name][3]
    assert operators.reading == []


def test_a_runtime_s_step_allocates_what_its_batch_does():
    operators = counted(steps_of_runtime)
    assert len(operators.allocating) <= 60
    assert operators.reading == []


def test_what_allocates_and_what_waits_is_counted():
    numbers, mask = torch.arange(6), torch.ones(6, dtype=torch.bool)
    waits = {
        "_local_scalar_dense": lambda: numbers[2].item(),
        "nonzero": lambda: mask.nonzero(),
        "index": lambda: numbers[mask],
        "masked_select": lambda: numbers.masked_select(mask),
        "equal": lambda: torch.equal(numbers, numbers),
        "repeat_interleave": lambda: numbers.repeat_interleave(numbers),
        "_unique2": lambda: numbers.unique(),
    }
    for name, call in waits.items():
        with Operators() as operators:
            call()
        assert name in operators.reading
    with Operators() as operators:
        numbers.view(2, 3)[0].add_(1)
        numbers[mask.long()] + torch.empty(6)
    assert operators.allocating == ["_to_copy", "index", "empty", "add"]
    assert operators.reading == []


@pytest.fixture
def meta(monkeypatch):
    """A device without numbers, so that whoever reads one fails; pinned memory, which needs a GPU, is left out."""

    def send(arrays, device, *, wide=0):
        return [tensor.to(device) for tensor in original(arrays, torch.device("cpu"), wide=wide)]

    original = device_table.to_device
    monkeypatch.setattr(device_table, "to_device", send)
    monkeypatch.setattr(step_view, "to_device", send)
    return "meta"


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_a_device_reads_nothing_back(name, meta):
    step = steps_of_table(name, 7, meta)
    for _ in range(40):
        with Operators() as operators:
            step()
        assert operators.reading == []


def test_reading_back_is_an_error_on_the_device_of_these_tests(meta):
    view = new_table(meta).extend([], 1)
    with pytest.raises((NotImplementedError, RuntimeError), match="meta"):
        view.tensors().qo_indptr[0].item()


@pytest.fixture(params=["host's memory", "a copy"])
def table_of_4(request, monkeypatch):
    """A table with a window, which kernels read in place, or in a copy that follows it, as on a device."""
    table = new_table(num_pages=100, page_size=1, windows=(3,))
    if request.param == "a copy":

        def send(arrays, device, *, wide=0):
            return [tensor.clone() for tensor in original(arrays, device, wide=wide)]

        original = device_table.to_device
        monkeypatch.setattr(device_table, "to_device", send)
        monkeypatch.setattr(step_view, "to_device", send)
        table.device_table._follows = True
    return table


def arrays_in(owner):
    """numpy arrays and tensors that an object's attributes hold, in lists and tuples too."""
    waiting = [getattr(owner, "__dict__", owner)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (np.ndarray, torch.Tensor)):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, (list, tuple)):
            waiting += value


def test_steps_that_only_ask_for_slots_leave_nothing_behind(table_of_4):
    table, steps, most = table_of_4, 0, 0
    seqs = table.new_sequences(4)
    table.extend(seqs, 20).tensors()  # from here on there is a copy that would have to follow
    table.free(seqs)
    while steps < 5000:
        seqs = table.new_sequences(4)
        num_steps = int(np.random.randint(1, 20))
        for _ in range(num_steps):
            table.extend(seqs, 1).out_slots()
        table.free(seqs)
        steps += num_steps
        bound = 2 * (table._pages.size + sum(window.page_of.size for window in table.windows))
        kept = [*arrays_in(table.device_table), *(a for window in table.windows for a in arrays_in(window.changed))]
        most = max(most, len(kept))
        assert sum(array.size if isinstance(array, np.ndarray) else array.numel() for array in kept) <= 2 * bound
    assert most <= bound
    seqs = table.new_sequences(4)
    sent = table.extend(seqs, [9, 0, 2, 30]).tensors()
    for row, seq in zip(sent.rows.tolist(), seqs, strict=True):
        pages = table.pages(seq)
        assert sent.page_table[row, : pages.size].tolist() == pages.tolist()
        assert sent.mappings[0][pages].tolist() == table.windows[0].page_of[pages].tolist()


# On a GPU


def compiled_kernels():
    """How many kernels of mem_cache Triton has compiled, and how many compiled ones our launches know."""
    from triton.runtime.jit import JITFunction

    from anyattn.mem_cache.kernels.launch import BoundKernel

    compiled, known = 0, 0
    for topic in ("books", "indices", "pages", "store"):
        for value in vars(importlib.import_module(f"anyattn.mem_cache.kernels.{topic}_triton")).values():
            if isinstance(value, JITFunction):
                compiled += sum(len(of_device[0]) for of_device in value.device_caches.values())
            if isinstance(value, BoundKernel):
                known += len(value._compiled)
    return compiled, known


def steps_on(device, num_seqs, windows):
    """An extend by random lengths and 50 decode steps, in which everything of the view is asked for."""
    table = new_table(device, num_pages=20_000, windows=windows)
    seqs = table.new_sequences(num_seqs)
    for num_new in (np.random.randint(0, 100, num_seqs), *[1] * 50):
        view = table.extend(seqs, num_new)
        view.out_slots()
        Batch.from_view(view, view.tensors())
        yield table
    table.free(seqs)


@pytest.fixture
def no_syncs():
    """Switches torch's check on and off: an operator that waits for the GPU is then an error."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.parametrize("windows", [(), (24,)], ids=["full pages", "a window too"])
def test_steps_on_a_gpu_wait_for_nothing_and_compile_nothing_anew(no_syncs, windows):
    for _ in steps_on("cuda", 3, windows):  # whatever is compiled at all is now
        pass
    torch.cuda.synchronize()
    before = compiled_kernels()
    assert min(before) > 0
    no_syncs()
    for num_seqs in (1, 2, 4, 16, 17, 255, 256):
        for _ in steps_on("cuda", num_seqs, windows):
            pass
    assert compiled_kernels() == before


@pytest.mark.cuda
def test_the_check_for_waits_on_a_gpu_finds_them(no_syncs):
    numbers = torch.arange(3, device="cuda")
    no_syncs()
    with pytest.raises(RuntimeError, match="synchroniz"):
        numbers[0].item()


ON_GPU = {
    # A pinned buffer and its copy on the GPU; for a batch the outputs too, and nothing else.
    "slots of a decode": 2,
    "slots of an extend": 2 + 1,
    "tensors": 2,
    "tensors with a window": 2,
    "batch": 2 + 4,
    "batch of an extend": 2 + 4,
    "batch with a window": 2 + 2 * 4,
}


@pytest.mark.cuda
@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_a_gpu_allocates_a_buffer_and_its_results(name):
    for num_seqs, _ in itertools.product((4, 256), range(2)):
        step = steps_of_table(name, num_seqs, "cuda")
        step()
        for _ in range(20):
            with Operators() as operators:
                step()
            assert len(operators.allocating) <= ON_GPU[name], operators.allocating
            assert operators.reading == []

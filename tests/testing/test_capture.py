"""The emulation of device graphs repeats what a function did, and refuses what no graph could hold."""

import numpy as np
import pytest
import torch

from anyattn import ContractError
from anyattn.testing.graphs.capture import capture

CPU = torch.device("cpu")


def captured(function):
    """The result's tensors, and what replays it."""
    return capture(function, CPU)


def test_a_replay_reads_what_the_inputs_hold_then_and_writes_into_the_same_results():
    x = torch.arange(4.0)
    result, replay = captured(lambda: (x * 2 + 1).sum())
    address = result.data_ptr()
    x.copy_(torch.tensor([1.0, 1.0, 1.0, 2.0]))
    replay()
    assert (result.item(), result.data_ptr()) == (14.0, address)
    x.zero_()
    replay()
    assert result.item() == 4.0


def test_what_python_computed_at_the_capture_is_in_the_graph_for_good():
    x, host = torch.ones(3), {"factor": 2.0, "array": np.array([1.0, 2.0, 3.0], dtype=np.float32)}
    result, replay = captured(lambda: x * host["factor"] + torch.from_numpy(host["array"]))
    host["factor"] = 5.0
    host["array"][:] = 0.0
    x.fill_(10.0)
    replay()
    assert result.tolist() == [21.0, 22.0, 23.0]


def test_a_number_written_into_a_tensor_at_the_capture_is_written_again_in_each_replay():
    x = torch.ones(1)

    def count():
        total = torch.tensor([1.0])
        return total.add_(x)

    result, replay = captured(count)
    replay()
    replay()
    assert result.item() == 2.0


def test_in_place_operators_and_out_arguments_change_the_same_tensors_again():
    x, total, written = torch.ones(2), torch.zeros(2), torch.empty(2)

    def function():
        total.add_(x)
        torch.mul(total, 3.0, out=written)
        total[:1] += 10.0
        written.index_copy_(0, torch.tensor([1]), x[:1])

    _, replay = captured(function)
    assert total.tolist() == [22.0, 2.0]  # by the warm-up and the capture
    replay()
    assert total.tolist() == [33.0, 3.0]
    assert written.tolist() == [69.0, 1.0]


def test_views_see_what_replays_write_and_results_that_are_views_stay_views():
    x = torch.zeros(2, 3)

    def function():
        doubled = x * 2
        return doubled.t().unsqueeze(0)[:, 1:], x.view(-1), doubled

    (view, alias, whole), replay = captured(function)
    x.copy_(torch.arange(6.0).view(2, 3))
    replay()
    assert view.tolist() == [[[2.0, 8.0], [4.0, 10.0]]]
    assert view.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert alias.data_ptr() == x.data_ptr()


def test_operators_that_change_a_tensors_shape_in_place_are_not_made_twice():
    x = torch.zeros(3)

    def function():
        y = x + 1
        before = y * 2
        y.unsqueeze_(0).t_()
        return before, y * 3

    (before, after), replay = captured(function)
    x.fill_(1.0)
    replay()
    assert before.tolist() == [4.0, 4.0, 4.0]
    assert after.tolist() == [[6.0], [6.0], [6.0]]


def test_of_several_results_those_that_alias_inputs_and_those_that_are_new_are_told_apart():
    x, values, places = torch.zeros(2, 3), torch.empty(2), torch.empty(2, dtype=torch.int64)

    def function():
        torch.max(x, dim=1, out=(values, places))
        return x.max(dim=1), x.split([1, 2], dim=1), x.sort(dim=1)

    (fresh, parts, (in_order, order)), replay = captured(function)
    x.copy_(torch.tensor([[3.0, 1.0, 2.0], [1.0, 2.0, 3.0]]))
    replay()
    assert (values.tolist(), places.tolist()) == ([3.0, 3.0], [0, 2])
    assert (fresh.values.tolist(), fresh.indices.tolist()) == ([3.0, 3.0], [0, 2])
    assert [part.tolist() for part in parts] == [[[3.0], [1.0]], [[1.0, 2.0], [2.0, 3.0]]]
    assert in_order[0].tolist() == [1.0, 2.0, 3.0]
    assert order[0].tolist() == [1, 2, 0]


def test_random_operators_give_other_numbers_in_each_replay():
    result, replay = captured(lambda: torch.rand(64))
    first = result.clone()
    replay()
    assert not torch.equal(result, first)
    assert ((result >= 0) & (result < 1)).all()


def test_new_memory_holds_anything_and_not_what_it_was_last_filled_with():
    x = torch.ones(4)

    def function():
        out = torch.empty(4)
        out[:2] = x[:2]
        return out, x.new_empty(2), torch.empty_like(x)

    (out, *others), replay = captured(function)
    out.fill_(7.0)
    replay()
    assert out[:2].tolist() == [1.0, 1.0]
    assert out[2:].isnan().all()
    assert all(other.isnan().all() for other in others)


def test_a_capture_in_inference_mode_is_replayed_outside_of_it():
    x = torch.ones(2)
    with torch.inference_mode():
        result, replay = captured(lambda: (x + 1).mul_(2))
    x.fill_(2.0)
    replay()
    assert result.tolist() == [6.0, 6.0]


def test_operations_on_other_devices_are_the_hosts_and_done_once():
    x, calls = torch.ones(2), []

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    def function():
        shape = torch.ones(3, device="meta").mul(2).shape
        return x * shape[0]

    result, replay = captured(function)
    with Counting():
        replay()
    assert calls == ["aten.mul.Tensor", "aten.copy_.default"]
    assert result.tolist() == [3.0, 3.0]


def reads_back():
    x, one, index = torch.arange(4.0), torch.ones(()), torch.tensor(1)
    mask = x > 1
    yield "item", one.item, "Tensor.item"
    yield "bool", lambda: bool(one), "Tensor.__bool__"
    yield "if", lambda: 1 if (x > 2).any() else 0, "Tensor.__bool__"
    yield "int", lambda: int(one), "Tensor.__int__"
    yield "float", lambda: float(one), "Tensor.__float__"
    yield "index of a list", lambda: [1, 2][index], "Tensor.__index__"
    yield "end of a slice", lambda: x[:index], "aten._local_scalar_dense"
    yield "tolist", x.tolist, "Tensor.tolist"
    yield "numpy", x.numpy, "Tensor.numpy"
    yield "asarray", lambda: np.asarray(x), "Tensor.__array__"
    yield "cpu", x.cpu, "Tensor.cpu"
    yield "in", lambda: 2.0 in x, "Tensor.__contains__"
    yield "text", lambda: f"{one} {x}", "Tensor.__format__"
    yield "repr", lambda: repr(x), "Tensor.__repr__"
    yield "max of Python", lambda: max(x), "Tensor.__bool__"
    yield "equal", lambda: torch.equal(x, x), "aten.equal"
    yield "allclose", lambda: torch.allclose(x, x), "aten.allclose"
    yield "nonzero", x.nonzero, "aten.nonzero"
    yield "where", lambda: torch.where(mask), "aten.nonzero"
    yield "mask as index", lambda: x[mask], "aten.index"
    yield "mask among indices", lambda: x.view(2, 2)[torch.tensor([0]), mask[:2]], "aten.index"
    yield "mask written to", lambda: x.__setitem__(mask, torch.ones(())), "aten.index_put_"
    yield "masked_select", lambda: x.masked_select(mask), "aten.masked_select"
    yield "unique", x.unique, "aten._unique2"
    yield "repeats", lambda: torch.repeat_interleave(x, torch.tensor([1, 2, 1, 0])), "aten.repeat_interleave"
    yield "length of a range", lambda: torch.arange(index), "aten._local_scalar_dense"


@pytest.mark.parametrize(("function", "what"), [pytest.param(f, what, id=name) for name, f, what in reads_back()])
def test_what_reads_a_value_back_is_refused_by_name(function, what):
    with pytest.raises(ContractError, match=rf"{what} waits for cpu, which nothing in a device graph may do: compute"):
        captured(function)


def test_operators_with_values_on_the_device_and_sizes_from_the_host_are_no_read_backs():
    x, places, repeats = torch.arange(4.0), torch.tensor([2, 0]), torch.tensor([1, 1])

    def function():
        spread = torch.repeat_interleave(x[:2], repeats, output_size=2)
        return x[places], x.masked_fill(x > 1, 0.0), torch.where(x > 1, x, 0.0), spread, x[:, None][None, places]

    (taken, filled, chosen, spread, _), replay = captured(function)
    x.copy_(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    places.copy_(torch.tensor([1, 3]))
    replay()
    assert taken.tolist() == [3.0, 1.0]
    assert filled.tolist() == [0.0, 0.0, 0.0, 1.0]
    assert chosen.tolist() == [4.0, 3.0, 2.0, 0.0]
    assert spread.tolist() == [4.0, 3.0]


def test_a_size_that_depended_on_values_all_the_same_is_refused_when_it_changes():
    ends = torch.tensor([1, 2])
    x = torch.arange(4.0)

    def two_sizes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: int(ends.sum())].clone()

    library = torch.library.Library("anyattn_test_capture", "DEF")
    library.define("two_sizes(Tensor x) -> Tensor")
    library.impl("two_sizes", two_sizes, "CPU")
    result, replay = captured(lambda: torch.ops.anyattn_test_capture.two_sizes(x))
    x += 1
    replay()
    assert result.tolist() == [1.0, 2.0, 3.0]
    ends.fill_(1)
    with pytest.raises(ContractError, match=r"gave \[3\] when it was captured and gives \[2\] now"):
        replay()


def test_after_a_refusal_torch_is_as_it_was():
    x = torch.ones(2)
    with pytest.raises(ContractError):
        captured(x.tolist)
    assert x.tolist() == [1.0, 1.0]
    assert bool(x.any())


def test_an_error_of_the_function_itself_comes_out_as_it_is():
    with pytest.raises(RuntimeError, match="must match"):
        captured(lambda: torch.ones(2) + torch.ones(3))


class Graphs:
    """A device's module as torch has it, whose graphs can be told to fail."""

    def __init__(self, error=None):
        self.done, self.error = [], error

    def __call__(self, name):
        outer = self

        class Context:
            def __init__(self, *_):
                pass

            def __enter__(self):
                outer.done.append(f"enter {name}")

            def __exit__(self, *_):
                outer.done.append(f"leave {name}")

            def wait_stream(self, other):
                outer.done.append(f"{name} waits")

            def replay(self):
                outer.done.append("replay")

        return Context

    def module(self):
        def graph(_):
            if self.error is not None:
                raise self.error
            return self("graph")()

        return type(
            "Module",
            (),
            {
                "CPUGraph": self("CPUGraph"),
                "Stream": self("side stream"),
                "current_stream": self("current stream"),
                "stream": self("side stream"),
                "device": self("device"),
                "graph": staticmethod(graph),
            },
        )


def test_a_device_with_graphs_is_warmed_up_on_a_stream_of_its_own_and_captured(monkeypatch):
    graphs, calls = Graphs(), []
    monkeypatch.setattr(torch, "get_device_module", lambda device: graphs.module())
    result, replay = capture(lambda: calls.append(len(graphs.done)) or len(calls), CPU)
    assert result == 2
    assert graphs.done == [
        *("enter device", "side stream waits", "enter side stream"),
        *("enter graph", "leave graph", "leave side stream", "current stream waits", "leave device"),
    ]
    assert calls == [3, 4]
    graphs.done.clear()
    replay()
    assert graphs.done == ["enter device", "replay", "leave device"]


def test_what_a_device_cannot_capture_is_a_contract_error_and_the_stream_is_the_one_before(monkeypatch):
    graphs = Graphs(RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: graphs.module())
    with pytest.raises(
        ContractError, match=r"a graph of cpu could not be captured.*\(item, tolist.*not permitted when"
    ):
        capture(lambda: None, CPU)
    assert graphs.done[-2:] == ["leave side stream", "leave device"]


@pytest.mark.cuda
def test_cuda_graphs_are_captured_and_read_backs_refused():
    device = torch.device("cuda")
    x = torch.arange(4.0, device=device)
    result, replay = capture(lambda: x * 2, device)
    x.fill_(3.0)
    replay()
    assert result.tolist() == [6.0] * 4
    stream = torch.cuda.current_stream()
    for function in (x.tolist, x.nonzero, lambda: torch.tensor([1.0]).to(device), lambda: bool(x.any())):
        with pytest.raises(ContractError, match="could not be captured"):
            capture(function, device)
        assert torch.cuda.current_stream() == stream
    result, replay = capture(lambda: x + 1, device)
    replay()
    assert result.tolist() == [4.0] * 4

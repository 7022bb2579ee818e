"""Capture and replay of what a function does on a device: by torch's own graphs, or by an emulation of them.

A device without graphs of its own has its operations recorded as they reach torch's dispatcher, and repeated on the
same tensors. As with a real graph, whatever Python computed while it was captured is in it for good, what reads a value
back from the device cannot be captured, and new memory holds anything. What does not come by the dispatcher (numpy, a
kernel that is called with pointers) is done once, while it is captured, and not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from anyattn.errors import ContractError

_METHODS_THAT_READ_BACK = frozenset(
    {
        "tolist", "numpy", "__array__", "cpu", "item", "__bool__", "__int__", "__float__", "__complex__", "__index__",
        "__contains__", "__repr__", "__format__",
    }
)  # fmt: skip
"""Of tensors. Several of them bypass the dispatcher; the others are here so that the error names what was written."""

_INDEXING = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"})
_NEW_MEMORY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


def capture(function: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """What the function returned while it was captured, and what replays it: results are then in the same tensors.

    The function is called twice, the first time to warm up. Before the first replay, results hold anything.
    Raises ContractError where the function reads something back from the device, or the device cannot capture it.
    """
    module = torch.get_device_module(device)
    graph_class = getattr(module, f"{device.type.upper()}Graph", None)  # torch.cuda.CUDAGraph, torch.xpu.XPUGraph, ...
    if graph_class is not None:
        return _captured(function, device, module, graph_class())
    function()  # as engines do before a real capture: what is made at a first call is then not in the graph
    recorder = _Recorder(device)
    with _ReadBacksRefused(device), recorder:
        result = function()
    return result, recorder.replay


def _captured(
    function: Callable[[], Any], device: torch.device, module: Any, graph: Any
) -> tuple[Any, Callable[[], None]]:
    with module.device(device):
        stream = module.Stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):  # also because a capture that fails need not give the current stream back
            function()  # kernels that compile or tune themselves do it before the capture
            try:
                with module.graph(graph):
                    result = function()
            except RuntimeError as error:
                raise ContractError(
                    f"a graph of {device} could not be captured. Nothing in it may wait for the device (item, tolist, "
                    f"cpu, nonzero, a bool mask as index) or copy from memory that is not pinned: {error}"
                ) from error
        module.current_stream().wait_stream(stream)

    def replay() -> None:
        with module.device(device):
            graph.replay()

    return result, replay


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One call of an operator. fresh: where among its results new tensors are, and those of the capture."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: dict[str, Any]
    fresh: Sequence[tuple[int, torch.Tensor]]

    def __call__(self) -> None:
        results = tree_leaves(self.function(*self.arguments, **self.named))
        for place, tensor in self.fresh:
            if results[place].shape != tensor.shape:
                raise ContractError(
                    f"{self.function} gave {list(tensor.shape)} when it was captured and gives "
                    f"{list(results[place].shape)} now: no result in a device graph may have a size that depends on "
                    "values on the device."
                )
            tensor.copy_(results[place])


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that reach the dispatcher and have to do with a device, to be repeated."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._operations: list[_Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, torch.Tensor)]
        name, tags = _name_of(func), getattr(func, "tags", ())
        if any(map(self._is_here, given)) and _reads_back(name, tags, args, named):
            raise _refusal(f"aten.{name}", self._device)
        # Aliases, as operators like unsqueeze_ change the shape of a tensor that others were called with before.
        arguments, its_named = tree_map(_alias, (args, named))
        if name == "lift_fresh":  # of torch.tensor([1]): what the host wrote there is in the graph, and written again
            arguments = (args[0].clone(),)
        result = func(*args, **named)
        leaves = tree_leaves(result)
        made = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._refuse_a_way_out(name, given, made)
        if torch.Tag.inplace_view in tags or not any(map(self._is_here, [*given, *made])):
            return result  # nothing on the device has changed
        if name in _NEW_MEMORY:
            self._record(_poison, (result.detach(),), {}, ())
            _poison(result)
            return result
        storages = set() if name == "lift_fresh" else {tensor.untyped_storage()._cdata for tensor in given}
        fresh = [
            (place, leaf.detach())
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in storages
        ]
        schema = getattr(func, "_schema", None)
        if fresh or schema is None or schema.is_mutable:  # others are views, which see what was written
            self._record(func, arguments, its_named, fresh)
        return result

    def replay(self) -> None:
        """Repeats everything on the same tensors."""
        with torch.inference_mode():  # which may write to all tensors, those made in it too
            for operation in self._operations:
                operation()

    def _record(self, function: Any, arguments: Any, named: Any, fresh: Sequence[tuple[int, torch.Tensor]]) -> None:
        self._operations.append(_Operation(function=function, arguments=arguments, named=named, fresh=fresh))

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._device.type

    def _refuse_a_way_out(self, name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Copies to another device would have to be waited for; what is on "meta" has no values."""
        if any(map(self._is_here, given)) and any(not self._is_here(x) and not x.is_meta for x in made):
            raise _refusal(f"aten.{name} to another device", self._device)


class _ReadBacksRefused(TorchFunctionMode):
    """Refuses what brings values of a device to Python."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and name in _METHODS_THAT_READ_BACK else None
        if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
            raise _refusal(f"Tensor.{name}", self._device)
        return func(*args, **(kwargs or {}))


def _reads_back(name: str, tags: Any, args: Any, named: Any) -> bool:
    """Whether the host has to wait for what an operator gives, or for its size."""
    if name in _INDEXING:  # a mask is turned into the places where it is true
        indices = args[1] if len(args) > 1 else named.get("indices", ())
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name == "repeat_interleave" and named.get("output_size") is not None:
        return False
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _refusal(what: str, device: torch.device) -> ContractError:
    return ContractError(
        f"{what} waits for {device}, which nothing in a device graph may do: compute it on the device, or before the "
        "graph from the host's copy of a step (batch.host)."
    )


def _name_of(func: Any) -> str:
    packet = getattr(func, "overloadpacket", func)
    return str(getattr(packet, "__name__", packet))


def _alias(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _poison(memory: torch.Tensor) -> None:
    """New memory in a graph holds what other graphs left there. NaN is the value that shows; integers stay."""
    if memory.is_floating_point():
        memory.fill_(float("nan"))

"""Capture and replay of what a function does on a device: by torch's own graphs, or by an emulation of them.

A device without graphs of its own has its operations recorded as they reach torch's dispatcher, and repeated on the
same tensors. As with a real graph, whatever Python computed while it was captured is in it for good, and what reads a
value back from the device cannot be captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anyattn.errors import ContractError

_READS_BACK = ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero")
"""Operators whose results the host has to wait for."""


def capture(function: Callable[[], Any], device: torch.device) -> tuple[Any, Callable[[], None]]:
    """What the function returned while it was captured, and what replays it; results are then in the same tensors.

    Raises ContractError where the function reads something back from the device, or the device cannot capture it.
    """
    module = torch.get_device_module(device)
    graph_class = getattr(module, f"{device.type.upper()}Graph", None)  # torch.cuda.CUDAGraph, torch.xpu.XPUGraph, ...
    if graph_class is None:
        recorder = _Recorder()
        with recorder:
            result = function()
        return result, recorder.replay
    graph = graph_class()
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):  # kernels that compile or tune themselves do it before the capture
        function()
    module.current_stream().wait_stream(stream)
    try:
        with module.graph(graph):
            result = function()
    except RuntimeError as error:
        raise ContractError(f"the device graph could not be captured: {error}") from error
    return result, graph.replay


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations that reach the dispatcher, to be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _READS_BACK:
            raise ContractError(f"aten.{name} waits for the device: nothing of the kind can be in a device graph.")
        result = func(*args, **kwargs)
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        fresh = [
            leaf for leaf in tree_leaves(result) if _is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in given
        ]
        self._operations.append((func, args, kwargs, fresh))
        return result

    def replay(self) -> None:
        """Repeats everything on the same tensors."""
        for func, args, kwargs, fresh in self._operations:
            again = func(*args, **kwargs)
            targets = iter(fresh)
            for leaf in tree_leaves(again):
                if _is_tensor(leaf) and fresh:
                    target = next(targets, None)
                    if target is not None:
                        target.copy_(leaf)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)

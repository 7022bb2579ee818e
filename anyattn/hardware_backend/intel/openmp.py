"""Runs a compiled function on torch's own OpenMP threads.

A second pool of threads would take turns with torch's, whose threads go on spinning for a while after each of its
operators: measured at 1 to 4 ms a turn. These are torch's: as many as `torch.set_num_threads` says, and where
OMP_PROC_BIND, GOMP_CPU_AFFINITY, taskset or numactl put them.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyattn.errors import ContractError
from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


@functools.cache
def _parallel() -> Any:
    """`GOMP_parallel(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags)` of libgomp's ABI.

    GNU's OpenMP has it, and so have Intel's and LLVM's on Linux.
    """
    own = Path(torch._C.__file__).parent / "lib" / "libtorch_cpu.so"
    # What torch itself is bound to: of the libraries that were preloaded, then of its own. Others of the process, as
    # scikit-learn's, have threads of theirs.
    for name in (None, str(own)):
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (AttributeError, OSError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        function.restype = None
        return function
    raise ContractError(
        "intel_cpu runs on the threads of the OpenMP that torch is built with on Linux, and this torch has none: "
        "set backend='torch_native'."
    )


def run_on_threads(function: int, data: int, num_threads: int) -> None:
    """Calls `function(data)` on this thread and `num_threads - 1` others, and returns when all have.

    function, data: addresses. The interpreter's lock is not held meanwhile. Raises ContractError where torch has no
    such threads.
    """
    _parallel()(function, data, num_threads, 0)

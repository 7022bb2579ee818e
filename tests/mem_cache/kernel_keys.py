"""Stand-ins for kernels, which note what Triton would compile; no device is needed. Tests load this file by its path.

Triton compiles a kernel anew for each key that it makes of a launch: types and constants of the arguments, and for
those that are not exempt from it, whether a number is 1 or divisible by 16 and whether a pointer is aligned.
"""

import os

import pytest

TARGETS = [("cuda", 90, 32), ("hip", "gfx942", 64)]
TARGET_IDS = ["sm_90", "gfx942"]


def compiler():
    """Triton, or a skip where there is none, or one that interprets."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("needs Triton's compiler: TRITON_INTERPRET is set")
    return pytest.importorskip("triton")


class KeyRecorder:
    """Stands where a kernel is launched.

    keys: under which Triton would look for a compiled kernel. grids: of all launches.
    """

    def __init__(self, kernel, target):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        self._key_of = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget(*target)))
        self.keys = set()
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.note

    def note(self, *arguments, **options):
        _, specialization, options = self._key_of(*arguments, debug=False, **options)
        key = f"{specialization} {options}"
        self.keys.add(key)
        return key


class BoundRecorder(KeyRecorder):
    """Stands where a `BoundKernel` is called.

    variants: by the key with which the caller tells variants apart, Triton's keys. There has to be one for each:
    otherwise a kernel would be launched that was compiled for other arguments.
    """

    def __init__(self, kernel, target):
        super().__init__(kernel, target)
        self.variants = {}

    def __call__(self, key, grid, *arguments, **options):
        self.variants.setdefault(key, set()).add(self[grid](*arguments, **options))


def record(monkeypatch, module, target):
    """Puts recorders in the place of all kernels that a module launches, bound or not; by the kernels' names."""
    from triton.runtime.jit import JITFunction

    from anyattn.mem_cache.kernels.launch import BoundKernel

    recorders = {}
    for name, value in list(vars(module).items()):
        if isinstance(value, BoundKernel):
            made = recorders[value._kernel.__name__] = BoundRecorder(value._kernel, target)
            monkeypatch.setattr(module, name, made)
    for name, value in list(vars(module).items()):
        if isinstance(value, JITFunction) and name.endswith("_kernel") and name not in recorders:
            recorders[name] = KeyRecorder(value, target)
            monkeypatch.setattr(module, name, recorders[name])
    return recorders

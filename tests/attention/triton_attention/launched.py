"""Steps of the `triton` backend whose launches are noted instead of made; no device is needed.

Tests load this file by its path. A backend is made for an architecture that is not here, and its tensors are on the
CPU, so that what is noted is what the architecture's kernels would be launched with.
"""

import dataclasses
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from anyattn.attention.batch import Batch, checked_tree_masks
from anyattn.attention.spec import AttentionSpec
from anyattn.attention.triton_attention.backend import TritonBackend
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.kernels.launch import BoundKernel
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool, MLAPool
from anyattn.platforms import simulated

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm89": ("cuda", 89, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm103": ("cuda", 103, 32),
    "sm120": ("cuda", 120, 32),
    "sm121": ("cuda", 121, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""What Triton calls the architectures. Intel's are not among them: Triton's own wheel has no compiler for these."""


class PlainBackend(TritonBackend):
    """Without the kernels in Gluon."""

    uses_gluon = False


class Launch(NamedTuple):
    """bound, key: the `BoundKernel` that was called, and what it was to tell its variants apart by."""

    bound: BoundKernel
    key: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def kernel(self):
        return self.bound._kernel

    @property
    def name(self):
        return self.kernel.__name__

    def specialised(self, target):
        """Types and constants of the arguments as Triton finds them, and the options; target: one of TARGETS.

        It compiles a kernel once for each of what this returns.
        """
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        compiler = make_backend(GPUTarget(*target))
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, compiler)
        return binder(*self.arguments, debug=False, **self.options)[1:]

    def compiled(self, target):
        """The kernel as Triton compiles it for this launch, without a device."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource, make_backend
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.runtime.jit import create_function_from_signature

        kernel, options = self.kernel, {**self.options, "debug": False}
        compiler = make_backend(GPUTarget(*target))
        binder = create_function_from_signature(kernel.signature, kernel.params, compiler)
        bound, specialization, given = binder(*self.arguments, **options)
        options, signature, constants, attributes = kernel._pack_args(compiler, options, bound, specialization, given)
        source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
        return triton.compile(source, target=GPUTarget(*target), options=options.__dict__)

    def constant(self, name):
        """An argument by its name."""
        return self.arguments[self.kernel.arg_names.index(name)]


@contextmanager
def noted():
    """A list of what is launched meanwhile, in order."""
    launches: list[Launch] = []

    def note(self, key, grid, *arguments, **options):
        launches.append(Launch(self, key, grid, arguments, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BoundKernel, "__call__", note)
        yield launches


def gqa(head_dim, v_head_dim=None, **fields):
    """16 query heads and 2 KV heads: 8 rows for each token."""
    base = {"num_qo_heads": 16, "num_kv_heads": 2, "head_dim": head_dim, "v_head_dim": v_head_dim}
    return AttentionSpec(**{**base, **fields})


def mla(num_qo_heads=8, **fields):
    """DeepSeek's; rows of a token are its heads."""
    base = {"num_qo_heads": num_qo_heads, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "sm_scale": 0.1}
    return AttentionSpec.mla(**{**base, **fields})


def platform_of(arch, *, num_cores=None):
    """A device of this architecture, whose tensors are on the CPU."""
    vendor = simulated.MI300X if arch.startswith("gfx") else simulated.H100
    return dataclasses.replace(vendor, arch=arch, torch_device="cpu", num_cores=num_cores or vendor.num_cores)


class Engine:
    """A backend with pages for it."""

    def __init__(
        self,
        spec,
        arch,
        *,
        page_size=16,
        layout="NHD",
        num_pages=300,
        num_layers=1,
        joined_layers=False,
        num_cores=None,
        backend=TritonBackend,
    ):
        self.spec = spec
        cache = spec.cache_spec(
            num_layers=num_layers, page_size=page_size, layout=layout, joined_layers=joined_layers
        )
        self.pool = (MLAPool if spec.is_mla else MHAPool)(cache, num_pages, "cpu")
        if spec.kv_scale_per_head:
            for layer in range(num_layers):
                self.pool.set_scales(layer, torch.ones(spec.num_kv_heads), torch.ones(spec.num_kv_heads))
        self.table = PageTable(PagedAllocator(num_pages, page_size), page_size)
        self.backend = backend(spec, cache, platform_of(arch, num_cores=num_cores))

    def batch(self, before, new, *, trees=False):
        """A step of new sequences. before, new: tokens of each that it has, and that it gains."""
        seqs = self.table.new_sequences(len(new))
        if any(before):
            self.table.extend(seqs, before)
        view = self.table.extend(seqs, new)
        masks = None
        if trees:
            masks = [torch.ones(count, count, dtype=torch.bool).tril() for count in new]
            masks = checked_tree_masks(masks, new, torch.device("cpu"))
        batch = Batch.from_view(view, view.tensors(), masks)
        self.table.free(seqs)
        return batch

    def launches(self, batch, *, layer=0, plan=None, q=None, out=None, sinks=None):
        """What one layer's step launches: planned here, unless the plan is given, and run."""
        spec, dtype = self.spec, getattr(torch, self.spec.dtype)
        if q is None:
            q = torch.zeros(batch.num_tokens, spec.num_qo_heads, spec.head_dim, dtype=dtype)
        if out is None:
            out = torch.empty(batch.num_tokens, spec.num_qo_heads, spec.vo_head_dim, dtype=dtype)
        if spec.sinks and sinks is None:
            sinks = torch.zeros(spec.num_qo_heads, dtype=torch.bfloat16)
        slopes = torch.zeros(spec.num_qo_heads) if spec.alibi else None
        with noted() as launches:
            if plan is None:
                plan = self.backend.plan(batch)
            self.backend.run(q, self.pool.layers[layer], plan, out, sinks=sinks, alibi_slopes=slopes)
        return launches

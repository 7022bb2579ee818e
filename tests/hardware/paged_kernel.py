"""What emulations of vendors' calls share: attention over paged keys as one operator, and how signatures compare.

The operator computes with the reference and, as kernels do, multiplies the values of keys that it loads and masks by 0,
so that a NaN among them shows. An emulated graph records it as one operation, and replays it.
"""

import dataclasses
import inspect
import os

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from anyattn import AttentionSpec
from anyattn.attention.reference import reference_attention
from anyattn.testing.check import CannotRunError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loads:
    """Which rows of a sequence a kernel loads, beside those that a query sees.

    tile: it loads whole tiles of so many tokens at the end, by the table; 1 where it fills what is behind with zeros.
    first_tile: it skips tiles of so many tokens that lie wholly behind the window; 0 where it loads from the beginning.
    """

    tile: int = 1
    first_tile: int = 0


def attend(
    q, k_pages, v_pages, block_table, kv_lens, qo_indptr, *, scale, loads, k_scale=1.0, v_scale=1.0, window_left=-1,
    causal=True, soft_cap=0.0, sinks=None, alibi_slopes=None,
):  # fmt: skip
    """q: [T, H, D]. k_pages, v_pages: [P, page, Hkv, D]. Returns out [T, H, Dv] in float32 and LSE [T, H], natural.

    k_scale, v_scale: numbers or tensors of one element.
    """
    scales = [torch.as_tensor(s, dtype=torch.float32, device=q.device).view(1) for s in (k_scale, v_scale)]
    assert {x.dtype for x in (block_table, kv_lens, qo_indptr)} == {torch.int32}
    assert block_table.shape[0] == kv_lens.shape[0] == qo_indptr.shape[0] - 1
    return _attend(
        q, k_pages, v_pages, block_table, kv_lens, qo_indptr, *scales, sinks, alibi_slopes, scale, window_left, causal,
        soft_cap, loads.tile, loads.first_tile,
    )  # fmt: skip


@torch.library.custom_op("anyattn_paged_kernel::attend", mutates_args=())
def _attend(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, block_table: torch.Tensor, kv_lens: torch.Tensor,
    qo_indptr: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor, sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None, scale: float, window_left: int, causal: bool, soft_cap: float, tile: int,
    first_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    page_size, num_kv_heads, vo_head_dim = v_pages.shape[1:]
    spec = AttentionSpec(
        num_qo_heads=q.shape[1], num_kv_heads=num_kv_heads, head_dim=q.shape[2], sm_scale=scale, causal=causal,
        v_head_dim=None if q.shape[2] == vo_head_dim else vo_head_dim, logits_soft_cap=soft_cap or None,
        sliding_window=None if window_left < 0 else window_left + 1,
    )  # fmt: skip
    out = torch.zeros(*q.shape[:2], vo_head_dim)
    lses = torch.full(q.shape[:2], float("-inf"))
    indptr = qo_indptr.tolist()
    for i, length in enumerate(kv_lens.tolist()):
        rows = slice(indptr[i], indptr[i + 1])
        num_new = rows.stop - rows.start
        if not length or not num_new:
            continue
        loaded = -(-length // tile) * tile
        pages = block_table[i, : -(-loaded // page_size)].long()
        assert pages.numel() * page_size >= loaded, "a row of the table ends within a tile"
        k, v = (part[pages].flatten(0, 1)[:loaded].double() for part in (k_pages, v_pages))
        k, v = k * k_scale, v * v_scale
        here, lses[rows] = reference_attention(
            spec, q[rows].double(), k[:length], v[:length], sinks=sinks, alibi_slopes=alibi_slopes
        )
        begin = 0
        if first_tile and window_left >= 0:
            begin = max(length - num_new - window_left, 0) // first_tile * first_tile
        masked = (v[begin:] * 0.0).sum(dim=0).repeat_interleave(spec.group_size, dim=0)
        out[rows] = (here + masked).float()
    return out, lses


def is_capturing():
    """Whether an emulated graph is recorded, in which no value may be read."""
    return _get_current_dispatch_mode() is not None


WHOLE_KIT = os.environ.get("ANYATTN_WHOLE_KIT") == "1"
"""Whether the tests run every case and check of the kit, rather than a choice of them."""

_OF_EACH = 2  # such names, the shortest of them: others have more features beside, which the adapter passes on alike


def chosen(backend, found, names=("",)):
    """Of cases or checks, some whose names have each of these parts, as parameters of a test: the backend and each.

    With ANYATTN_WHOLE_KIT=1 in the environment all of them.
    """
    found = list(found)
    if WHOLE_KIT:
        names = ("",)
    kept = set()
    for part in names:
        matching = [each.name for each in found if part in each.name]
        kept |= set(sorted(matching, key=lambda name: (len(name), name))[:_OF_EACH] if part else matching)
    return [pytest.param(backend, each, id=f"{backend.__name__} {each.name}") for each in found if each.name in kept]


def run_check(check):
    """With the whole kit, what this machine has not the memory for is skipped."""
    try:
        check.run(torch.seed() % (1 << 31))
    except CannotRunError as error:
        if not WHOLE_KIT:
            raise
        pytest.skip(str(error))


def shortened(cases):
    """With pages of 256 tokens a prompt fills two, which takes its time: here it fills one."""
    for case in cases:
        yield dataclasses.replace(case, steps=tuple(tuple(min(n, 257) for n in step) for step in case.steps))


GRAPHS = (
    "across the ends of pages", "stay where they are", "at the capture", "waits for the device",
    "replays with sliding_window=33, in",
)  # fmt: skip
"""Parts of the names of graph checks that an adapter can fail. It is the kit that has all of them, on the device."""

HEAD_CASES = (
    "plain", "float16", "tensor scales", "q rounded", "causal False", "layout HND", "page size 16", "page size 256",
    "head dim 128, 128", "head dim 192, 128", "KV heads: 1", "16 query heads a KV head", "sliding_window=33",
    "sliding_window=64", "logits_soft_cap=3.0, return", "sinks=True", "alibi=True", "strides", "mixed", "decode of 33",
    "joined layers, H", "sequences without tokens", "random order", "end is read", "for two layers",
)  # fmt: skip
"""Parts of the names of cases of heads that an adapter can fail."""

MLA_CASES = (
    "64 plain", "tensor scales", "q rounded", "64 return_lse=True", "layout HND", "page size 16, HND",
    "64 decode", "8 new tokens for each sequence, ret", "64 float16", "sm_scale", "beyond 100", "end is read",
)  # fmt: skip
"""Parts of the names of cases of MLA that an adapter can fail."""


def assert_called_alike(real, emulation):
    """The real function has the emulation's parameters, with their kinds and defaults; more of them have defaults."""
    there, here = inspect.signature(real).parameters, inspect.signature(emulation).parameters
    for name, parameter in here.items():
        assert name in there, f"{real.__qualname__} has no {name}"
        assert (there[name].kind, there[name].default) == (parameter.kind, parameter.default), name
    for name in there.keys() - here.keys():
        assert there[name].default is not inspect.Parameter.empty, f"{real.__qualname__} wants {name}"

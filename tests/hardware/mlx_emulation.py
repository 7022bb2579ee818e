"""What the adapter calls of MLX, in torch, as MLX 0.32.4's documentation has it (mlx/core/*.pyi in its wheel).

Arrays are lazy: what one holds may be read by torch only after `eval`. One that was imported holds what the tensor held
then, as on the CPU, where MLX copies.
"""

from types import SimpleNamespace

import torch
from vendor_calls import bound

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Array:
    def __init__(self, tensor, is_evaluated=False):
        self.tensor, self.is_evaluated = tensor, is_evaluated

    shape = property(lambda self: tuple(self.tensor.shape))
    dtype = property(lambda self: self.tensor.dtype)

    def __getitem__(self, key):
        return Array(self.tensor[key])

    def __le__(self, other):
        return Array(self.tensor <= _plain(other))

    def __gt__(self, other):
        return Array(self.tensor > _plain(other))

    def __ne__(self, other):
        return Array(self.tensor != _plain(other))

    def __and__(self, other):
        return Array(self.tensor & _plain(other))

    def __add__(self, other):
        return Array(self.tensor + _plain(other))

    def __sub__(self, other):
        return Array(self.tensor - _plain(other))

    __hash__ = None

    @bound("mlx", "array.transpose")
    def transpose(self, axes, stream):
        return Array(self.tensor.permute(*axes))

    @bound("mlx", "array.any")
    def any(self, axis, keepdims, stream):
        return Array(self.tensor.any(dim=axis, keepdim=keepdims))

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **keywords):
        assert self.is_evaluated, "MLX writes require mx.eval(...) before PyTorch reads"
        return self.tensor.contiguous().__dlpack__(**keywords)


def _plain(value):
    return value.tensor if isinstance(value, Array) else value


@bound("mlx", "from_dlpack")
def from_dlpack(x, copy):
    assert copy is None
    assert x.dtype in (*DTYPES, torch.uint8), "Cannot convert Metal DLPack dtype to mlx dtype."
    return Array(torch.from_dlpack(x).clone())


@bound("mlx", "eval")
def evaluate(args):
    for each in args:
        each.is_evaluated = True


@bound("mlx", "arange")
def arange(stop, step, dtype, stream):
    assert step is dtype is None
    return Array(torch.arange(stop, dtype=torch.int32))


@bound("mlx", "concatenate")
def concatenate(arrays, axis, stream):
    assert isinstance(arrays, list)
    return Array(torch.cat([each.tensor for each in arrays], dim=axis))


@bound("mlx", "pad")
def pad(a, pad_width, mode, constant_values, stream):
    assert mode == "constant"
    assert isinstance(pad_width, list)
    flat = [width for widths in reversed(pad_width) for width in widths]
    return Array(torch.nn.functional.pad(a.tensor, flat, value=constant_values))


@bound("mlx", "where")
def where(condition, x, y, stream):
    return Array(torch.where(condition.tensor, x.tensor, _plain(y)))


@bound("mlx", "scaled_dot_product_attention")
def scaled_dot_product_attention(q, k, v, scale, mask, sinks, force_fused, stream):
    """q: [B, N_q, T_q, D]. k, v: [B, N_kv, T_kv, D]. "causal": the last query sees the last key."""
    q, k, v = q.tensor, k.tensor, v.tensor
    assert q.dim() == k.dim() == v.dim() == 4
    assert {x.dtype for x in (q, k, v)} <= set(DTYPES)
    assert q.dtype == k.dtype == v.dtype
    assert q.shape[3] == k.shape[3]
    assert k.shape[:3] == v.shape[:3]
    assert q.shape[0] == k.shape[0]
    assert q.shape[1] % k.shape[1] == 0
    assert not force_fused
    output, group, (num_queries, num_keys) = q.dtype, q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
    q, k, v = q.double(), *(x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if isinstance(mask, str):
        assert mask == "causal", "The only supported string type is causal"
        assert num_queries <= num_keys
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    elif mask is not None:
        assert mask.dtype == torch.bool, "an additive mask would have to be of q's type"
        assert mask.tensor.dim() <= 4
        seen = mask.tensor
    if mask is not None:
        scores = scores.masked_fill(~seen, -1e30)  # a row that sees nothing gets the values' mean
    if sinks is not None:
        assert torch.promote_types(sinks.dtype, output) == output, "Type of sinks must promote to output type"
        assert sinks.shape == (q.shape[1],)
        scores = torch.cat([scores, sinks.tensor.double()[None, :, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return Array((scores.softmax(dim=3)[..., :num_keys] @ v).to(output))


MODULE = SimpleNamespace(
    array=Array, fast=SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention), arange=arange,
    pad=pad, concatenate=concatenate, eval=evaluate, from_dlpack=from_dlpack, where=where,
)  # fmt: skip

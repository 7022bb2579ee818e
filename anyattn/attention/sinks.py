"""Attention sinks for kernels that take none, or none beside the LSE, from the LSE that they return."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


def join_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Lets a sink of each head join the denominator of a finished output, in place.

    out: [num_tokens, num_qo_heads, vo_head_dim]. lse: [num_tokens, num_qo_heads], float32, natural log, without sinks.
    sinks: [num_qo_heads], float32 or bfloat16.

    With s the sink, out * exp(lse) / (exp(lse) + exp(s)) = out * sigmoid(lse - s), in float32 and rounded once.
    """
    out.copy_(out * torch.sigmoid(lse - sinks)[..., None])

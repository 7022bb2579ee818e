"""Merging attention over disjoint parts of the keys by their log-sum-exp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anyattn.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


def merge_states(
    outputs: list[torch.Tensor], lses: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of disjoint sets of keys, from attention over each of them.

    outputs: each [num_tokens, num_qo_heads, vo_head_dim]. lses: each [num_tokens, num_qo_heads], float32, natural
    log, -inf where that set holds nothing the row sees; the output there may be anything, NaN included.
    The parts must be computed without sinks, which join the union's denominator once: multiply its output by
    sigmoid(lse - sink) afterwards.
    Returns output in the parts' dtype and LSE. A row that sees nothing in any part gives 0 and -inf.

    With o_i the part's output and l_i its LSE, the union's is sum(exp(l_i) o_i) / sum(exp(l_i)) (FlashInfer,
    arXiv:2501.01005, section 2.2).
    """
    stacked = torch.stack(lses)
    lse = torch.logsumexp(stacked, dim=0)
    weights = torch.exp(stacked - torch.where(lse.isneginf(), 0.0, lse))
    merged = torch.zeros_like(outputs[0], dtype=torch.promote_types(outputs[0].dtype, torch.float32))
    for output, weight in zip(outputs, weights.unsqueeze(-1), strict=True):
        merged += torch.where(weight > 0, output.to(merged.dtype) * weight, 0.0)
    return merged.to(outputs[0].dtype), lse

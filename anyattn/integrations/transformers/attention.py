"""The attention functions that transformers calls, and their registration."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from anyattn.errors import ContractError
from anyattn.integrations.transformers.masks import step_mask
from anyattn.integrations.transformers.scratch import attend_whole
from anyattn.integrations.transformers.specs import Step, checked_call

NAME = "anyattn"
"""For `attn_implementation`: any cache, or a `PagedCache`."""
PAGED_NAME = "anyattn_paged"
"""Of the packed steps of `PagedGenerator`; it has no mask function, so transformers makes no mask for it."""

STEP_KEYWORD = "anyattn_step"
"""The keyword by which a packed step travels through a model's forward to the attention function."""
_MARK = "_anyattn_step"
"""The attribute by which a cache marks the keys and values that it handed out. Whatever a model computes from them is
a new tensor and bears no mark, so keys that were changed on the way are never taken for those in the cache."""


def register() -> None:
    """Makes attn_implementation="anyattn" known to transformers, for loading a model and for set_attn_implementation.

    Calling it again changes nothing. Raises ContractError when transformers is too old.
    """
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ContractError('this transformers describes masks in an older way: pip install "transformers>=5.4".')
    AttentionInterface.register(NAME, attention_forward)
    AttentionInterface.register(PAGED_NAME, paged_attention_forward)
    AttentionMaskInterface.register(NAME, step_mask)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """No gradients, and no inference tensors: pages and buffers made under torch.inference_mode() could not be written
    outside of it again, where they outlive it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def mark(step: Step, *tensors: torch.Tensor) -> None:
    """Makes the attention function hand a call with these keys and values to `step`."""
    for tensor in tensors:
        setattr(tensor, _MARK, step)


# What a step looks like is data on the host, which a trace would freeze: torch.compile breaks its graph here.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """attn_implementation="anyattn"; its parameters are those of transformers' AttentionInterface.

    query: [batch_size, num_qo_heads, q_length, head_dim]. key: [batch_size, num_kv_heads, kv_length, head_dim], the
    cached ones included, unless a `PagedCache` keeps them. value: likewise with v_head_dim.

    Returns [batch_size, q_length, num_qo_heads, v_head_dim], 0 for queries that are padding, and no weights.
    """
    if kwargs.get("output_attentions"):
        warnings.warn("anyattn gives no attention weights: output_attentions is without effect.", stacklevel=2)
    call = checked_call(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, kwargs=kwargs)
    step: Step | None = kwargs.get(STEP_KEYWORD) or getattr(key, _MARK, None)
    if not (step is getattr(key, _MARK, step) is getattr(value, _MARK, step)):
        raise ContractError(f"{call.name} attends to keys and values that different caches handed out.")
    with plain_tensors():
        return (attend_whole(call) if step is None else step.attend(call)), None


@torch.compiler.disable  # type: ignore[untyped-decorator]
def paged_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """attn_implementation="anyattn_paged": the tokens of many sequences in one row, as `anyattn_step` planned them.

    query, key, value: [1, heads, num_tokens, dim]. Returns [1, num_tokens, num_qo_heads, v_head_dim].
    """
    call = checked_call(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, kwargs=kwargs)
    step: Step | None = kwargs.get(STEP_KEYWORD)
    if step is None:
        raise ContractError(
            f'{call.name} runs with attn_implementation="{PAGED_NAME}" outside a PagedGenerator, which alone makes its '
            f'steps: model.set_attn_implementation("{NAME}"), or finish the generator\'s stream first.'
        )
    if attention_mask is not None:
        raise ContractError(f"{call.name} makes a mask of its own, which a packed step cannot use.")
    with plain_tensors():
        return step.attend(call), None

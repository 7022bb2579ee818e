"""Hugging Face transformers on anyattn, through AttentionInterface, AttentionMaskInterface and Cache alone.

- `register()`, then `attn_implementation="anyattn"`: `forward` and `model.generate` with any cache of transformers.
- `PagedCache`: the same with keys and values in pages.
- `PagedGenerator`: many prompts over one runtime, with continuous batching.
- `load_model`, `find_default_model`, `encode_chat`: what the command line needs around them.
"""

from __future__ import annotations

from anyattn.integrations.transformers.attention import register
from anyattn.integrations.transformers.cache import PagedCache
from anyattn.integrations.transformers.generator import GenerationResult, PagedGenerator, TokenEvent
from anyattn.integrations.transformers.loading import encode_chat, find_default_model, load_model
from anyattn.integrations.transformers.scratch import release_scratch

__all__ = [
    "GenerationResult",
    "PagedCache",
    "PagedGenerator",
    "TokenEvent",
    "encode_chat",
    "find_default_model",
    "load_model",
    "register",
    "release_scratch",
]

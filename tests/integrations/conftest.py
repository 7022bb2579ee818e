"""Models for the tests of the transformers integration: SmolLM2 once a session, and tiny random ones."""

import functools
import os

import pytest

try:
    import torch
    import transformers

    from anyattn.errors import ContractError
    from anyattn.integrations.transformers import encode_chat, find_default_model, load_model, register
except ImportError:
    pass  # every test file says by itself what is missing, and skips

NEW_TOKENS = 16
"""Enough for each of the prompts to go beyond the end of a page of 16 tokens."""

QUESTIONS = (
    "Hi",
    "What is the capital of France?",
    "Name three rivers of Africa and say where each of them ends.",
    "Write a short poem about a lighthouse keeper who is afraid of the dark.",
)
TEXTS = (
    "The",
    "Once upon a time there was a clockmaker who",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "In the beginning the universe was small and hot. " * 12 + "Later it",
)


@pytest.fixture(scope="session", autouse=True)
def _registered():
    register()
    if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # threads of several workers on one core only wait for each other
        torch.set_num_threads(max(torch.get_num_threads() // int(os.environ["PYTEST_XDIST_WORKER_COUNT"]), 1))


@pytest.fixture
def one_thread():
    """Handing work of microseconds to other threads costs more than the work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def default_model():
    """The file of SmolLM2's weights."""
    try:
        return find_default_model()
    except ContractError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2(default_model):
    """Model and tokenizer, float32 on the CPU. They take half a minute to load, so only test_smollm2.py asks for them:
    workers of a test run have a session each."""
    return load_model(default_model, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def prompts(smollm2):
    """Eight prompts of different lengths, as token ids."""
    tokenizer = smollm2[1]
    ids = [encode_chat(tokenizer, question) for question in QUESTIONS] + [tokenizer.encode(text) for text in TEXTS]
    assert len({len(prompt) for prompt in ids}) == len(ids) == 8
    return ids


@pytest.fixture(scope="session")
def no_stop(smollm2):
    """A token that nothing generates, as the stop token: every answer then has all of its tokens."""
    return smollm2[0].config.vocab_size - 1


@pytest.fixture(scope="session")
def sdpa_tokens(smollm2, prompts, no_stop):
    """The greedy continuation of each prompt by transformers' own sdpa, computed one by one."""
    model = smollm2[0]
    model.set_attn_implementation("sdpa")
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=no_stop
        )
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def config_of(name):
    """A config small enough for milliseconds, its window smaller than the tests' prompts."""
    size = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    mixed = ["sliding_attention", "full_attention"] * 2
    own = {
        "llama": {},
        "mistral": {"sliding_window": 6},
        "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
        "gemma2": {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 20},
        "gemma3_text": {"head_dim": 16, "sliding_window": 6, "layer_types": mixed, "query_pre_attn_scalar": 20},
        "gpt_oss": {
            "head_dim": 16,
            "sliding_window": 6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 24,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 12,
        },
        "llama4_text": {"head_dim": 16, "intermediate_size_mlp": 96, "num_local_experts": 2, "attention_chunk_size": 6},
        "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    }
    return transformers.AutoConfig.for_model(name, **{**size, **own[name]})


@functools.cache
def tiny_model(name):
    """A random model with weights large enough that attention decides something, float32 on the CPU, for inference."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                parameter.normal_(0, 1)
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    return model


@pytest.fixture
def tiny():
    """Gives tiny models by their model_type, attending eagerly when a test gets them."""

    def get(name):
        model = tiny_model(name)
        model.set_attn_implementation("eager")
        return model

    return get

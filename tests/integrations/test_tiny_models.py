"""Logits of tiny random models equal transformers' eager: windows, sinks, soft caps, and heads of two sizes.

Both compute in float32, where sums in another order differ by some 1e-6 of logits of about 5; 1e-4 is the project's
promise. Prompts are longer than every window, so that windows decide something.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from anyattn.integrations.transformers import PagedCache, PagedGenerator, release_scratch  # noqa: E402
from anyattn.integrations.transformers.probe import cache_keyword  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
MODELS = ["gemma3_text", "gpt_oss", "gemma2", "mistral", "qwen2", "llama", "deepseek_v3"]
CACHED = [name for name in MODELS if name != "deepseek_v3"]  # whose keys change between cache and attention

PADDINGS = {
    "none": [[1] * 14] * 3,
    "left": [[0] * 4 + [1] * 10, [0] + [1] * 13, [1] * 14],
    "right": [[1] * 10 + [0] * 4, [1] * 13 + [0], [1] * 14],
}


@pytest.fixture
def ids():
    return torch.randint(3, 97, (3, 14), generator=torch.Generator().manual_seed(1))


def logits_of(model, ids, mask):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits


def assert_close(actual, expected, mask=None):
    difference = (actual - expected).abs()
    if mask is not None:
        difference = difference[mask.bool()]
    assert difference.max() < TOLERANCE


def generate(model, ids, mask, **keywords):
    out = model.generate(
        ids,
        attention_mask=mask,
        min_new_tokens=12,
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **keywords,
    )
    return out.sequences, torch.stack(out.logits, dim=1)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_without_a_cache(tiny, ids, name, padding):
    model, mask = tiny(name), torch.tensor(PADDINGS[padding])
    expected = logits_of(model, ids, mask)
    model.set_attn_implementation("anyattn")
    assert_close(logits_of(model, ids, mask), expected, mask)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_generation_with_transformers_own_cache(tiny, ids, name, padding):
    model, mask = tiny(name), torch.tensor(PADDINGS[padding])
    sequences, expected = generate(model, ids, mask)
    model.set_attn_implementation("anyattn")
    again, logits = generate(model, ids, mask)
    assert torch.equal(again, sequences)
    assert_close(logits, expected)


@pytest.mark.parametrize("padding", ["none", "left"])
@pytest.mark.parametrize("name", CACHED)
def test_generation_with_a_paged_cache(tiny, ids, name, padding):
    model, mask = tiny(name), torch.tensor(PADDINGS[padding])
    sequences, expected = generate(model, ids, mask)
    model.set_attn_implementation("anyattn")
    again, logits = generate(model, ids, mask, **{cache_keyword(model): PagedCache(model, num_pages=60, page_size=4)})
    assert torch.equal(again, sequences)
    assert_close(logits, expected)


class Recorder(PagedGenerator):
    """Keeps the logits of every token that is chosen, by prompt."""

    def _choose(self, requests, logits):
        for request, row in zip(requests, logits, strict=True):
            self.logits.setdefault(request.index, []).append(row)
        return super()._choose(requests, logits)


@pytest.mark.parametrize("max_batch_tokens", [5, 512])
@pytest.mark.parametrize("name", MODELS)
def test_packed_steps_of_the_paged_generator(tiny, ids, name, max_batch_tokens):
    model = tiny(name)
    prompts = [row[: 6 + 4 * index].tolist() for index, row in enumerate(ids)]
    generator = Recorder(model, num_pages=40, page_size=4, max_batch_tokens=max_batch_tokens)
    generator.logits = {}
    results = generator.generate(prompts, max_new_tokens=12, eos_token_ids=[])
    assert model.config._attn_implementation == "eager"
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        tokens = torch.tensor([[*prompt, *result.token_ids]])
        expected = logits_of(model, tokens, torch.ones_like(tokens))[0, len(prompt) - 1 : -1]
        assert_close(torch.stack(generator.logits[index]), expected)


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss"])
def test_beam_search_and_static_caches_with_transformers_own_cache(tiny, ids, name):
    model, mask = tiny(name), torch.tensor(PADDINGS["left"])
    wanted = [{"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}]
    expected = [generate(model, ids, mask, **keywords)[0] for keywords in wanted]
    model.set_attn_implementation("anyattn")
    for keywords, sequences in zip(wanted, expected, strict=True):
        assert torch.equal(generate(model, ids, mask, **keywords)[0], sequences), keywords


def test_sampling_draws_what_eager_draws(tiny, ids):
    model, mask = tiny("llama"), torch.tensor(PADDINGS["left"])

    def sample():
        torch.manual_seed(3)
        return model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=True, num_return_sequences=2)

    expected = sample()
    model.set_attn_implementation("anyattn")
    assert torch.equal(sample(), expected)


def test_inference_mode_and_no_grad_take_turns(tiny, ids):
    model, ones = tiny("gemma3_text"), torch.ones_like(ids)
    expected = logits_of(model, ids, ones)
    model.set_attn_implementation("anyattn")
    release_scratch()
    with torch.inference_mode():
        cache = {cache_keyword(model): PagedCache(model, num_pages=60, page_size=4)}
        generator = PagedGenerator(model, num_pages=40, page_size=4)
        first = generator.generate(ids.tolist(), max_new_tokens=3, eos_token_ids=[])
        outputs = [logits_of(model, ids, ones), model(input_ids=ids[:, :9], attention_mask=ones[:, :9], **cache).logits]
    with torch.no_grad():
        outputs += [logits_of(model, ids, ones), model(input_ids=ids[:, 9:], attention_mask=ones, **cache).logits]
    assert_close(outputs[0], expected)
    assert_close(torch.cat([outputs[1], outputs[3]], dim=1), expected)
    assert_close(outputs[2], expected)
    assert generator.generate(ids.tolist(), max_new_tokens=3, eos_token_ids=[]) == first


@pytest.mark.parametrize("backend", ["reference", "torch_native"])
def test_a_second_turn_goes_on_in_the_same_paged_cache(tiny, ids, backend):
    model = tiny("gemma3_text")
    model.set_attn_implementation("anyattn")
    cache = {cache_keyword(model): PagedCache(model, num_pages=60, page_size=4, backend=backend)}
    ones = torch.ones_like(ids)
    first = model.generate(ids, attention_mask=ones, max_new_tokens=5, do_sample=False, **cache)
    more = torch.cat([first, ids[:, :7]], dim=1)
    second = generate(model, more, torch.ones_like(more), **cache)
    model.set_attn_implementation("eager")
    expected = generate(model, more, torch.ones_like(more))
    assert torch.equal(second[0], expected[0])
    assert_close(second[1], expected[1])


def test_an_encoder_sees_both_ways_and_no_padding():
    config = transformers.BertConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96
    )
    torch.manual_seed(0)
    model = transformers.BertModel(config).eval()
    ids, mask = torch.randint(3, 97, (3, 14)), torch.tensor(PADDINGS["right"])
    outputs = []
    for implementation in ("eager", "anyattn"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(input_ids=ids, attention_mask=mask).last_hidden_state)
    assert_close(outputs[1], outputs[0])  # what padding sees is not asked for, and the same nevertheless


def test_cross_attention_serves_more_queries_than_keys_and_fewer():
    config = transformers.BartConfig(
        vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    for length, mask in ((5, [[1] * 5, [1] * 2 + [0] * 3]), (14, PADDINGS["right"][:2])):
        ids, outputs = torch.randint(3, 97, (2, length)), []
        for implementation in ("eager", "anyattn"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                out = model(
                    input_ids=ids, attention_mask=torch.tensor(mask), decoder_input_ids=torch.arange(3, 21).view(2, 9)
                )
            outputs.append(out.logits)
        assert_close(outputs[1], outputs[0])

"""What cannot be served is our error, says what to do instead, and leaves the pages as they were."""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from anyattn.errors import ContractError, OutOfPagesError, SpecError  # noqa: E402
from anyattn.integrations.transformers import PagedCache, PagedGenerator, release_scratch  # noqa: E402
from anyattn.integrations.transformers.attention import attention_forward  # noqa: E402
from anyattn.integrations.transformers.masks import StepMask  # noqa: E402
from anyattn.integrations.transformers.probe import cache_keyword  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 23).view(2, 10)
ONES = torch.ones_like(IDS)


@pytest.fixture
def llama(tiny):
    model = tiny("llama")
    model.set_attn_implementation("anyattn")
    return model


@pytest.fixture
def mistral(tiny):
    model = tiny("mistral")
    model.set_attn_implementation("anyattn")
    return model


@pytest.fixture
def cache(llama):
    return PagedCache(llama, num_pages=32, page_size=4)


@pytest.fixture
def generator(llama):
    return PagedGenerator(llama, num_pages=8, page_size=4)


@torch.no_grad()
def forward(model, ids=IDS, mask=ONES, cache=None, **keywords):
    if cache is not None:
        keywords[cache_keyword(model)] = cache
    return model(input_ids=ids, attention_mask=mask, use_cache=cache is not None, **keywords)


def generate(model, cache, **keywords):
    keywords[cache_keyword(model)] = cache
    return model.generate(IDS, attention_mask=ONES, max_new_tokens=4, do_sample=False, **keywords)


def assert_all_free(runtime):
    runtime.table.check()
    assert runtime.table.allocator.num_free_pages == runtime.table.allocator.num_pages


# Models


def test_a_model_that_does_not_use_the_interface():
    config = transformers.BloomConfig(vocab_size=97, hidden_size=32, n_layer=1, n_head=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="anyattn").eval()
    with pytest.raises(ContractError, match="computes with its attention mask itself"):
        forward(model)
    for make in (PagedCache, PagedGenerator):
        with pytest.raises(ContractError, match="does not use transformers' AttentionInterface"):
            make(model, num_pages=8)


def test_a_model_whose_keys_change_between_cache_and_attention(tiny):
    model = tiny("deepseek_v3")
    if not hasattr(model.model.layers[0].self_attn, "expand_kv"):
        pytest.skip("needs a transformers that caches DeepSeek's latents: 5.17")
    model.set_attn_implementation("anyattn")
    with pytest.raises(ContractError, match="changes them in between"):
        PagedCache(model, num_pages=8)


@pytest.mark.parametrize(("name", "layer_type"), [("llama4_text", "chunked_attention"), ("lfm2", "conv")])
def test_a_model_with_layers_of_another_type(tiny, name, layer_type):
    model = tiny(name)
    for make in (PagedCache, PagedGenerator):
        with pytest.raises(ContractError, match=f"layers of type {layer_type}"):
            make(model, num_pages=8)
    assert model.config._attn_implementation == "eager"


def test_a_model_in_which_tokens_meet_elsewhere_than_in_attention(llama):
    mixer = llama.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    with mixer, pytest.raises(ContractError, match="lets tokens meet elsewhere"):
        PagedGenerator(llama, num_pages=8)


def test_a_model_in_training(llama):
    llama.train()
    try:
        for make in (PagedCache, PagedGenerator):
            with pytest.raises(ContractError, match=r"call model\.eval"):
                make(llama, num_pages=8)
    finally:
        llama.eval()


def test_an_encoder_decoder_model():
    config = transformers.BartConfig(vocab_size=97, d_model=32, encoder_layers=1, decoder_layers=1)
    model = transformers.BartForConditionalGeneration(config).eval()
    with pytest.raises(ContractError, match="encoder-decoder"):
        PagedGenerator(model, num_pages=8)


# Calls


def test_dropout_and_gradients(llama):
    llama.train()
    attentions = [layer.self_attn for layer in llama.model.layers]
    try:
        for attention in attentions:
            attention.attention_dropout = 0.1
        with pytest.raises(ContractError, match=r"asks for dropout 0\.1"):
            forward(llama)
    finally:
        llama.eval()
        for attention in attentions:
            attention.attention_dropout = 0.0
    with pytest.raises(ContractError, match=r"under torch\.no_grad"):
        llama(input_ids=IDS)


def test_a_whole_mask(llama):
    with pytest.raises(ContractError, match=r"whole \(4D\) masks are not served"):
        forward(llama, mask=torch.ones(2, 1, 10, 10, dtype=torch.bool))


def test_packed_sequences(llama):
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3]] * 2)
    with pytest.raises(SpecError, match="packed training sequences"):
        forward(llama, mask=None, position_ids=positions)


def test_chunked_attention_beyond_its_first_chunk(tiny):
    model = tiny("llama4_text")
    expected = forward(model, IDS[:, :6], ONES[:, :6]).logits
    model.set_attn_implementation("anyattn")
    assert (forward(model, IDS[:, :6], ONES[:, :6]).logits - expected).abs().max() < 1e-4
    with pytest.raises(SpecError, match="chunked attention"):
        forward(model)


def test_padding_between_tokens_with_a_window_but_not_without_one(tiny):
    holes = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
    for name in ("llama", "mistral"):
        model = tiny(name)
        expected = forward(model, mask=holes).logits
        model.set_attn_implementation("anyattn")
        if name == "mistral":
            with pytest.raises(SpecError, match="pad on one side only"):
                forward(model, mask=holes)
        else:
            assert (forward(model, mask=holes).logits - expected)[holes.bool()].abs().max() < 1e-4


class Module(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def attend(q_length=3, kv_length=3, mask="causal", **keywords):
    q, k = (torch.arange(2.0 * length * 8).view(1, 2, length, 8).sin() for length in (q_length, kv_length))
    if mask == "causal":
        mask = StepMask.unpadded(1, q_length, kv_length, causal=True)
    return attention_forward(Module(), q, k, k, mask, **keywords)[0]


def test_what_no_spec_stands_for():
    with pytest.raises(ContractError, match="a position bias"):
        attend(position_bias=torch.zeros(1, 2, 3, 3))
    with pytest.raises(ContractError, match="packed sequences"):
        attend(cu_seq_lens_q=torch.tensor([0, 3]))
    with pytest.warns(UserWarning, match="without effect"):
        attend(output_attentions=True)


def test_a_window_that_the_mask_does_not_have_and_one_that_decides_nothing():
    assert torch.equal(attend(sliding_window=3), attend())
    with pytest.raises(ContractError, match="one of them is wrong"):
        attend(sliding_window=2)


def test_a_call_without_a_mask_is_served_where_it_is_clear():
    assert torch.equal(attend(mask=None), attend())
    assert torch.equal(attend(q_length=1, mask=None, sliding_window=3), attend(q_length=1))
    with pytest.raises(ContractError, match="passes no mask for 2 queries and 3 keys"):
        attend(q_length=2, mask=None)
    with pytest.raises(ContractError, match="passes no mask that has it"):
        attend(mask=None, sliding_window=2)


def test_a_mask_of_other_lengths():
    with pytest.raises(ContractError, match="leave the cache out"):
        attend(mask=StepMask.unpadded(1, 3, 5, causal=True))


def test_scratch_memory_can_be_released_between_steps():
    before = attend()
    release_scratch()
    assert torch.equal(attend(), before)


# PagedCache


def test_beam_search_on_a_paged_cache(llama, cache):
    with pytest.raises(ContractError, match=r"does not serve beam search.*Leave the cache out"):
        generate(llama, cache, num_beams=3)
    assert_all_free(cache.runtime)


def test_rearranging_a_paged_cache(llama, cache):
    forward(llama, cache=cache)
    cache.crop(0)
    for rearrange in (
        lambda: cache.crop(-1),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices([0]),
        lambda: cache.layers[0].update(None, None),
    ):
        with pytest.raises(ContractError):
            rearrange()
    assert_all_free(cache.runtime)


def test_a_paged_cache_needs_the_model_to_attend_through_anyattn(llama):
    llama.set_attn_implementation("sdpa")
    with pytest.raises(ContractError, match=r'set_attn_implementation\("anyattn"\)'):
        PagedCache(llama, num_pages=8)


def test_a_paged_cache_notices_when_the_model_attends_otherwise(llama, cache):
    llama.set_attn_implementation("sdpa")
    with pytest.raises(ContractError, match="layer 0 did not attend to what this cache handed out"):
        forward(llama, cache=cache)
    cache.reset()
    llama.set_attn_implementation("anyattn")
    forward(llama, cache=cache)


def test_a_forward_that_stopped_halfway_is_noticed_by_the_next(llama, cache):
    def fail(*args):
        raise RuntimeError("out of luck")

    with llama.model.layers[2].mlp.register_forward_hook(fail), pytest.raises(RuntimeError, match="out of luck"):
        forward(llama, cache=cache)
    with pytest.raises(ContractError, match=r"reset\(\) the cache"):
        forward(llama, cache=cache)
    cache.reset()
    assert_all_free(cache.runtime)
    forward(llama, cache=cache)


def test_too_few_pages_leave_a_paged_cache_as_it_was(llama):
    cache = PagedCache(llama, num_pages=8, page_size=4)
    with pytest.raises(OutOfPagesError):
        forward(llama, torch.cat([IDS, IDS], dim=1), torch.ones(2, 20, dtype=torch.long), cache=cache)
    assert_all_free(cache.runtime)
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(llama, cache)[:, :12], generate(llama, None)[:, :12])
    assert cache.get_seq_length() == 13
    with pytest.raises(OutOfPagesError):
        forward(llama, IDS, torch.ones(2, 23, dtype=torch.long), cache=cache)
    assert cache.get_seq_length() == 13
    cache.runtime.table.check()


def test_padding_that_changes_and_other_rows(llama, cache):
    forward(llama, IDS[:, :6], ONES[:, :6], cache=cache)
    changed = torch.ones(2, 7, dtype=torch.long)
    changed[0, 2] = 0
    with pytest.raises(ContractError, match="calls a token padding that is in the cache"):
        forward(llama, IDS[:, 6:7], changed, cache=cache)
    with pytest.raises(ContractError, match="holds 2 rows, not 1"):
        forward(llama, IDS[:1, 6:7], torch.ones(1, 7, dtype=torch.long), cache=cache)
    expected = forward(llama).logits[:, 6:7]
    assert (forward(llama, IDS[:, 6:7], ONES[:, :7], cache=cache).logits - expected).abs().max() < 1e-4


def test_padding_between_tokens_in_a_paged_cache_with_a_window(mistral):
    cache = PagedCache(mistral, num_pages=16, page_size=4)
    holes = ONES.clone()
    holes[0, 4] = 0
    with pytest.raises(ContractError, match="padding on one side only"):
        forward(mistral, mask=holes, cache=cache)
    assert_all_free(cache.runtime)


def test_rows_that_are_padding_as_a_whole_give_zeros_and_take_no_pages(llama, cache):
    mask = ONES.clone()
    mask[1] = 0
    forward(llama, mask=mask, cache=cache)
    assert cache.runtime.table.lengths(cache._seqs) == [10, 0]


# PagedGenerator


def test_a_request_that_can_never_fit_stops_before_anything_starts(generator):
    tokens = []
    for prompts, new, match in (
        ([[5] * 4, [5] * 30], 4, "prompt 1 can never fit: it is 30 tokens"),
        ([[5] * 4, []], 4, "prompt 1 is empty"),
        ([[5, 97]], 4, "they are from 0 to 96"),
        ([[5, -1]], 4, "they are from 0 to 96"),
        ([[5, 1.5]], 4, "must be a list of token ids"),
        (["word"], 4, "must be a list of token ids"),
        ([[5]], -1, "must not be negative"),
    ):
        with pytest.raises(ContractError, match=match):
            generator.generate(prompts, max_new_tokens=new, on_token=lambda *token: tokens.append(token))
    assert tokens == []
    assert_all_free(generator.runtime)


def test_prompts_may_be_tensors(generator):
    lists, tensors = [[5, 6]], torch.tensor([[5, 6]])
    expected = generator.generate(lists, max_new_tokens=3, eos_token_ids=[])
    assert generator.generate(tensors, max_new_tokens=3, eos_token_ids=[]) == expected


def test_a_request_longer_than_the_models_positions(llama):
    generator = PagedGenerator(llama, page_size=16, max_num_seqs=2)
    assert generator.runtime.table.allocator.num_pages == 2 * 256 // 16
    with pytest.raises(ContractError, match="more than the 256 positions"):
        generator.generate([[5] * 250], max_new_tokens=8)
    (result,) = generator.generate([[5] * 250], max_new_tokens=7, eos_token_ids=[])
    assert len(result.token_ids) == 7


def test_sizes_that_mean_nothing(llama):
    for keywords in ({"max_batch_tokens": 0}, {"max_num_seqs": 0}, {"max_seq_len": 0}):
        with pytest.raises(ContractError, match="must be at least 1"):
            PagedGenerator(llama, num_pages=8, **keywords)


def test_no_new_tokens_and_no_prompts_are_no_work(generator):
    assert [result.token_ids for result in generator.generate([[5], [6]], max_new_tokens=0)] == [(), ()]
    assert generator.generate([], max_new_tokens=5) == []


def test_an_exception_gives_all_pages_back_and_the_model_its_attention(generator, llama):
    def fail(request, token):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generator.generate([[5] * 9, [6] * 3], max_new_tokens=5, on_token=fail)
    assert_all_free(generator.runtime)
    assert llama.config._attn_implementation == "anyattn"
    with llama.model.layers[1].mlp.register_forward_hook(fail), pytest.raises((KeyboardInterrupt, TypeError)):
        generator.generate([[5] * 9, [6] * 3], max_new_tokens=5)
    assert_all_free(generator.runtime)
    assert len(generator.generate([[5] * 9], max_new_tokens=5, eos_token_ids=[])[0].token_ids) == 5


def test_while_a_stream_is_open_the_model_and_the_generator_serve_nothing_else(generator, llama):
    stream = generator.stream([[5] * 9, [6] * 3], max_new_tokens=5, eos_token_ids=[])
    next(stream)
    with pytest.raises(ContractError, match="outside a PagedGenerator"):
        forward(llama)
    with pytest.raises(ContractError, match="at work"):
        generator.generate([[5]], max_new_tokens=1)
    stream.close()
    assert_all_free(generator.runtime)
    assert len(generator.generate([[5]], max_new_tokens=1)) == 1


def test_a_model_taken_back_from_an_open_stream_is_noticed(generator, llama):
    stream = generator.stream([[5] * 9, [6] * 3], max_new_tokens=5, eos_token_ids=[])
    next(stream)
    llama.set_attn_implementation("sdpa")
    with pytest.raises(ContractError, match="4 layers did not attend through this generator"):
        list(stream)
    assert_all_free(generator.runtime)


def test_pages_held_by_somebody_else_are_not_waited_for(generator):
    (seq,) = generator.runtime.new_sequences(1)
    generator.runtime.extend([seq], [32])
    with pytest.raises(ContractError, match="somebody else holds sequences"):
        generator.generate([[5]], max_new_tokens=1)
    generator.runtime.free([seq])
    assert len(generator.generate([[5]], max_new_tokens=1)) == 1


def test_a_layer_that_changed_since_the_generator_was_made(generator, llama):
    attention = llama.model.layers[1].self_attn
    scaling, attention.scaling = attention.scaling, 0.5
    try:
        with pytest.raises(ContractError, match="make it anew"):
            generator.generate([[5]], max_new_tokens=1)
    finally:
        attention.scaling = scaling
    assert_all_free(generator.runtime)


def test_rotary_embeddings_that_change_with_length_are_served_within_their_original_length():
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    )  # fmt: skip
    generator = PagedGenerator(transformers.LlamaForCausalLM(config).eval(), num_pages=64, page_size=4)
    with pytest.raises(ContractError, match="more than the 64 positions"):
        generator.generate([[5] * 64], max_new_tokens=2)

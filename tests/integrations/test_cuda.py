"""On an NVIDIA GPU, logits of tiny random models equal transformers' eager on the same GPU, in float32."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from anyattn.integrations.transformers import PagedCache, PagedGenerator  # noqa: E402
from anyattn.integrations.transformers.probe import cache_keyword  # noqa: E402

pytestmark = pytest.mark.cuda

TOLERANCE = 1e-4  # sums in another order: some 1e-6 of logits of about 5, with TF32 off, as torch has it by default


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gemma2"])
def test_logits_of_every_way_into_the_pages(tiny, name):
    model = copy.deepcopy(tiny(name)).to("cuda")
    ids = torch.randint(3, 97, (3, 14), generator=torch.Generator().manual_seed(1)).to("cuda")
    mask = torch.tensor([[0] * 4 + [1] * 10, [0] + [1] * 13, [1] * 14], device="cuda")
    keywords = {
        "attention_mask": mask,
        "min_new_tokens": 12,
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    expected = model.generate(ids, **keywords)
    model.set_attn_implementation("anyattn")
    cache = {cache_keyword(model): PagedCache(model, num_pages=60, page_size=16)}
    for own in ({}, {"use_cache": False}, cache):
        out = model.generate(ids, **keywords, **own)
        assert torch.equal(out.sequences, expected.sequences)
        assert (torch.stack(out.logits) - torch.stack(expected.logits)).abs().max() < TOLERANCE
    generator = PagedGenerator(model, num_pages=40, page_size=16, max_batch_tokens=7)
    prompts = [row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True)]
    results = generator.generate(prompts, max_new_tokens=12, eos_token_ids=[])
    assert [list(result.token_ids) for result in results] == expected.sequences[:, 14:].tolist()
    generator.runtime.table.check()
    assert generator.runtime.table.allocator.num_free_pages == 40


def test_the_memory_facts_size_the_pages(tiny):
    generator = PagedGenerator(copy.deepcopy(tiny("llama")).to("cuda"), max_num_seqs=4)
    assert generator.runtime.device == torch.device("cuda", 0)
    assert generator.runtime.table.allocator.num_pages * generator.runtime.table.page_size >= 4 * 256

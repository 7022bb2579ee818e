"""DeepSeek-V3's attention layers, computed from their own weights through an MLA runtime, equal their eager output.

The runtime caches what DeepSeek-V2 (arXiv:2405.04434, section 2.1) calls the latent and the rotated key, and takes the
up-projections from `bind_mla`.
"""

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave  # noqa: E402

import anyattn  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4  # float32; absorbing the up-projections changes the order of sums


def bound_runtime(attention, backend, page_size):
    """A runtime of one layer with the layer's up-projections."""
    config = attention.config
    spec = anyattn.AttentionSpec.mla(
        num_qo_heads=attention.num_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_rope_head_dim=config.qk_rope_head_dim,
        qk_nope_head_dim=config.qk_nope_head_dim,
        v_head_dim=config.v_head_dim,
        sm_scale=attention.scaling,
        dtype="float32",
    )
    runtime = anyattn.create_runtime(
        spec, num_layers=1, num_pages=32, page_size=page_size, backend=backend, device="cpu"
    )
    up = attention.kv_b_proj.weight.detach().view(attention.num_heads, -1, config.kv_lora_rank)
    w_uk, w_uv = up.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    runtime.bind_mla(0, w_uk.contiguous(), w_uv.transpose(1, 2).contiguous())
    return runtime


def projected(attention, hidden, cos, sin):
    """q [T, heads, nope + rope] and k [T, latent + rope] of tokens, hidden [T, hidden_size], rotated by the layer."""
    config = attention.config
    q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
    q_pass, q_rope = q.view(len(hidden), attention.num_heads, -1).split(
        [config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1
    )
    latent, k_rope = attention.kv_a_proj_with_mqa(hidden).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
    q_rope, k_rope = apply_rotary_pos_emb_interleave(
        q_rope.transpose(0, 1)[None], k_rope[None, None], cos[None], sin[None]
    )
    return (
        torch.cat([q_pass, q_rope[0].transpose(0, 1)], dim=-1),
        torch.cat([attention.kv_a_layernorm(latent), k_rope[0, 0]], dim=-1),
    )


@pytest.mark.parametrize("backend", ["reference", "torch_native"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param([[17, 9]], id="prefill"),
        pytest.param([[6, 2], [6, 6], [5, 1]], id="chunked prefill"),
        pytest.param([[12, 4], *([1, 1] for _ in range(5))], id="prefill and decode"),
        pytest.param([[17, 0], [0, 8], [0, 1]], id="one after the other"),
    ],
)
@torch.no_grad()
def test_the_layers_output_is_that_of_eager(tiny, backend, page_size, layer, chunks):
    model = tiny("deepseek_v3")
    assert model.config.rope_interleave
    attention = model.model.layers[layer].self_attn
    lengths = [sum(chunk[row] for chunk in chunks) for row in range(2)]
    hidden = torch.randn(2, max(lengths), model.config.hidden_size, generator=torch.Generator().manual_seed(layer))
    cos, sin = model.model.rotary_emb(hidden, torch.arange(max(lengths))[None])
    hidden_mask = torch.full((max(lengths), max(lengths)), float("-inf")).triu(1)[None, None]
    expected = attention(hidden_states=hidden, position_embeddings=(cos, sin), attention_mask=hidden_mask)[0]

    runtime = bound_runtime(attention, backend, page_size)
    seqs = runtime.new_sequences(2)
    outputs = [[], []]
    for chunk in chunks:
        batch = runtime.extend(seqs, chunk)
        plan = runtime.plan(batch)
        rows = torch.repeat_interleave(torch.arange(2), torch.tensor(chunk))
        q, k = projected(
            attention, hidden[rows, batch.positions], cos[0, batch.positions], sin[0, batch.positions]
        )
        out = attention.o_proj(runtime.run(0, q, k, None, plan).flatten(1))
        for row in range(2):
            outputs[row].append(out[rows == row])
    for row, length in enumerate(lengths):
        assert (torch.cat(outputs[row]) - expected[row, :length]).abs().max() < TOLERANCE
    runtime.free(seqs)
    runtime.table.check()

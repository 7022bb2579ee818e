"""The `triton` backend on an NVIDIA GPU: batches of very different lengths, and what it compiles when."""

import functools

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, discovery
from anyattn.attention.triton_attention.backend import TritonBackend

pytestmark = pytest.mark.cuda

GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
ODD = AttentionSpec(num_qo_heads=14, num_kv_heads=2, head_dim=72, sliding_window=1000)
LENS = [131072, 1, 63, 65, 1000, 4097, 700, 5, 3000, 128, 64]
MIXED = [70, 1, 63, 65, 1, 97, 100, 5, 20, 1, 64]


def mla(heads):
    return AttentionSpec.mla(num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=192**-0.5)


@pytest.fixture(scope="module")
def gpu():
    return discovery.usable_device("cuda")


class PlainTriton(TritonBackend):
    """Without Gluon."""

    uses_gluon = False


@pytest.mark.parametrize("backend", [TritonBackend, PlainTriton], ids=["as_it_is", "plain"])
@pytest.mark.parametrize("new", [[1] * len(LENS), [3] * len(LENS), MIXED], ids=["decode", "verify", "mixed"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "spec",
    [GQA, ODD, mla(8), mla(16), mla(32), mla(128)],
    ids=["gqa", "odd", "mla8", "mla16", "mla32", "mla128"],
)
def test_sequences_of_1_to_131072_tokens_share_a_batch(gpu, spec, page_size, new, backend):
    lens = [max(length, count) for length, count in zip(LENS, new, strict=True)]
    pages = sum(-(-length // page_size) for length in lens)
    rt = anyattn.create_runtime(
        spec, num_layers=1, num_pages=pages, page_size=page_size, backend="triton", device=gpu, layout="NHD"
    )
    kv = rt.pools[0].layers[0]
    with torch.no_grad():
        kv.k.normal_()
        kv.v.normal_()
        kv.k[0], kv.v[0] = torch.nan, torch.nan
    seqs = rt.new_sequences(len(lens))
    order = torch.randperm(len(lens)).tolist()  # pages of one sequence do not lie in the order of the batch
    rt.extend([seqs[i] for i in order], [lens[i] - new[i] for i in order])
    batch = rt.extend(seqs, new)
    with torch.no_grad():
        kv.k[0], kv.v[0] = torch.nan, torch.nan
    q = torch.randn(sum(new), spec.num_qo_heads, spec.head_dim, dtype=torch.bfloat16, device=rt.device)
    used = backend(spec, rt.pools[0].cache, rt.selection.platform)
    out = torch.full((sum(new), spec.num_qo_heads, spec.vo_head_dim), torch.nan, dtype=torch.bfloat16, device=rt.device)
    used.run(q, kv, used.plan(batch), out)
    k, v = kv.nhd()
    row = 0
    for i, (length, count) in enumerate(zip(lens, new, strict=True)):
        table = batch.block_table[i, : -(-length // page_size)].long()
        keys, values = (part[table].flatten(0, 1)[:length].double() for part in (k, v))
        for token in {0, count // 2, count - 1}:
            end = length - count + token + 1
            begin = max(end - spec.sliding_window, 0) if spec.sliding_window else 0
            grouped = q[row + token].double().view(spec.num_kv_heads, spec.group_size, spec.head_dim)
            scores = torch.einsum("hgd,thd->hgt", grouped, keys[begin:end]) * spec.scale
            wanted = torch.einsum("hgt,thd->hgd", scores.softmax(-1), values[begin:end]).flatten(0, 1)
            error = (out[row + token].double() - wanted).norm() / wanted.norm()
            assert error < 0.01, f"sequence {i} of {length} tokens, new token {token}"  # bfloat16 rounds by 0.004
        row += count


@pytest.fixture
def compilations(monkeypatch):
    """Names of the kernels that Triton compiles, or takes from its cache on disk."""
    triton = pytest.importorskip("triton")
    names = []

    def note(*, fn, **_):
        names.append(fn.name.rpartition(".")[2])

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    return names


def step(rt, seqs, new):
    spec = rt.layer_specs[0]
    batch = rt.extend(seqs, new)
    make = functools.partial(torch.zeros, dtype=torch.bfloat16, device=rt.device)
    tokens = sum(new)
    q = make(tokens, spec.num_qo_heads, spec.head_dim)
    if spec.is_mla:
        rt.run(0, q, make(tokens, spec.head_dim), None, rt.plan(batch))
    else:
        kv = make(tokens, spec.num_kv_heads, spec.head_dim)
        rt.run(0, q, kv, kv, rt.plan(batch))


@pytest.mark.parametrize("new", [1, 4, 300], ids=["decode", "verify", "prefill"])
@pytest.mark.parametrize("spec", [GQA.replace(head_dim=64), mla(16).replace(sm_scale=0.2)], ids=["gqa", "mla"])
def test_a_first_step_compiles_at_most_four_kernels(gpu, spec, new, compilations):
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=64, page_size=32, backend="triton", device=gpu)
    seqs = rt.new_sequences(2)
    compilations.clear()  # the pool's
    step(rt, seqs, [new, new])
    ours = {"attend", "merge", "ranges", "parts", "hopper_mla", "hopper_extend"}
    own = [name for name in compilations if name.removesuffix("_kernel") in ours]
    assert 0 < len(own) <= 4


@pytest.mark.parametrize("spec", [GQA.replace(num_qo_heads=16), mla(64)], ids=["gqa", "mla"])
def test_after_a_warm_up_no_step_compiles(gpu, spec, compilations):
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=4000, page_size=16, backend="triton", device=gpu)
    rt.warmup()
    assert compilations
    compilations.clear()
    for count, new in ((1, 1), (3, 500), (3, 1), (40, 1), (40, 3), (7, 70), (7, 1)):
        seqs = rt.new_sequences(count)
        step(rt, seqs, [new] * count)
        step(rt, seqs, [1] * count)
        step(rt, seqs, [1] * (count - 1) + [33])
        rt.free(seqs)
    assert compilations == []

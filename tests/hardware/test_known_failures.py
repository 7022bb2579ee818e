"""What other engines list as known failures of their backends, with each of ours that serves it, on an NVIDIA GPU:
extends of lengths that rise and fall, interleaved pages with MLA, and trees.
"""

import secrets
import subprocess
import sys

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, discovery
from anyattn.errors import NoBackendError
from anyattn.testing.numerics.case import Case
from anyattn.testing.numerics.checks import run_case

pytestmark = pytest.mark.cuda

HEADS = AttentionSpec(num_qo_heads=28, num_kv_heads=4, head_dim=128, return_lse=True)
MLA = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1, return_lse=True)
BACKENDS = ("fa3", "flashinfer", "flashinfer_mla", "flashmla", "torch_native")


@pytest.fixture(scope="module")
def gpu():
    return discovery.usable_device("cuda")


def refused(name, spec, gpu, page_size, roles):
    """Why a backend does not serve it here; none where it does."""
    found = discovery.candidates(discovery.plugin_manager())
    candidate = next(each for each in found.backends if each.name == name)
    reasons = [*candidate.missing]
    for role in roles:
        reasons += candidate.capabilities.reject_reasons(spec, gpu, role, page_size=page_size)
    return reasons


def run(name, gpu, spec, page_size, steps, roles=("prefill",), **fields):
    if reasons := refused(name, spec, gpu, page_size, roles):
        pytest.skip(f"{name} refuses it: {reasons[0]}")
    backend = discovery.plugin_manager().attention_backends()[name].load()
    case = Case(name="known failure", spec=spec, page_size=page_size, layout="NHD", steps=steps, **fields)
    seed = secrets.randbelow(1 << 31)
    print("seed", seed)
    run_case(backend, case, gpu, seed)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("spec", [HEADS, MLA], ids=["heads", "MLA"])
@pytest.mark.parametrize("name", BACKENDS)
def test_extends_of_lengths_that_rise_and_fall(name, spec, page_size, gpu):
    steps = ((30, 5, 200, 2, 131), (64, 1, 3, 120, 7), (5, 90, 2, 31, 250), (1, 1, 1, 1, 1))
    run(name, gpu, spec, page_size, steps)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", BACKENDS)
def test_interleaved_pages_with_mla(name, page_size, gpu):
    """Sequences that grow in turns have pages that lie between those of each other."""
    turns = tuple(tuple(65 if turn == i else 0 for i in range(4)) for turn in (0, 2, 1, 3, 0, 1, 2, 3))
    run(name, gpu, MLA, page_size, (*turns, *((1,) * 4,) * 3), roles=("prefill", "decode"))


@pytest.mark.parametrize("name", BACKENDS)
def test_interleaved_pages_with_decode_alone(name, gpu):
    run(name, gpu, MLA, 64, ((1,) * 7,) * 3, roles=("decode",), stored_before=(700, 3, 64, 65, 128, 1, 250))


@pytest.mark.parametrize("trees", ["each", "some", "arbitrary"])
@pytest.mark.parametrize("name", BACKENDS)
def test_trees(name, trees, gpu):
    steps = ((7, 7, 7, 7), (3, 12, 1, 9))
    run(name, gpu, HEADS.replace(tree_mask=True), 16, steps, stored_before=(300, 1, 17, 64), trees=trees)


def test_a_process_that_forks_after_detection_can_use_the_gpu():
    program = (
        "import os, anyattn\n"
        "from anyattn import AttentionSpec\n"
        "spec = AttentionSpec(num_qo_heads=4, num_kv_heads=2, head_dim=64)\n"
        "assert any(device.kind == 'cuda' for device in anyattn.detect().devices)\n"
        "anyattn.survey(spec, device='cuda')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    import torch\n"
        "    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=8, device='cuda', backend='torch_native')\n"
        "    plan = rt.plan(rt.extend(rt.new_sequences(1), [5]))\n"
        "    q, k, v = (torch.randn(5, n, 64, dtype=torch.bfloat16, device='cuda') for n in (4, 2, 2))\n"
        "    assert rt.run(0, q, k, v, plan).isfinite().all()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("heads", [128, 64, 32, 16, 8])
@pytest.mark.parametrize("counts", [(1, 1, 1), (300, 2, 40), (1, 700, 3)])
def test_mla_before_absorption_for_every_degree_of_tensor_parallelism(heads, counts, gpu):
    """DeepSeek's sizes, 128 heads over 1 to 16 devices, against heads that were expanded in float32."""
    spec = AttentionSpec.mla(
        num_qo_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        sm_scale=192**-0.5,
    )  # fmt: skip
    rt = anyattn.create_runtime(spec, num_layers=1, num_pages=400, device=gpu.torch_device, page_size=64)
    options = {"dtype": torch.bfloat16, "device": rt.device}
    w_uk, w_uv = (torch.randn(heads, a, b, **options) / 512**0.5 for a, b in ((128, 512), (512, 128)))
    rt.bind_mla(0, w_uk, w_uv)
    seqs, before = rt.new_sequences(3), (1000, 3, 64)
    latents = []
    for lengths in (before, counts):
        q = torch.randn(sum(lengths), heads, 192, **options)
        new = torch.randn(sum(lengths), 576, **options)
        plan = rt.plan(rt.extend(seqs, lengths))
        out = rt.run(0, q, new, None, plan)
        latents.append(new.split(lengths))
    assert bool(plan.mla[0].passes) == (max(counts) >= 300)
    for i, (queries, got) in enumerate(zip(q.split(counts), out.split(counts), strict=True)):
        latent = torch.cat([latents[0][i], latents[1][i]]).float()
        k = torch.einsum("tr,hnr->thn", latent[:, :512], w_uk.float())
        k = torch.cat([k, latent[:, None, 512:].expand(-1, heads, -1)], dim=-1)
        v = torch.einsum("tr,hrv->thv", latent[:, :512], w_uv.float())
        scores = torch.einsum("qhd,khd->hqk", queries.float(), k) * spec.scale
        position = before[i] + torch.arange(counts[i], device=rt.device)[:, None]
        seen = torch.arange(k.shape[0], device=rt.device) <= position
        wanted = torch.einsum("hqk,khv->qhv", scores.masked_fill(~seen, float("-inf")).softmax(-1), v)
        # Two roundings of what is multiplied, to 8 bits, and one of the result.
        assert (got.float() - wanted).abs().max() <= 3 * 2**-8 * wanted.abs().max()


def test_what_cannot_be_served_is_refused_before_anything_is_made(gpu):
    spec = AttentionSpec(num_qo_heads=28, num_kv_heads=4, head_dim=128, alibi=True)
    for name in ("fa3", "flashinfer"):
        with pytest.raises(NoBackendError, match="alibi"):
            anyattn.create_runtime(spec, num_layers=1, num_pages=4, device=gpu.torch_device, backend=name)

"""The plain kernels against the float64 reference, in batches of very different lengths."""

import dataclasses
import importlib.util
import secrets
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from anyattn.attention.batch import Batch, checked_tree_masks
from anyattn.attention.reference import ReferenceBackend
from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool, MLAPool, quantize

_spec = importlib.util.spec_from_file_location("triton_interpreted", Path(__file__).with_name("interpreted.py"))
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
CPU, InterpretedTriton = _module.CPU, _module.InterpretedTriton

GQA = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=32, dtype="float16", return_lse=True)
MLA = AttentionSpec.mla(
    num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.05, dtype="float16", return_lse=True
)
LENS = [700, 1, 63, 65, 301, 128]
STEPS = {"decode": [1] * 6, "verify": [3, 1, 4, 2, 3, 4], "mixed": [1, 1, 40, 65, 1, 33]}


def step(spec, new, page_size=16, layout="NHD", *, seed, masks=None):
    """A batch of LENS, its pool with NaN wherever no sequence's tokens are, but behind the ends, where there is 0."""
    torch.manual_seed(seed)
    lens = [max(length, count) for length, count in zip(LENS, new, strict=True)]
    num_pages = sum(-(-length // page_size) for length in lens) + 5
    table = PageTable(PagedAllocator(num_pages, page_size), page_size, device="cpu")
    cache = spec.cache_spec(num_layers=1, page_size=page_size, layout=layout)
    pool = (MLAPool if spec.is_mla else MHAPool)(cache, num_pages, "cpu")
    seqs = table.new_sequences(len(lens))
    order = torch.randperm(len(lens)).tolist()
    table.extend([seqs[i] for i in order], [lens[i] - new[i] for i in order])
    view = table.extend(seqs, new)
    batch = Batch.from_view(view, view.tensors(), None if masks is None else checked_tree_masks(masks, new, "cpu"))
    kv = pool.layers[0]
    scales = (0.5, 0.25)
    if spec.kv_scale_per_head:
        scales = torch.tensor([0.5, 2.0]), torch.tensor([0.25, 1.5])
    if spec.storage_dtype.startswith("float8"):
        pool.set_scales(0, *((scales[0],) * 2 if spec.is_mla else scales))
        kv = pool.layers[0]
    for part, scale in zip(kv.nhd()[: 1 if spec.is_mla else 2], (kv.k_scale, kv.v_scale), strict=False):
        stored = getattr(torch, spec.storage_dtype)
        raw = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
        raw.fill_(0x7F if part.dtype.itemsize == 1 else torch.nan)
        for i, length in enumerate(lens):
            pages = batch.block_table[i, : -(-length // page_size)].long()
            values = torch.randn(pages.numel() * page_size, *part.shape[2:])
            values[length:] = 0
            values = quantize(values, scale, stored) if part.dtype.itemsize == 1 else values.to(stored)
            raw[pages] = values.view(raw.dtype).unflatten(0, (-1, page_size))
    q = torch.randn(sum(new), spec.num_qo_heads, spec.head_dim).to(getattr(torch, spec.dtype))
    more = {}
    if spec.sinks:
        more["sinks"] = torch.randn(spec.num_qo_heads)
    if spec.alibi:
        more["alibi_slopes"] = torch.rand(spec.num_qo_heads) * 0.1
    return batch, kv, cache, q, more


def attended(backend, batch, kv, q, more):
    spec = backend.spec
    out = torch.full((q.shape[0], spec.num_qo_heads, spec.vo_head_dim), torch.nan, dtype=q.dtype)
    return out, backend.run(q, kv, backend.plan(batch), out, **more)


FP8 = {"kv_dtype": "float8_e4m3fn"}
SPECS = {
    "plain": GQA,
    "window": GQA.replace(sliding_window=50),
    "cap_sinks": GQA.replace(logits_soft_cap=3.0, sinks=True),
    "alibi": GQA.replace(alibi=True, num_qo_heads=14),
    "non_causal": GQA.replace(causal=False),
    "72": GQA.replace(head_dim=72),
    "96_values_of_48": GQA.replace(head_dim=96, v_head_dim=48),
    "float32": GQA.replace(dtype="float32", head_dim=80),
    "e4m3_scales_by_head": GQA.replace(**FP8, kv_scale_per_head=True),
    "e5m2": GQA.replace(kv_dtype="float8_e5m2"),
    "e4m3fnuz": GQA.replace(kv_dtype="float8_e4m3fnuz"),
    "mla": MLA,
    "mla_of_other_sizes": AttentionSpec.mla(
        num_qo_heads=5, kv_lora_rank=48, qk_rope_head_dim=16, sm_scale=0.2, dtype="float16", return_lse=True
    ),
    "mla_e4m3": MLA.replace(**FP8, num_qo_heads=8),
    "widest": GQA.replace(head_dim=576),
}


KINDS = [(name, kind) for name in SPECS for kind in STEPS if kind != "verify" or name in ("plain", "cap_sinks", "mla")]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_sequences_of_very_different_lengths_share_a_batch(name, kind):
    spec, new, seed = SPECS[name], STEPS[kind], secrets.randbelow(1 << 31)
    page_size = (1, 3, 16, 64)[seed % 4]
    batch, kv, cache, q, more = step(spec, new, page_size, ("NHD", "HND")[seed % 2], seed=seed)
    capabilities = dataclasses.replace(
        InterpretedTriton.capabilities, kv_dtypes=InterpretedTriton.capabilities.kv_dtypes | {spec.storage_dtype}
    )
    backend = type("Backend", (InterpretedTriton,), {"capabilities": capabilities})(spec, cache, CPU)
    out, lse = attended(backend, batch, kv, q, more)
    right, right_lse = attended(ReferenceBackend(spec, cache, CPU), batch, kv, q, more)
    allowed = 2e-3 if spec.dtype == "float16" else 1e-5  # some units of the last place of values around 1
    assert (out - right).abs().max() < allowed, f"seed {seed}"
    assert (lse - right_lse).abs().max() < allowed, f"seed {seed}"


@pytest.mark.parametrize("new", [[5, 1, 4, 2, 3, 4], [40, 1, 33, 2, 3, 4]], ids=["short", "long"])
def test_trees_and_sequences_without_one_share_a_batch(new):
    spec, seed = GQA.replace(tree_mask=True), secrets.randbelow(1 << 31)
    masks = [None if i == 3 else torch.rand(count, count) > 0.5 for i, count in enumerate(new)]
    batch, kv, cache, q, more = step(spec, new, seed=seed, masks=masks)
    out, lse = attended(InterpretedTriton(spec, cache, CPU), batch, kv, q, more)
    right, right_lse = attended(ReferenceBackend(spec, cache, CPU), batch, kv, q, more)
    assert (out - right).abs().max() < 2e-3, f"seed {seed}"
    assert torch.equal(lse.isinf(), right_lse.isinf())
    assert torch.nan_to_num(lse - right_lse).abs().max() < 2e-3, f"seed {seed}"


@pytest.mark.parametrize("new", STEPS.values(), ids=STEPS)
def test_in_deterministic_mode_a_row_has_the_same_bits_whoever_its_batch_mates_are(new):
    spec = GQA.replace(deterministic=True)
    batch, kv, cache, q, more = step(spec, new, seed=secrets.randbelow(1 << 31))
    backend = InterpretedTriton(spec, cache, CPU)
    out, lse = attended(backend, batch, kv, q, more)
    for chosen in ([0], [4, 0], [2, 3, 5]):
        part, rows = batch.of_sequences(np.array(chosen))
        again, lse_again = attended(backend, part, kv, q[rows], more)
        assert torch.equal(again, out[rows])
        assert torch.equal(lse_again, lse[rows])

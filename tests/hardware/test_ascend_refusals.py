"""What Ascend's operators do not take by their documents: the emulation refuses each, and so do calls unlike theirs."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))
from ascend_emulation import FRACTAL_NZ, Npu, RefusedError

BF16, FP16, INT32 = torch.bfloat16, torch.float16, torch.int32
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def zeros(*shape, dtype=BF16):
    return torch.zeros(*shape, dtype=dtype)


def table(*shape):
    return torch.ones(*shape, dtype=INT32)


def decode(**changes):
    return {
        "query": zeros(2, 1, 4, 128), "key": zeros(5, 128, 256), "value": zeros(5, 128, 256),
        "block_table": table(2, 2), "actual_seq_lengths": [1, 1], "actual_seq_lengths_kv": [100, 200],
        "num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND", "block_size": 128, "scale": 0.1,
        "softmax_lse_flag": True, **changes,
    }  # fmt: skip


def prompt(**changes):
    masked = {"sparse_mode": 3, "atten_mask": CAUSAL}
    return decode(**{"query": zeros(2, 8, 4, 128), "actual_seq_lengths": [8, 8], **masked, **changes})


def ragged(**changes):
    return {
        "query": zeros(10, 4, 128), "key": zeros(5, 128, 256), "value": zeros(5, 128, 256), "block_table": table(2, 2),
        "actual_seq_qlen": [1, 10], "actual_seq_kvlen": [100, 200], "num_query_heads": 4, "num_key_value_heads": 2,
        "input_layout": "TND", "block_size": 128, "softmax_scale": 0.1, "sparse_mode": 3, "atten_mask": CAUSAL,
        **changes,
    }  # fmt: skip


def mla(**changes):
    apart = {
        "query": zeros(10, 4, 512), "query_rope": zeros(10, 4, 64), **keys_and_values(5, 1, 32, 128, 16),
        "key_rope": zeros(5, 1, 4, 128, 16), "num_key_value_heads": 1,
    }  # fmt: skip
    return ragged(**{**apart, **changes})


def stored(**changes):
    return {
        "key": zeros(3, 2, 128), "value": zeros(3, 2, 128), "key_cache": zeros(5, 128, 2, 128),
        "value_cache": zeros(5, 128, 2, 128), "slot_indices": torch.arange(3, dtype=INT32), **changes,
    }  # fmt: skip


def scattered(**changes):
    return {
        "key": zeros(3, 1, 512), "value": zeros(3, 1, 64), "key_cache": zeros(5, 32, 128, 16),
        "value_cache": zeros(5, 4, 128, 16), "slot_mapping": torch.arange(3, dtype=INT32), **changes,
    }  # fmt: skip


def nz(npu, pages=5, pieces=16, size=128, dtype=FP16):
    return npu.npu_format_cast(zeros(pages, pieces, size, 16, dtype=dtype), FRACTAL_NZ)


def stored_nz(npu, **changes):
    new = {key: zeros(3, 2, 128, dtype=FP16) for key in ("key", "value")}
    return stored(**{**new, "key_cache": nz(npu), "value_cache": nz(npu), **changes})


def paged(npu, **changes):
    return {
        "query": zeros(2, 4, 128, dtype=FP16), "key_cache": nz(npu), "value_cache": nz(npu), "num_kv_heads": 2,
        "num_heads": 4, "scale_value": 0.1, "block_table": table(2, 2),
        "context_lens": torch.tensor([100, 200], dtype=INT32),
        "out": zeros(2, 4, 128, dtype=FP16), **changes,
    }  # fmt: skip


def keys_and_values(*shape, dtype=BF16):
    return {"key": zeros(*shape, dtype=dtype), "value": zeros(*shape, dtype=dtype)}


def too_many(*shape):
    there = torch.empty(*shape, dtype=BF16, device="meta")
    return {"key": there, "value": there}


def wide(x, dim=-1):
    """The same elements, with as many others between them."""
    return torch.cat([x, x], dim=dim).narrow(dim, 0, x.shape[dim])


V1, V2 = "npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"
ALL = {"v1, decode": (V1, decode), "v1, prompt": (V1, prompt), "v2": (V2, ragged), "v2, MLA": (V2, mla)}
REFUSED = {
    "v1, decode": {
        "query that is not contiguous": {"query": wide(zeros(2, 1, 4, 128))},
        "keys that are not contiguous": {"key": wide(zeros(5, 128, 256))},
        "float32": {
            "query": zeros(2, 1, 4, 128, dtype=torch.float32), **keys_and_values(5, 128, 256, dtype=torch.float32)
        },
        "keys of another dtype": {"key": zeros(5, 128, 256, dtype=FP16)},
        "keys and values of other shapes": {"value": zeros(5, 128, 128)},
        "257 heads and more": {"query": zeros(2, 1, 258, 128), "num_heads": 258},
        "heads that KV heads do not divide": {"query": zeros(2, 1, 5, 128), "num_heads": 5},
        "heads that the query does not have": {"num_heads": 8},
        "130 heads for two KV heads": {"query": zeros(2, 1, 130, 128), "num_heads": 130},
        "a length for no sequence": {"actual_seq_lengths_kv": [100, 200, 300]},
        "a negative length": {"actual_seq_lengths_kv": [100, -1]},
        "lengths of queries unlike the query's": {"actual_seq_lengths": [1, 2]},
        "no lengths": {"actual_seq_lengths_kv": None},
        "a table of int64": {"block_table": table(2, 2).long()},
        "a table of too few pages": {"block_table": table(2, 1)},
        "a table of too few sequences": {"block_table": table(1, 2)},
        "a page that there is not": {"block_table": table(2, 2) * 5},
        "no table": {"block_table": None},
        "heads of 72": {"query": zeros(2, 1, 4, 72), **keys_and_values(5, 128, 144)},
        "heads of 528": {"query": zeros(2, 1, 4, 528), **keys_and_values(5, 128, 1056)},
        "KV heads of more than 65535 elements": {
            "query": zeros(2, 1, 256, 512), "num_heads": 256, "num_key_value_heads": 128,
            **keys_and_values(2, 128, 65536),
        },
        "pages of 24 tokens": {"block_size": 24, "block_table": table(2, 9), **keys_and_values(5, 24, 256)},
        "pages of 640 tokens": {"block_size": 640, **keys_and_values(5, 640, 256)},
        "pages unlike block_size": {"block_size": 256},
        "2**31 elements of keys": too_many(1 << 16, 128, 256),
        "more than 262144 keys": {"actual_seq_lengths_kv": [100, 262145], "block_table": table(2, 2049)},
        "keys with heads apart": keys_and_values(5, 128, 2, 128),
        "rope of keys alone": {"key_rope": zeros(5, 1, 4, 128, 16)},
        "another layout": {"input_layout": "BNSD"},
        "scales of quantized keys": {"dequant_scale1": torch.ones(1)},
    },
    "v1, prompt": {
        "no mask": {"atten_mask": None},
        "a mask of another size": {"atten_mask": CAUSAL[:1024, :1024].contiguous()},
        "a mask of floats": {"atten_mask": CAUSAL.float()},
        "a mask that hides the past": {"atten_mask": CAUSAL.T.contiguous()},
        "a mask without sparse_mode 3": {"sparse_mode": 0},
        "more queries than keys": {"actual_seq_lengths_kv": [7, 200]},
        "65536 elements of a token's heads": {
            "query": zeros(2, 8, 128, 512), "num_heads": 128, **keys_and_values(5, 128, 1024)
        },
        "pages of 64 tokens": {"block_size": 64, "block_table": table(2, 4), **keys_and_values(5, 64, 256)},
        "layout TND": {"input_layout": "TND", "query": zeros(10, 4, 128), "actual_seq_lengths": [1, 10]},
    },
    "v2": {
        "float16": {"query": zeros(10, 4, 128, dtype=FP16), **keys_and_values(5, 128, 256, dtype=FP16)},
        "heads of 64": {"query": zeros(10, 4, 64), **keys_and_values(5, 128, 128)},
        "lengths that begin anew": {"actual_seq_qlen": [10, 1]},
        "lengths that end before the last token": {"actual_seq_qlen": [1, 9]},
        "more queries than keys": {"actual_seq_kvlen": [100, 8]},
        "4097 sequences": {
            "query": zeros(4097, 4, 128), "actual_seq_qlen": list(range(1, 4098)), "actual_seq_kvlen": [1] * 4097,
            "block_table": table(4097, 1),
        },
        "pages of 192 tokens": {"block_size": 192, **keys_and_values(5, 192, 256)},
        "more than 1M tokens": {
            "query": torch.empty((1 << 20) + 1, 4, 128, dtype=BF16, device="meta"), "block_table": table(1, 8193),
            "actual_seq_qlen": [(1 << 20) + 1], "actual_seq_kvlen": [(1 << 20) + 1],
        },
        "more than 262144 keys of one query": {
            "query": zeros(1, 4, 128), "actual_seq_qlen": [1], "actual_seq_kvlen": [262145], "sparse_mode": 0,
            "atten_mask": None, "block_table": table(1, 2049),
        },
    },
    "v2, MLA": {
        "17 queries of a sequence": {
            "query": zeros(18, 4, 512), "query_rope": zeros(18, 4, 64), "actual_seq_qlen": [1, 18]
        },
        "a sequence without queries": {"actual_seq_qlen": [0, 10]},
        "no mask for several queries": {"sparse_mode": 0, "atten_mask": None},
        "3 heads": {"query": zeros(10, 3, 512), "query_rope": zeros(10, 3, 64), "num_query_heads": 3},
        "two KV heads": {"num_key_value_heads": 2},
        "latents of 256": {"query": zeros(10, 4, 256)},
        "rope of 32": {"query_rope": zeros(10, 4, 32)},
        "rope of another dtype": {"query_rope": zeros(10, 4, 64, dtype=FP16)},
        "rope of queries alone": {"key_rope": None},
        "pages of 64 tokens": {
            "block_size": 64, "block_table": table(2, 4), "key_rope": zeros(5, 1, 4, 64, 16),
            **keys_and_values(5, 1, 32, 64, 16),
        },
        "latents that are not in NZ": keys_and_values(5, 128, 512),
        "rope parts of other pages": {"key_rope": zeros(4, 1, 4, 128, 16)},
        "rope parts that are a view of joined rows": {"key_rope": wide(zeros(5, 1, 4, 128, 16), 2)},
        "2**31 elements of latents": {
            **too_many(1 << 15, 1, 32, 128, 16),
            "key_rope": torch.empty(1 << 15, 1, 4, 128, 16, dtype=BF16, device="meta"),
        },
        "4097 sequences": {
            "query": zeros(4097, 4, 512), "query_rope": zeros(4097, 4, 64), "actual_seq_qlen": list(range(1, 4098)),
            "actual_seq_kvlen": [1] * 4097, "block_table": table(4097, 1), "sparse_mode": 0, "atten_mask": None,
        },
        "more than 262144 keys of one query": {
            "query": zeros(1, 4, 512), "query_rope": zeros(1, 4, 64), "actual_seq_qlen": [1],
            "actual_seq_kvlen": [262145], "sparse_mode": 0, "atten_mask": None, "block_table": table(1, 2049),
        },
    },
}  # fmt: skip
STORES = {
    "slots of int64": {"slot_indices": torch.arange(3)},
    "a slot for no token": {"slot_indices": torch.arange(4, dtype=INT32)},
    "a slot that there is not": {"slot_indices": torch.arange(638, 641, dtype=INT32)},
    "a slot below the first": {"slot_indices": torch.tensor([-1, 1, 2], dtype=INT32)},
    "keys that are not contiguous": {"key": wide(zeros(3, 2, 128))},
    "keys of another dtype": {"key": zeros(3, 2, 128, dtype=FP16)},
    "float32": {
        name: zeros(*shape, dtype=torch.float32)
        for names, shape in ((("key", "value"), (3, 2, 128)), (("key_cache", "value_cache"), (5, 128, 2, 128)))
        for name in names
    },
    "a cache of other heads": {"key_cache": zeros(5, 128, 1, 128)},
}
SCATTERS = {
    "slots of floats": {"slot_mapping": torch.arange(3.0)},
    "a slot for no token": {"slot_mapping": torch.arange(4, dtype=INT32)},
    "a slot that there is not": {"slot_mapping": torch.arange(638, 641, dtype=INT32)},
    "values that are not contiguous": {"value": wide(zeros(3, 1, 64))},
    "values of other heads": {"value": zeros(3, 2, 64)},
    "a cache of another dtype": {"key_cache": zeros(5, 32, 128, 16, dtype=FP16)},
    "rope parts that pieces of 16 do not fill": {"value": zeros(3, 1, 72)},
    "a cache of other widths": {"value_cache": zeros(5, 8, 128, 16)},
    "a cache that is not in NZ": {"value_cache": zeros(5, 128, 1, 64)},
}
INFERENCE_STORES = {
    "caches without the format": lambda npu: {"key_cache": zeros(5, 16, 128, 16, dtype=FP16)},
    "bfloat16": lambda npu: {
        **keys_and_values(3, 2, 128), "key_cache": nz(npu, dtype=BF16), "value_cache": nz(npu, dtype=BF16)
    },
    "keys and values of other sizes": lambda npu: {
        "value": zeros(3, 2, 64, dtype=FP16), "value_cache": nz(npu, pieces=8)
    },
    "pages of 24 tokens": lambda npu: {"key_cache": nz(npu, size=24), "value_cache": nz(npu, size=24)},
    "heads of 24": lambda npu: keys_and_values(3, 2, 24, dtype=FP16),
}  # fmt: skip
PAGED = {
    "caches without the format": lambda npu: {"key_cache": zeros(5, 16, 128, 16, dtype=FP16)},
    "bfloat16": lambda npu: {"query": zeros(2, 4, 128)},
    "an out that is not contiguous": lambda npu: {"out": wide(zeros(2, 4, 128, dtype=FP16))},
    "heads that the query does not have": lambda npu: {"num_heads": 8},
    "heads of 72": lambda npu: {"query": zeros(2, 4, 72, dtype=FP16), "out": zeros(2, 4, 72, dtype=FP16)},
    "pages of 24 tokens": lambda npu: {"key_cache": nz(npu, size=24), "value_cache": nz(npu, size=24)},
    "pages of 128 tokens for heads of 256": lambda npu: {
        "query": zeros(2, 4, 256, dtype=FP16), "out": zeros(2, 4, 256, dtype=FP16), "key_cache": nz(npu, pieces=32),
        "value_cache": nz(npu, pieces=32),
    },
    "values of other pages": lambda npu: {"value_cache": nz(npu, pages=4)},
    "2001 sequences": lambda npu: {
        "query": zeros(2001, 4, 128, dtype=FP16), "out": zeros(2001, 4, 128, dtype=FP16), "block_table": table(2001, 2),
        "context_lens": table(2001),
    },
    "a table of int64": lambda npu: {"block_table": table(2, 2).long()},
    "a length for no sequence": lambda npu: {"context_lens": table(3)},
}  # fmt: skip


@pytest.mark.parametrize("arch", ["ascend910b", "ascend910_93"])
@pytest.mark.parametrize("kind", ALL)
def test_fused_infer_attention_as_documented_is_taken(kind, arch):
    name, arguments = ALL[kind]
    getattr(Npu(arch), name)(**arguments())


@pytest.mark.parametrize(("kind", "what"), [(kind, what) for kind, all_of in REFUSED.items() for what in all_of])
def test_fused_infer_attention_refuses(kind, what):
    name, arguments = ALL[kind]
    with pytest.raises(RefusedError):
        getattr(Npu("ascend910b"), name)(**arguments(**REFUSED[kind][what]))


@pytest.mark.parametrize("kind", ALL)
def test_fused_infer_attention_is_not_for_the_310p(kind):
    name, arguments = ALL[kind]
    with pytest.raises(RefusedError, match="Atlas A2"):
        getattr(Npu("ascend310p"), name)(**arguments())


NO_GRAPHS = {
    "an LSE": ("ascend910b", V1, decode()),
    "layout TND for heads": ("ascend910b", V2, ragged()),
    "Atlas A3": ("ascend910_93", V2, mla()),
}


@pytest.mark.parametrize("what", NO_GRAPHS)
def test_graphs_are_refused_with(what):
    arch, name, arguments = NO_GRAPHS[what]
    with pytest.raises(RefusedError):
        getattr(Npu(arch), f"_{name}_get_max_workspace")(**arguments)
    out = [torch.empty_like(arguments["query"]), torch.empty(1)]
    with pytest.raises(RefusedError):
        getattr(Npu(arch), name).out(**arguments, workspace=torch.empty(16, dtype=torch.uint8), out=out)


def test_the_lse_of_what_graphs_have_is_nan():
    npu, arguments = Npu("ascend910b"), decode(softmax_lse_flag=False)
    workspace = npu._npu_fused_infer_attention_score_get_max_workspace(**arguments)
    out, lse = torch.empty_like(arguments["query"]), torch.zeros(1)
    npu.npu_fused_infer_attention_score.out(**arguments, workspace=workspace, out=[out, lse])
    assert not out.isnan().any()
    assert lse.isnan().all()


def test_stores_as_documented_are_taken():
    server, inference = Npu("ascend910b"), Npu("ascend310p")
    server._npu_reshape_and_cache(**stored())
    server.npu_scatter_pa_kv_cache(**scattered())
    inference._npu_reshape_and_cache(**stored_nz(inference))


@pytest.mark.parametrize("what", STORES)
def test_npu_reshape_and_cache_refuses(what):
    with pytest.raises(RefusedError):
        Npu("ascend910b")._npu_reshape_and_cache(**stored(**STORES[what]))


@pytest.mark.parametrize("what", SCATTERS)
def test_npu_scatter_pa_kv_cache_refuses(what):
    with pytest.raises(RefusedError):
        Npu("ascend910b").npu_scatter_pa_kv_cache(**scattered(**SCATTERS[what]))


@pytest.mark.parametrize("what", INFERENCE_STORES)
def test_npu_reshape_and_cache_of_the_310p_refuses(what):
    npu = Npu("ascend310p")
    with pytest.raises(RefusedError):
        npu._npu_reshape_and_cache(**stored_nz(npu, **INFERENCE_STORES[what](npu)))


def test_npu_scatter_pa_kv_cache_is_not_for_the_310p():
    with pytest.raises(RefusedError):
        Npu("ascend310p").npu_scatter_pa_kv_cache(**scattered())


def test_the_format_nz_is_for_rows_of_pieces_of_16():
    with pytest.raises(RefusedError):
        Npu("ascend310p").npu_format_cast(zeros(5, 2, 128, 12), FRACTAL_NZ)


def test_npu_paged_attention_as_documented_is_taken():
    npu = Npu("ascend310p")
    npu._npu_paged_attention(**paged(npu))


@pytest.mark.parametrize("what", PAGED)
def test_npu_paged_attention_refuses(what):
    npu = Npu("ascend310p")
    with pytest.raises(RefusedError):
        npu._npu_paged_attention(**paged(npu, **PAGED[what](npu)))


@pytest.mark.parametrize("name", ["v1, decode", "v2"])
def test_an_argument_that_the_wheel_does_not_have_is_refused(name):
    operator, arguments = ALL[name]
    with pytest.raises(TypeError):
        getattr(Npu("ascend910b"), operator)(**arguments(window=1))


def test_a_missing_argument_and_one_of_another_type_are_refused():
    npu, arguments = Npu("ascend910b"), stored()
    with pytest.raises(TypeError):
        npu.npu_fused_infer_attention_score(**decode(num_heads=4.5))
    del arguments["slot_indices"]
    with pytest.raises(TypeError):
        npu._npu_reshape_and_cache(**arguments)

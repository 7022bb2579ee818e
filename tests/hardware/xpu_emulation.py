"""vllm-xpu-kernels' flash attention in torch, as its sources and its wheel's contents document it.

`varlen_fwd` is the operator and what it refuses (csrc/flash_attn/flash_api.cpp, csrc/xpu/attn/paged_kv_utils.h);
`flash_attn_varlen_func` is what its Python adds. A kernel that the wheel's library does not name is not there. The
package's reference in torch, which it runs then, is not emulated: what is declared must not need it.
"""

import json
from types import SimpleNamespace

import torch
from paged_kernel import Loads, attend
from vendor_calls import SCHEMAS, bound

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_DECLARED = json.loads((SCHEMAS / "xpu.json").read_text(encoding="utf-8"))["functions"]
OPERATOR_SCHEMA = _DECLARED["varlen_fwd"]
KERNELS = set(_DECLARED["kernels of xe_2"].split())
SPEC_DECODE_MAX_QLEN = 16
BUCKETS = (64, 96, 128, 192, 256, 512, 576)
calls = []
"""The kernels that were launched since it was cleared."""


def kernel(name):
    if name not in KERNELS:
        raise RuntimeError(f"{name} not compiled for this configuration")
    calls.append(name)


def flags(*values):
    return "".join("ft"[bool(value)] for value in values)


def page_tile(page_size):
    """What the kernels for a page size are called by (_kv_tile_from_block_size)."""
    return 64 if page_size % 64 == 0 else 32 if page_size == 32 else 16


def chunk_prefill(head_dim, page_size, *, causal, local, sink, lse):
    assert head_dim <= 512, "FMHA forward only supports head dimension at most 512"
    assert not (lse and (local or sink)), "softmax_lse output is only supported when is_local=false and is_sink=false"
    bucket = next(size for size in BUCKETS if head_dim <= size)
    policy = "_b16" if page_tile(page_size) == 16 else ""
    kernel(f"chunk_policy_head{bucket}{policy}_{flags(True, causal and not local, sink, local, lse)}")


def paged_decode(head_dim, page_size, group, q_lens, *, local, sink):
    """Its mask of causality is always off: the one query of a sequence sees all of it."""
    assert q_lens.numel() == 0 or (q_lens == 1).all(), "a sequence without a new token has no row to write to"
    bucket = next(size for size in BUCKETS if head_dim <= size)
    shape = f"q{8 if group <= 8 else 16}_h{bucket}_p{page_tile(page_size)}"
    kernel(f"paged_decode_kernel_template_{shape}_{flags(False, local, sink)}")


def check_scale(scale):
    assert scale.dtype == torch.float32, "FP8 KV scale must be a float32 tensor"
    single = all(size == 1 or stride == 0 for size, stride in zip(scale.shape, scale.stride(), strict=True))
    assert single, "FP8 KV scale must be a tensor with a single element"
    return scale.flatten()[0]


def check_pages(q, k, v, block_table):
    assert k.dtype == v.dtype, "key and value must have the same dtype"
    assert k.dtype in FP8 or k.dtype == q.dtype, "query and key must have the same dtype"
    for x in (q, k, v):
        assert x.stride(-1) == 1, "Input tensor must have contiguous last dimension"
        assert x.shape[-1] * x.element_size() % 16 == 0, "the contiguous dim must be 16-byte aligned"
        assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])  # of Xe2's 2D blocks
    assert k.shape[1] % 16 == 0, "unsupported block_size"
    assert block_table.dtype == torch.int32, "page_table must have dtype torch.int32"
    assert block_table.stride(-1) == 1, "page_table must have contiguous last dimension"
    for x in (k, v):
        assert x.stride(0) > 0
        assert x.stride(1) > 0
        assert x.stride(0) % x.stride(1) == 0, "page stride must be divisible by sequence stride"
    assert k.stride(0) // k.stride(1) == v.stride(0) // v.stride(1), "Paged K/V page strides must match"


@bound("xpu", "varlen_fwd")
def varlen_fwd(
    q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes, max_seqlen_q,
    max_seqlen_k, p_dropout, q_scale, k_scale, v_scale, softmax_scale, softmax_sink, zero_tensors, is_causal,
    window_size_left, window_size_right, softcap, return_softmax, gen, num_splits, mix_batch, splits_per_seq, work_list,
):  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16), "only supports fp16, bf16 (and fp8, which is not used here)"
    assert q.dim() == 3, "query must be in ragged format"
    assert q_scale is leftpad_k is gen is splits_per_seq is work_list is num_splits is None
    assert p_dropout == 0.0
    assert not zero_tensors
    assert softcap == 0.0, "reaches no kernel"
    assert alibi_slopes is None, "reaches no kernel"
    check_pages(q, k, v, block_table)
    for lengths in (cu_seqlens_q, cu_seqlens_k):
        assert lengths.dtype == torch.int32, "cu_seqlens must have dtype torch.int32"
        assert lengths.is_contiguous()
    assert out is None or (out.shape == (*q.shape[:2], v.shape[-1]) and out.dtype == q.dtype and out.is_contiguous())
    page_size, num_kv_heads, head_dim = k.shape[1:]
    local, sink = window_size_left != -1 or window_size_right != -1, softmax_sink is not None
    assert not sink or softmax_sink.dtype == q.dtype
    q_lens, group = cu_seqlens_q.diff(), q.shape[1] // num_kv_heads
    assert max_seqlen_q == q_lens.max()
    assert max_seqlen_k >= seqused_k.max()
    if max_seqlen_q > 1:
        chunk_prefill(head_dim, page_size, causal=is_causal, local=local, sink=sink, lse=return_softmax)
        if mix_batch:
            paged_decode(head_dim, page_size, group, q_lens[q_lens <= 1], local=local, sink=sink)
    else:
        paged_decode(head_dim, page_size, group, q_lens, local=local, sink=sink)
    if k.dtype in FP8:
        k, v = ((x.float() * check_scale(s)).to(q.dtype) for x, s in ((k, k_scale), (v, v_scale)))
    # A causal mask is no matter to one token; windows count from the end of the sequence, to the right too.
    assert not local or window_size_right == 0
    result, lse = attend(
        q, k, v, block_table, seqused_k, cu_seqlens_q, scale=softmax_scale, loads=Loads(tile=64, first_tile=64),
        window_left=window_size_left, causal=is_causal or local, sinks=softmax_sink,
    )  # fmt: skip
    out = torch.empty(result.shape, dtype=q.dtype) if out is None else out
    out.copy_(result)
    return [out, lse.T.contiguous() if return_softmax else torch.empty(0)]


def descale(scale):
    if scale is None:
        return None
    assert scale.dtype in (torch.float32, torch.bfloat16, torch.float16), "must be a floating scalar tensor view"
    assert scale.untyped_storage().nbytes() == scale.element_size(), "must be view of single scalar tensor"
    return scale.float()


@bound("xpu", "flash_attn_varlen_func")
def flash_attn_varlen_func(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, seqused_k, q_v, dropout_p, softmax_scale, causal,
    window_size, softcap, alibi_slopes, deterministic, return_attn_probs, block_table, return_softmax_lse, out,
    scheduler_metadata, q_descale, k_descale, v_descale, num_splits, fa_version, s_aux, num_splits_kv, is_mix_batch,
    host_kv_lens,
):  # fmt: skip
    assert fa_version == "DEFAULT_FA_VERSION"  # which is 2
    assert num_splits <= 1, "FA2 does not support num_splits > 1"
    assert scheduler_metadata is q_v is host_kv_lens is None
    assert not deterministic, "is not looked at"
    assert not return_attn_probs, "is not looked at"
    assert (cu_seqlens_k is None) != (seqused_k is None)
    assert seqused_k is not None, "when enable block_table, seqused_k is needed"
    left, right = window_size or (-1, -1)
    k_scale, v_scale = descale(k_descale), descale(v_descale)
    assert (k_scale is None) == (v_scale is None), "FA2 only supports both KV cache descaled"
    batch = cu_seqlens_q.numel() - 1
    arguments = {
        "q_scale": descale(q_descale), "k_scale": k_scale, "v_scale": v_scale, "softmax_scale": softmax_scale,
        "softmax_sink": s_aux, "zero_tensors": False, "window_size_left": left, "window_size_right": right,
        "softcap": softcap, "return_softmax": return_softmax_lse, "gen": None, "leftpad_k": None,
        "max_seqlen_k": max_seqlen_k, "p_dropout": dropout_p, "splits_per_seq": None, "work_list": None,
        "alibi_slopes": alibi_slopes,
    }  # fmt: skip
    uniform = q.shape[0] == batch * max_seqlen_q and 1 < max_seqlen_q <= SPEC_DECODE_MAX_QLEN
    if uniform and causal and not return_softmax_lse and softcap == 0.0 and alibi_slopes is None:
        # A decode of one token each, of sequences that end at each of the new tokens.
        behind = max_seqlen_q - 1 - torch.arange(max_seqlen_q, dtype=torch.int32)
        return varlen_fwd(
            q, k, v, out, torch.arange(q.shape[0] + 1, dtype=torch.int32),
            torch.zeros(q.shape[0] + 1, dtype=torch.int32), (seqused_k[:, None] - behind).clamp(min=1).flatten(),
            block_table=block_table.repeat_interleave(max_seqlen_q, dim=0), max_seqlen_q=1, is_causal=False,
            num_splits=None, mix_batch=False, **arguments,
        )[0]  # fmt: skip
    result, lse = varlen_fwd(
        q, k, v, out, cu_seqlens_q, torch.empty_like(cu_seqlens_q), seqused_k, block_table=block_table,
        max_seqlen_q=max_seqlen_q, is_causal=causal, num_splits=num_splits_kv, mix_batch=is_mix_batch, **arguments,
    )  # fmt: skip
    return (result, lse) if return_softmax_lse else result


MODULE = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)

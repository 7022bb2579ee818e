"""aiter's functions in torch, as its sources and tests have them, with what they want of their arguments.

Each call is bound to the wheel's own declaration first. Sources, in the wheel of amd-aiter 0.1.7.post2.dev18: for batch
prefill `csrc/py_itfs_ck/mha_batch_prefill_kernels.cu` and Composable Kernel's `fmha_batch_prefill` (`codegen/ops`,
`kernel`, `pipeline`); for paged attention `csrc/cpp_itfs/pa`; for `pa_fwd_asm` `csrc/py_itfs_cu/asm_pa.cu` and
`hsa/*/pa/pa_asm.csv`; for MLA `aiter/mla.py`, `csrc/py_itfs_cu/asm_mla.cu` and `csrc/kernels/mla/metadata`. What is
compiled at the first use by a template is limited to what `op_tests/test_pa_v1.py` of the repository tries. What begins
with `newer_` is MLA of the repository's commit that `schemas/aiter_repository.json` names, from the same files of it.
"""

from types import SimpleNamespace

import torch
from paged_kernel import Loads, attend, is_capturing
from vendor_calls import bound

from anyattn.mem_cache import layouts

NUM_CORES = 304
PREFILL_TILE = 128
PREFETCHED = 64  # entries of kv_page_indices behind a tile
PARTITION = 256
MLA_TILE = 128  # of the tiles that `get_meta_param` names the largest; the binaries are taken to load all of one


class Refused(Exception):
    """What the vendor's code checks, or takes for granted without looking."""


def must(holds, what):
    if not holds:
        raise Refused(what)


def int32(**tensors):
    for name, tensor in tensors.items():
        must(tensor.dtype == torch.int32 and tensor.is_contiguous(), f"{name} must be contiguous int32")


def in_range(rows, name, *indices):
    if not is_capturing():
        for each in indices:
            must(not each.numel() or (int(each.min()) >= 0 and int(each.max()) < rows), f"{name} names no row")


@bound("aiter", "mha_batch_prefill_func")
def mha_batch_prefill_func(
    q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    logits_soft_cap, causal, window_size, alibi_slopes, deterministic, return_lse, return_attn_probs, out,
):  # fmt: skip
    must(q.dtype in (torch.float16, torch.bfloat16), "only support fp16 and bf16 data type")
    must(k.dtype == v.dtype == q.dtype, "query, key and value must have the same dtype")
    must(k.ndim == v.ndim == 3 and k.shape[:2] == v.shape[:2], "keys and values are pages of one token")
    must(q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "must have contiguous last dimension")
    must(q.shape[2] == v.shape[2] == 128, "the only kernels are of head dim 128")
    must(q.shape[1] % k.shape[1] == 0, "heads in key/value must divide heads in query")
    must(k.numel() < 1 << 31, "places of keys are counted in 32 bits")
    must(alibi_slopes is None, "slopes are handed on as a bias, which must be 2d")
    must(tuple(window_size) == (-1, -1), "tiles behind a window are skipped without their indices")
    must(dropout_p == 0.0 and not return_attn_probs, "no dropout")
    int32(cu_seqlens_q=cu_seqlens_q, kv_indptr=kv_indptr, kv_page_indices=kv_page_indices)
    must(cu_seqlens_q.shape == kv_indptr.shape and cu_seqlens_q.numel() > 1, "batch size must be positive")
    must(out is None or (out.dtype == q.dtype and out.shape == q.shape and out.stride(-1) == 1), "out must be as q")
    lens = kv_indptr.diff()
    if not is_capturing():
        must(max_seqlen_q >= int(cu_seqlens_q.diff().max()), "max_seqlen_q is too small")
        must(max_seqlen_k > 0, "without keys the LSE is inf")
        with_queries = cu_seqlens_q.diff() > 0
        must(bool((lens[with_queries] > 0).all()), "a sequence without keys")
        loaded = kv_indptr[:-1] + -(-lens // PREFILL_TILE) * PREFILL_TILE + PREFETCHED
        fits = loaded[with_queries] <= kv_page_indices.numel()
        must(bool(fits.all()), "kv_page_indices is read behind its end")
        in_range(k.shape[0], "kv_page_indices", kv_page_indices)
    width = -(-max(max_seqlen_k, 1) // PREFILL_TILE) * PREFILL_TILE
    places = kv_indptr[:-1, None] + torch.arange(width, dtype=torch.int32)
    table = kv_page_indices[places.clamp(max=kv_page_indices.numel() - 1)]
    result, lse = attend(
        q, k.unsqueeze(1), v.unsqueeze(1), table, lens, cu_seqlens_q, scale=softmax_scale, causal=causal,
        soft_cap=logits_soft_cap, loads=Loads(tile=PREFILL_TILE),
    )  # fmt: skip
    result = result.to(q.dtype)
    if out is not None:
        result = out.copy_(result)
    return (result, lse.T.contiguous()) if return_lse else result


@bound("aiter", "paged_attention_v1")
def paged_attention_v1(
    out, workspace_buffer, query, key_cache, value_cache, scale, block_tables, cu_query_lens, context_lens,
    max_context_len, alibi_slopes, kv_cache_dtype, kv_cache_layout, logits_soft_cap, k_scale, v_scale, fp8_out_scale,
    partition_size, mtp, sliding_window,
):  # fmt: skip
    must(kv_cache_layout in ("NHD", "HND"), "layouts are NHD and HND")
    must(query.dtype in (torch.float16, torch.bfloat16), "Unsupported data type")
    is_fp8 = kv_cache_dtype in ("fp8", "fp8_e4m3")
    must(is_fp8 or kv_cache_dtype == "auto", "Unsupported kv_cache_dtype")
    stored = FP8 if is_fp8 else query.dtype
    must(key_cache.dtype == value_cache.dtype == stored, "the cache's dtype is taken for granted")
    k, v = key_cache, value_cache
    must(k.stride() == v.stride(), "values lie as the keys do")
    if kv_cache_layout == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    num_seqs, heads, head_dim = query.shape
    page_size, kv_heads = k.shape[1:3]
    must(k.stride(-1) == 1 and head_dim in (64, 128) and k.shape[3] == head_dim, "head sizes are 64 and 128")
    must(page_size in (1, 16, 32), "block sizes are 1, 16 and 32")
    must(heads % kv_heads == 0 and heads // kv_heads <= 16, "groups of more than 16 heads are addressed wrongly")
    must(query.stride()[1:] == (head_dim, 1), "the heads of a query lie one behind the other")
    must(out.is_contiguous() and out.shape == query.shape and out.dtype == query.dtype, "out must be as the query")
    must(partition_size == PARTITION and mtp == 1 and cu_query_lens is None, "one token a sequence")
    must(block_tables.stride(1) == 1 and block_tables.is_contiguous(), "rows of the table lie one behind the other")
    int32(block_tables=block_tables, context_lens=context_lens)
    must(logits_soft_cap == 0 or (alibi_slopes is None and not sliding_window), "the soft cap comes behind the others")
    must(alibi_slopes is None or alibi_slopes.dtype == torch.float32, "slopes are float32")
    for each in (k_scale, v_scale):
        must(each.dtype == torch.float32 and each.numel() == 1, "a scale is one float32 on the device")
    parts = num_seqs * heads * -(-max_context_len // PARTITION)
    must(workspace_buffer.numel() >= parts * (head_dim * query.element_size() + 8), "the workspace is too small")
    if not is_capturing():
        must(int(context_lens.min()) >= 1 and int(context_lens.max()) <= max_context_len, "context_lens")
        in_range(k.shape[0], "block_tables", block_tables)
    if is_fp8:
        query = query.to(FP8)
    result, _ = attend(
        query, k, v, block_tables, context_lens, torch.arange(num_seqs + 1, dtype=torch.int32), scale=scale,
        k_scale=k_scale if is_fp8 else 1.0, v_scale=v_scale if is_fp8 else 1.0, soft_cap=logits_soft_cap,
        alibi_slopes=alibi_slopes, window_left=sliding_window - 1, loads=Loads(tile=page_size),
    )  # fmt: skip
    return out.copy_(result)


@bound("aiter", "pa_fwd_asm")
def pa_fwd_asm(
    Q, K, V, block_tables, context_lens, block_tables_stride0, max_qlen, K_QScale, V_QScale, out_, qo_indptr,
    high_precision, kernelName,
):  # fmt: skip
    must(Q.dtype in (torch.float16, torch.bfloat16), "unsupport Q dtype")
    must(K.dtype == V.dtype == Q.dtype and K_QScale is V_QScale is None, "quantized keys have scales by token")
    num_seqs, heads, head_dim = Q.shape
    pages, kv_heads, pieces, page_size, x = K.shape
    must(x == 16 // K.element_size() and V.shape == (pages, kv_heads, page_size // x, head_dim, x), "layout 5D")
    must(K.is_contiguous() and V.is_contiguous(), "values lie as far apart as the keys")
    must(pieces * x == head_dim == 128 and page_size == 16, "cannot get heuristic kernel")
    must(heads % kv_heads == 0 and heads // kv_heads <= 16, "cannot get heuristic kernel")
    must(Q.stride()[1:] == (head_dim, 1), "the heads of a query lie one behind the other")
    must(max_qlen == 1 and qo_indptr is None and kernelName is None, "one token a sequence")
    out_ = torch.empty_like(Q) if out_ is None else out_
    must(out_.is_contiguous() and out_.shape == Q.shape and out_.dtype == Q.dtype, "out_ must be as Q")
    must(block_tables_stride0 == block_tables.stride(0), "the table's rows are elsewhere")
    int32(block_tables=block_tables, context_lens=context_lens)
    if not is_capturing():
        must(int(context_lens.min()) >= 1, "a sequence without keys")
        in_range(pages, "block_tables", block_tables)
    ids = torch.arange(pages)
    k, v = layouts.gather(K, "5D", "k", ids), layouts.gather(V, "5D", "v", ids)
    result, _ = attend(
        Q, k, v, block_tables, context_lens, torch.arange(num_seqs + 1, dtype=torch.int32), scale=head_dim**-0.5,
        loads=Loads(tile=page_size),
    )  # fmt: skip
    return out_.copy_(result)


ARCH, FP8 = "gfx942", torch.float8_e4m3fnuz
"""The emulated device, and what it reads bytes of fp8 as: `module` sets them."""


def shapes_of_work(batch_size, tiles, work):
    """Of the six tensors of the division. tiles: for each sequence. work: most pieces of it."""
    splits = min(batch_size + NUM_CORES - 1, 2 * (NUM_CORES - 1)) * tiles
    return (2,), (NUM_CORES + 1,), (work, 8), (batch_size * tiles + 1,), (batch_size * tiles, 2), (splits,)


def with_dtypes(shapes):
    return tuple((shape, torch.int32 if i else torch.uint64) for i, shape in enumerate(shapes))


def wheels_work(batch_size, heads):
    tiles = 1 if heads == 16 else heads // 16
    return shapes_of_work(batch_size, tiles, batch_size * tiles + NUM_CORES - 1)


def newer_work(batch_size, heads, q_dtype, kv_dtype):
    tiles = 1 if is_native(heads, q_dtype, kv_dtype) else heads // 16
    return shapes_of_work(batch_size, tiles, (batch_size + NUM_CORES - 1) * tiles)


def is_native(heads, q_dtype, kv_dtype):
    """Whether the repository's kernels compute so many heads at once; if not, sixteens of them."""
    return heads == 16 or (ARCH == "gfx950" and heads in (64, 128) and q_dtype == kv_dtype == torch.bfloat16)


@bound("aiter", "get_mla_metadata_info_v1")
def get_mla_metadata_info_v1(batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode):
    must(num_head_qo % 16 == 0, "heads come in sixteens")
    must(max_seqlen_qo == 1 and fast_mode and not is_sparse, "one token a sequence")
    return with_dtypes(wheels_work(batch_size, num_head_qo))


def divide(
    qo_indptr, kv_indptr, heads, kv_heads, kv_granularity, tensors, shapes, max_seqlen_qo, uni_seqlen_qo, fast_mode
):  # fmt: skip
    """The division, of which the emulated kernels need no more than the lengths that it was made from.

    tensors: in the order of shapes, which are those that their sizes were asked for with.
    """
    int32(seqlens_qo_indptr=qo_indptr, seqlens_kv_indptr=kv_indptr)
    must(kv_granularity & (kv_granularity - 1) == 0, "kv_granularity Must be power of 2!")
    must(kv_heads == 1, "one head of keys")
    must(heads in (16, 128) or (heads % 16 == 0 and heads < 128), "only supports #heads in [16, 128]")
    must(max_seqlen_qo == uni_seqlen_qo == 1 and fast_mode, "one token a sequence")
    names = (
        "work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map"
    )  # fmt: skip
    for name, tensor, (shape, dtype) in zip(names, tensors, with_dtypes(shapes), strict=True):
        must(tensor.shape == shape and tensor.dtype == dtype, f"{name} is {dtype}, {shape}")
    if not is_capturing():
        must(qo_indptr.diff().unique().tolist() == [1], "a sequence without a query")
        must(int(kv_indptr.diff().min()) >= 1, "a sequence without keys")
    tensors[1][: kv_indptr.numel()].copy_(kv_indptr)


@bound("aiter", "get_mla_metadata_v1")
def get_mla_metadata_v1(
    seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, is_causal, work_metadata_ptrs, work_indptr,
    work_info, reduce_indptr, reduce_final_map, reduce_partial_map, kv_granularity, max_seqlen_qo, uni_seqlen_qo,
    fast_mode, topk, max_split_per_batch,
):  # fmt: skip
    """The wheel's: what it calls work_indptr is handed on, by position, as work_info_set, and the other way round."""
    tensors = work_metadata_ptrs, work_info, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map
    divide(
        seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, kv_granularity, tensors,
        wheels_work(seqlens_qo_indptr.numel() - 1, num_heads_per_head_k), max_seqlen_qo, uni_seqlen_qo, fast_mode,
    )  # fmt: skip


def attend_latents(q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, scale, kv_scale):
    """Both of MLA's kernels, over pages of one token: whole tiles of them, of other sequences than the query's too."""
    must(kv_buffer.ndim == 4 and kv_buffer.shape[1:] == (1, 1, 576), "latents of one head, pages of one token")
    must(q.is_contiguous() and q.dtype == torch.bfloat16 and q.shape[2] == 576, "only support Q.is_contiguous()")
    must(o.is_contiguous() and o.shape == (*q.shape[:2], 512) and o.dtype == torch.bfloat16, "o is as wide as latents")
    must(kv_buffer.numel() < 1 << 31, "places of keys are counted in 32 bits")
    must(scale is not None, "in the wheel, prefill has no scale of its own")
    int32(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_last_page_lens=kv_last_page_lens)
    must(qo_indptr.shape == kv_indptr.shape == (kv_last_page_lens.numel() + 1,), "batch size")
    lens = kv_indptr.diff()
    if not is_capturing():
        must(bool((kv_last_page_lens == 1).all()), "pages of one token")
        must(max_seqlen_q == int(qo_indptr.diff().max()), "max_seqlen_q")
        must(int(lens.min()) >= 1, "a sequence without keys")
        in_range(kv_buffer.shape[0], "kv_indices", kv_indices)
        loaded = kv_indptr[:-1] + -(-lens // MLA_TILE) * MLA_TILE
        must(kv_indices.numel() >= int(loaded.max()), "kv_indices is read behind its end")
    width = kv_indices.numel() if is_capturing() else -(-int(lens.max()) // MLA_TILE) * MLA_TILE
    places = kv_indptr[:-1, None] + torch.arange(width, dtype=torch.int32)
    table = kv_indices[places.clamp(max=kv_indices.numel() - 1)]
    result, _ = attend(
        q, kv_buffer, kv_buffer[..., :512], table, lens, qo_indptr, scale=scale, k_scale=kv_scale, v_scale=kv_scale,
        loads=Loads(tile=MLA_TILE),
    )  # fmt: skip
    o.copy_(result)


def decode_latents(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale, logit_cap,
    num_kv_splits, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
    reduce_partial_map, q_scale, kv_scale,
):  # fmt: skip
    heads = q.shape[1]
    must(logit_cap <= 0, "logit_cap is not support yet")
    must(work_meta_data is not None and num_kv_splits_indptr is None, "the persistent kernel is meant")
    must(num_kv_splits is not None, "of None, newer ones make another kernel where many sequences are")
    must(max_seqlen_q == 1 and (heads == 16 or heads in range(32, 128, 16)), "nhead and max_seqlen_q not supported")
    must(kv_buffer.dtype in (torch.bfloat16, FP8), "unsupport current data type or shape")
    must((kv_scale is not None) == (kv_buffer.dtype == FP8) and q_scale is None, "fp8 latents have a scale")
    must(kv_scale is None or (kv_scale.dtype == torch.float32 and kv_scale.shape == (1,)), "a scale is one float32")
    divided_for = work_indptr[: kv_indptr.numel()]
    if not is_capturing():
        must(torch.equal(divided_for, kv_indptr), "the work was divided for other lengths")
    attend_latents(
        q, kv_buffer, o, qo_indptr, divided_for, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale,
        1.0 if kv_scale is None else kv_scale,
    )  # fmt: skip
    return torch.empty(0), torch.full(q.shape[:2], float("nan"))  # an LSE where the work was divided only


@bound("aiter", "mla_decode_fwd")
def mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale, logit_cap,
    num_kv_splits, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, reduce_indptr, reduce_final_map,
    reduce_partial_map, q_scale, kv_scale,
):  # fmt: skip
    return decode_latents(**locals())


@bound("aiter", "mla_prefill_fwd")
def mla_prefill_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale, logit_cap,
    num_kv_splits,
):  # fmt: skip
    must(logit_cap <= 0, "logit_cap is not support yet")
    must(q.shape[1] in (16, 128), "only support num_q_heads/num_kv_heads==16 or 128 for now")
    must(kv_buffer.dtype == torch.bfloat16, "what it reads is not looked at")
    must(not is_capturing() and int(qo_indptr.diff().min()) >= 1, "a sequence without a query")
    attend_latents(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale, 1.0
    )  # fmt: skip
    return o, torch.full((q.shape[0], 1, q.shape[1], 1), float("nan"))


@bound("aiter_repository", "get_mla_metadata_info_v1")
def newer_get_mla_metadata_info_v1(
    batch_size, max_seqlen_qo, num_head_qo, q_dtype, kv_dtype, is_sparse, fast_mode, num_kv_splits, intra_batch_mode
):  # fmt: skip
    must(num_head_qo % 16 == 0, "heads come in sixteens")
    must(max_seqlen_qo == 1 and fast_mode and not is_sparse and not intra_batch_mode, "one token a sequence")
    return with_dtypes(newer_work(batch_size, num_head_qo, q_dtype, kv_dtype))


@bound("aiter_repository", "get_mla_metadata_v1")
def newer_get_mla_metadata_v1(
    seqlens_qo_indptr, seqlens_kv_indptr, kv_last_page_lens, num_heads_per_head_k, num_heads_k, is_causal,
    work_metadata_ptrs, work_info_set, work_indptr, reduce_indptr, reduce_final_map, reduce_partial_map, page_size,
    kv_granularity, max_seqlen_qo, uni_seqlen_qo, fast_mode, topk, max_split_per_batch, intra_batch_mode, dtype_q,
    dtype_kv,
):  # fmt: skip
    must(page_size == 1 and kv_last_page_lens.shape == (seqlens_kv_indptr.numel() - 1,), "pages of one token")
    must(dtype_q == torch.bfloat16 and dtype_kv in (torch.bfloat16, FP8), "dtypes choose the division")
    tensors = work_metadata_ptrs, work_indptr, work_info_set, reduce_indptr, reduce_final_map, reduce_partial_map
    divide(
        seqlens_qo_indptr, seqlens_kv_indptr, num_heads_per_head_k, num_heads_k, kv_granularity, tensors,
        newer_work(seqlens_qo_indptr.numel() - 1, num_heads_per_head_k, dtype_q, dtype_kv), max_seqlen_qo,
        uni_seqlen_qo, fast_mode,
    )  # fmt: skip


@bound("aiter_repository", "mla_decode_fwd")
def newer_mla_decode_fwd(
    q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, page_size, nhead_kv, sm_scale,
    logit_cap, num_kv_splits, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, reduce_indptr,
    reduce_final_map, reduce_partial_map, q_scale, kv_scale, intra_batch_mode, return_logits, return_lse,
):  # fmt: skip
    must(page_size == nhead_kv == 1, "pages of one token, one head")
    decode_latents(
        q, kv_buffer, o, qo_indptr, kv_indptr, kv_indices, kv_last_page_lens, max_seqlen_q, sm_scale, logit_cap,
        num_kv_splits, num_kv_splits_indptr, work_meta_data, work_indptr, work_info_set, reduce_indptr,
        reduce_final_map, reduce_partial_map, q_scale, kv_scale,
    )  # fmt: skip
    return None, None


def module(arch, *, generation="wheel"):
    """`aiter` as it is on a device. generation: "wheel", or "repository" for what has come since."""
    global ARCH, FP8
    ARCH, FP8 = arch, torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn
    newer = generation == "repository"
    return SimpleNamespace(
        mha_batch_prefill_func=mha_batch_prefill_func,
        paged_attention_v1=paged_attention_v1,
        pa_fwd_asm=pa_fwd_asm,
        get_mla_metadata_info_v1=newer_get_mla_metadata_info_v1 if newer else get_mla_metadata_info_v1,
        get_mla_metadata_v1=newer_get_mla_metadata_v1 if newer else get_mla_metadata_v1,
        mla=SimpleNamespace(
            mla_decode_fwd=newer_mla_decode_fwd if newer else mla_decode_fwd, mla_prefill_fwd=mla_prefill_fwd
        ),
    )

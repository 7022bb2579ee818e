"""What aiter does not take, its emulation refuses: each constraint that its sources and tests have, violated."""

import sys
from pathlib import Path

import pytest
import torch

from anyattn import AttentionSpec, Platform
from anyattn.attention.capabilities import Capabilities
from anyattn.hardware_backend.rocm import aiter as prefill
from anyattn.hardware_backend.rocm import aiter_asm, aiter_mla, aiter_mla_prefill, aiter_paged

sys.path.append(str(Path(__file__).parent))
import aiter_emulation
from aiter_emulation import Refused

BF16 = torch.bfloat16
AITER = aiter_emulation.module("gfx942")
NEWER = aiter_emulation.module("gfx942", generation="repository")
REDUCED = ("reduce_indptr", "reduce_final_map", "reduce_partial_map")


@pytest.fixture(autouse=True)
def cdna3():
    aiter_emulation.module("gfx942")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def prefill_call():
    return {
        "q": torch.randn(3, 8, 128, dtype=BF16), "k": torch.randn(40, 2, 128, dtype=BF16),
        "v": torch.randn(40, 2, 128, dtype=BF16), "cu_seqlens_q": ints(0, 3, 3), "kv_indptr": ints(0, 5, 261),
        "kv_page_indices": torch.zeros(517, dtype=torch.int32), "max_seqlen_q": 3, "max_seqlen_k": 5,
        "softmax_scale": 0.1, "causal": True,
    }  # fmt: skip


def paged_call():
    pages = torch.randn(6, 16, 2, 128, dtype=BF16)
    return {
        "out": torch.empty(2, 8, 128, dtype=BF16), "workspace_buffer": torch.empty(1 << 16, dtype=torch.uint8),
        "query": torch.randn(2, 8, 128, dtype=BF16), "key_cache": pages, "value_cache": pages.clone(), "scale": 0.1,
        "block_tables": ints(1, 2, 3, 0).view(2, 2), "cu_query_lens": None, "context_lens": ints(20, 7),
        "max_context_len": 20, "alibi_slopes": None, "kv_cache_dtype": "auto", "kv_cache_layout": "NHD",
        "logits_soft_cap": 0.0, "k_scale": torch.ones(1), "v_scale": torch.ones(1),
    }  # fmt: skip


def asm_call():
    return {
        "Q": torch.randn(2, 8, 128, dtype=BF16), "K": torch.randn(4, 1, 16, 16, 8, dtype=BF16),
        "V": torch.randn(4, 1, 2, 128, 8, dtype=BF16), "block_tables": ints(1, 2, 3, 0).view(2, 2),
        "context_lens": ints(20, 7), "block_tables_stride0": 2,
    }  # fmt: skip


def work(heads=16, batch=2, aiter=AITER):
    names = ("work_meta_data", "work_indptr", "work_info_set", *REDUCED)
    shapes = aiter.get_mla_metadata_info_v1(batch, 1, heads, BF16, BF16, is_sparse=False)
    return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in zip(names, shapes, strict=True)}


def divided(work, kv_indptr, heads=16, **others):
    order = ("work_meta_data", "work_info_set", "work_indptr", *REDUCED)
    AITER.get_mla_metadata_v1(
        ints(0, 1, 2), kv_indptr, heads, 1, True, *(work[name] for name in order),
        **{"max_seqlen_qo": 1, "uni_seqlen_qo": 1} | others,
    )  # fmt: skip
    return work


def decode_call():
    return {
        "q": torch.randn(2, 16, 576, dtype=BF16), "kv_buffer": torch.randn(40, 1, 1, 576, dtype=BF16),
        "o": torch.empty(2, 16, 512, dtype=BF16), "qo_indptr": ints(0, 1, 2), "kv_indptr": ints(0, 9, 12),
        "kv_indices": torch.zeros(300, dtype=torch.int32), "kv_last_page_lens": ints(1, 1), "max_seqlen_q": 1,
        "sm_scale": 0.1, "num_kv_splits": 0, **divided(work(), ints(0, 9, 12)),
    }  # fmt: skip


def mla_prefill_call():
    kept = {key: value for key, value in decode_call().items() if not key.startswith(("work", "reduce", "num_kv"))}
    return kept | {"max_seqlen_q": 1}


CALLS = {
    "mha_batch_prefill_func": (AITER.mha_batch_prefill_func, prefill_call),
    "paged_attention_v1": (AITER.paged_attention_v1, paged_call),
    "pa_fwd_asm": (AITER.pa_fwd_asm, asm_call),
    "mla_decode_fwd": (AITER.mla.mla_decode_fwd, decode_call),
    "mla_prefill_fwd": (AITER.mla.mla_prefill_fwd, mla_prefill_call),
    "newer mla_decode_fwd": (NEWER.mla.mla_decode_fwd, decode_call),
}

OF_LATENTS = ("mla_decode_fwd", "newer mla_decode_fwd", "mla_prefill_fwd")
VIOLATIONS = [
    ("mha_batch_prefill_func", dict.fromkeys("qkv", lambda x: x.float()), "fp16 and"),
    ("mha_batch_prefill_func", {"k": lambda k: k.to(torch.float8_e4m3fnuz)}, "must have the same dtype"),
    ("mha_batch_prefill_func", {"k": lambda k: k[:, None], "v": lambda v: v[:, None]}, "pages of one token"),
    ("mha_batch_prefill_func", {"q": lambda q: q.mT.contiguous().mT}, "contiguous last dimension"),
    ("mha_batch_prefill_func", {n: lambda x: x[..., :64] for n in "qkv"}, "head dim 128"),
    ("mha_batch_prefill_func", {"q": lambda q: q[:, :7]}, "divide heads in query"),
    ("mha_batch_prefill_func", {"alibi_slopes": torch.ones(8)}, "handed on as a bias"),
    ("mha_batch_prefill_func", {"window_size": (4, 0)}, "behind a window"),
    ("mha_batch_prefill_func", {"dropout_p": 0.1}, "no dropout"),
    ("mha_batch_prefill_func", {"kv_indptr": lambda x: x.long()}, "kv_indptr must be contiguous int32"),
    ("mha_batch_prefill_func", {"cu_seqlens_q": ints(0)}, "batch size must be positive"),
    ("mha_batch_prefill_func", {"out": torch.empty(3, 8, 64, dtype=BF16)}, "out must be as q"),
    ("mha_batch_prefill_func", {"max_seqlen_q": 2}, "max_seqlen_q is too small"),
    ("mha_batch_prefill_func", {"max_seqlen_k": 0}, "without keys"),
    ("mha_batch_prefill_func", {"cu_seqlens_q": ints(0, 2, 3), "kv_indptr": ints(0, 5, 5)}, "sequence without keys"),
    ("mha_batch_prefill_func", {"kv_page_indices": lambda x: x[:133]}, "read behind its end"),
    ("mha_batch_prefill_func", {"kv_page_indices": lambda x: x + 40}, "names no row"),
    ("paged_attention_v1", {"kv_cache_layout": "5D"}, "layouts are NHD and HND"),
    ("paged_attention_v1", {"query": lambda q: q.float()}, "Unsupported data type"),
    ("paged_attention_v1", {"kv_cache_dtype": "fp8_e5m2"}, "Unsupported kv_cache_dtype"),
    ("paged_attention_v1", {"kv_cache_dtype": "fp8"} | dict.fromkeys(
        ("key_cache", "value_cache"), lambda x: x.to(torch.float8_e4m3fn)), "taken for granted"),
    ("paged_attention_v1", {"value_cache": lambda v: v.transpose(1, 2).contiguous().transpose(1, 2)}, "as the keys do"),
    ("paged_attention_v1", dict.fromkeys(("query", "key_cache", "value_cache"), lambda x: x[..., :96]), "64 and 128"),
    ("paged_attention_v1", dict.fromkeys(("key_cache", "value_cache"), lambda x: x[:, :8]), "1, 16 and 32"),
    ("paged_attention_v1", {"query": torch.randn(2, 40, 128, dtype=BF16)}, "more than 16 heads"),
    ("paged_attention_v1", {"query": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)}, "one behind the other"),
    ("paged_attention_v1", {"out": lambda x: x.half()}, "out must be as the query"),
    ("paged_attention_v1", {"mtp": 2}, "one token a sequence"),
    ("paged_attention_v1", {"partition_size": 512}, "one token a sequence"),
    ("paged_attention_v1", {"block_tables": ints(1, 3, 2, 0).view(2, 2).T}, "rows of the table"),
    ("paged_attention_v1", {"context_lens": lambda x: x.long()}, "context_lens must be contiguous int32"),
    ("paged_attention_v1", {"logits_soft_cap": 3.0, "sliding_window": 8}, "behind the others"),
    ("paged_attention_v1", {"logits_soft_cap": 3.0, "alibi_slopes": torch.ones(8)}, "behind the others"),
    ("paged_attention_v1", {"alibi_slopes": torch.ones(8, dtype=BF16)}, "slopes are float32"),
    ("paged_attention_v1", {"k_scale": torch.ones(2)}, "one float32"),
    ("paged_attention_v1", {"workspace_buffer": lambda x: x[:4000]}, "workspace is too small"),
    ("paged_attention_v1", {"context_lens": ints(20, 0)}, "context_lens"),
    ("paged_attention_v1", {"max_context_len": 19}, "context_lens"),
    ("paged_attention_v1", {"block_tables": lambda x: x + 5}, "names no row"),
    ("pa_fwd_asm", {"Q": lambda q: q.float()}, "unsupport Q dtype"),
    ("pa_fwd_asm", {"K_QScale": torch.ones(1), "V_QScale": torch.ones(1)}, "scales by token"),
    ("pa_fwd_asm", {"V": torch.randn(4, 1, 128, 16, dtype=BF16).unsqueeze(2)}, "layout 5D"),
    ("pa_fwd_asm", {"V": lambda v: v.repeat(2, 1, 1, 1, 1)[::2]}, "as far apart"),
    ("pa_fwd_asm", {"Q": lambda q: q[..., :64], "K": lambda k: k[:, :, :8].contiguous(),
                    "V": lambda v: v[..., :64, :].contiguous()}, "cannot get heuristic kernel"),
    ("pa_fwd_asm", {"K": torch.randn(4, 1, 16, 32, 8, dtype=BF16), "V": torch.randn(4, 1, 4, 128, 8, dtype=BF16)},
     "cannot get heuristic kernel"),
    ("pa_fwd_asm", {"Q": torch.randn(2, 24, 128, dtype=BF16)}, "cannot get heuristic kernel"),
    ("pa_fwd_asm", {"Q": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1)}, "one behind the other"),
    ("pa_fwd_asm", {"max_qlen": 2, "qo_indptr": ints(0, 1, 2)}, "one token a sequence"),
    ("pa_fwd_asm", {"out_": torch.empty(2, 8, 128)}, "out_ must be as Q"),
    ("pa_fwd_asm", {"block_tables_stride0": 1}, "rows are elsewhere"),
    ("pa_fwd_asm", {"context_lens": ints(20, 0)}, "sequence without keys"),
    ("pa_fwd_asm", {"block_tables": lambda x: x - 1}, "names no row"),
    *((name, change, text) for name in OF_LATENTS for change, text in (
        ({"kv_buffer": lambda x: x.view(20, 2, 1, 576)}, "pages of one token"),
        ({"q": lambda q: q.mT.contiguous().mT}, "is_contiguous"),
        ({"q": lambda q: q.half()}, "is_contiguous"),
        ({"o": lambda o: o.float()}, "as wide as latents"),
        ({"sm_scale": None}, "no scale of its own"),
        ({"kv_indices": lambda x: x.long()}, "kv_indices must be contiguous int32"),
        ({"kv_indices": lambda x: x[:12]}, "read behind its end"),
        ({"kv_indices": lambda x: x + 40}, "names no row"),
        ({"kv_last_page_lens": ints(1, 3)}, "pages of one token"),
        ({"logit_cap": 3.0}, "logit_cap"),
    )),
    ("mla_decode_fwd", {"work_meta_data": None}, "persistent kernel"),
    ("mla_decode_fwd", {"num_kv_splits": None}, "another kernel"),
    ("mla_decode_fwd", {"max_seqlen_q": 2}, "not supported"),
    ("mla_decode_fwd", dict.fromkeys(("q", "o"), lambda x: x.repeat(1, 8, 1)), "not supported"),
    ("mla_decode_fwd", {"kv_buffer": lambda x: x.to(torch.float8_e4m3fn)}, "unsupport current data type"),
    ("mla_decode_fwd", {"kv_buffer": lambda x: x.to(torch.float8_e4m3fnuz)}, "latents have a scale"),
    ("mla_decode_fwd", {"kv_buffer": lambda x: x.to(torch.float8_e4m3fnuz), "kv_scale": torch.ones(())}, "one float32"),
    ("mla_decode_fwd", {"kv_indptr": ints(0, 8, 12)}, "for other lengths"),
    ("newer mla_decode_fwd", {"page_size": 16}, "pages of one token"),
    ("mla_prefill_fwd", dict.fromkeys(("q", "o"), lambda x: x.repeat(1, 2, 1)), "==16 or 128"),
    ("mla_prefill_fwd", {"kv_buffer": lambda x: x.to(torch.float8_e4m3fnuz)}, "not looked at"),
    ("mla_prefill_fwd", {"qo_indptr": ints(0, 2, 2), "max_seqlen_q": 2}, "sequence without a query"),
    ("mla_prefill_fwd", {"max_seqlen_q": 2}, "max_seqlen_q"),
    ("mla_prefill_fwd", {"kv_indptr": ints(0, 12, 12)}, "sequence without keys"),
]  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_keeps_to_them_is_taken(name):
    function, arguments = CALLS[name]
    function(**arguments())


@pytest.mark.parametrize(
    ("name", "change", "text"), VIOLATIONS, ids=[f"{name} {text} {i}" for i, (name, _, text) in enumerate(VIOLATIONS)]
)
def test_a_call_that_violates_one_is_refused(name, change, text):
    function, arguments = CALLS[name]
    made = arguments()
    for key, value in change.items():
        made[key] = value(made[key]) if callable(value) else value
    with pytest.raises(Refused, match=text):
        function(**made)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_the_declaration_does_not_take_is_refused(name):
    function, arguments = CALLS[name]
    made = arguments()
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        function(**made, no_such_argument=1)
    made.pop(next(iter(made)))
    with pytest.raises(TypeError, match="missing a required argument"):
        function(**made)


def test_the_work_of_mla_is_divided_for_what_it_is_told_only():
    lens = ints(0, 9, 12)
    for heads in (128, 24):
        with pytest.raises(Refused, match=r"work_info_set|only supports|sixteens"):
            divided(work(), lens, heads=heads)
    for others in ({"max_seqlen_qo": 2}, {"uni_seqlen_qo": -1}, {"fast_mode": False}):
        with pytest.raises(Refused, match="one token a sequence"):
            divided(work(), lens, **others)
    with pytest.raises(Refused, match="power of 2"):
        divided(work(), lens, kv_granularity=24)
    with pytest.raises(Refused, match="must be contiguous int32"):
        divided(work(), lens.long())
    with pytest.raises(Refused, match="without keys"):
        divided(work(), ints(0, 9, 9))
    with pytest.raises(Refused, match="sixteens"):
        AITER.get_mla_metadata_info_v1(2, 1, 24, BF16, BF16, is_sparse=False)


def test_its_tensors_are_as_large_as_the_work_that_several_heads_make():
    assert [work(heads=32)["reduce_partial_map"].shape, work(heads=32)["work_info_set"].shape] == [(610,), (307, 8)]
    assert work(batch=500)["reduce_partial_map"].shape == (606,)
    assert work(heads=32, aiter=NEWER)["work_info_set"].shape == (610, 8)
    taken = divided(work(heads=32), ints(0, 9, 12), heads=32)
    with pytest.raises(Refused, match="reduce_partial_map is"):
        divided(taken | {"reduce_partial_map": torch.empty(606, dtype=torch.int32)}, ints(0, 9, 12), heads=32)


def test_newer_kernels_of_cdna4_compute_64_heads_at_once_where_nothing_is_fp8():
    aiter = aiter_emulation.module("gfx950", generation="repository")
    assert work(heads=64, aiter=aiter)["reduce_final_map"].shape == (2, 2)
    assert work(heads=96, aiter=aiter)["reduce_final_map"].shape == (12, 2)
    fp8 = aiter.get_mla_metadata_info_v1(2, 1, 64, BF16, torch.float8_e4m3fn, is_sparse=False)
    assert fp8[4] == ((8, 2), torch.int32)
    aiter_emulation.module("gfx942")
    assert work(heads=64, aiter=NEWER)["reduce_final_map"].shape == (8, 2)


def test_the_wheels_names_for_two_tensors_of_the_division_are_each_others():
    """By its names they land in each other's place, which the kernel would fill without noticing."""
    tensors = work()
    swapped = tensors | {"work_info_set": tensors["work_indptr"], "work_indptr": tensors["work_info_set"]}
    with pytest.raises(Refused, match=r"work_indptr is torch.int32, \(305,\)"):
        divided(swapped, ints(0, 9, 12))


def test_what_is_passed_by_position_to_one_generation_is_something_else_to_the_other():
    made = decode_call()
    work_of_it = {name: made.pop(name) for name in list(made) if name.startswith(("work", "reduce", "num_kv"))}
    positional = list(made.values())
    AITER.mla.mla_decode_fwd(*positional, **work_of_it)
    with pytest.raises(Refused, match="pages of one token"):
        NEWER.mla.mla_decode_fwd(*positional, **work_of_it)
    divided_by_position = [ints(0, 1, 2), ints(0, 9, 12), 16, 1, True, *work().values()]
    with pytest.raises((Refused, TypeError)):
        NEWER.get_mla_metadata_v1(*divided_by_position, max_seqlen_qo=1, uni_seqlen_qo=1)


CDNA3, CDNA4 = (
    Platform(kind="rocm", vendor="amd", name=arch, arch=arch, torch_device="cuda") for arch in ("gfx942", "gfx950")
)
HEADS = AttentionSpec(num_qo_heads=8, num_kv_heads=1, head_dim=128)
MLA = AttentionSpec.mla(num_qo_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.1)


def fields(backend, spec, device, role):
    declared: Capabilities = backend.capabilities
    return sorted({reason.field for reason in declared.reject_reasons(spec, device, role)})


@pytest.mark.parametrize(
    ("backend", "spec", "role", "refused"),
    [
        (prefill.AiterBackend, HEADS, "prefill", []),
        (prefill.AiterBackend, HEADS.replace(sliding_window=8), "prefill", ["sliding_window"]),
        (prefill.AiterBackend, HEADS.replace(alibi=True), "prefill", ["alibi"]),
        (prefill.AiterBackend, HEADS.replace(kv_dtype="float8_e4m3fnuz"), "prefill", ["kv_dtype"]),
        (prefill.AiterBackend, HEADS.replace(head_dim=64), "prefill", ["head_dim"]),
        (aiter_paged.AiterPagedBackend, HEADS, "decode", []),
        (aiter_paged.AiterPagedBackend, HEADS.replace(return_lse=True), "decode", ["return_lse"]),
        (aiter_paged.AiterPagedBackend, HEADS.replace(num_qo_heads=24), "decode", ["num_qo_heads"]),
        (aiter_paged.AiterPagedBackend, HEADS.replace(sinks=True), "decode", ["sinks"]),
        (aiter_asm.AiterAsmBackend, HEADS, "decode", []),
        (aiter_asm.AiterAsmBackend, HEADS.replace(kv_dtype="float8_e4m3fnuz"), "decode", ["kv_dtype"]),
        (aiter_mla.AiterMLABackend, MLA, "decode", []),
        (aiter_mla.AiterMLABackend, MLA.replace(num_qo_heads=128), "decode", ["num_qo_heads"]),
        (aiter_mla.AiterMLABackend, MLA.replace(dtype="float16"), "decode", ["dtype"]),
        (aiter_mla_prefill.AiterMLAPrefillBackend, MLA.replace(num_qo_heads=128), "prefill", []),
        (aiter_mla_prefill.AiterMLAPrefillBackend, MLA.replace(num_qo_heads=32), "prefill", ["num_qo_heads"]),
        (aiter_mla_prefill.AiterMLAPrefillBackend, MLA.replace(causal=False), "prefill", ["causal"]),
    ],
)  # fmt: skip
def test_selection_refuses_it_before_any_call(backend, spec, role, refused):
    assert fields(backend, spec, CDNA3, role) == refused


@pytest.mark.parametrize(
    ("cdna3", "cdna4", "spec"),
    [
        (aiter_paged.AiterPagedBackend, aiter_paged.AiterPagedOCPBackend, HEADS.replace(may_quantize_q=True,
                                                                                      may_quantize_probs=True)),
        (aiter_mla.AiterMLABackend, aiter_mla.AiterMLAOCPBackend, MLA),
    ],
)  # fmt: skip
def test_each_generation_of_devices_has_the_fp8_that_it_computes_with(cdna3, cdna4, spec):
    """The same bytes are half as much on CDNA3."""
    fnuz, ocp = spec.replace(kv_dtype="float8_e4m3fnuz"), spec.replace(kv_dtype="float8_e4m3fn")
    assert fields(cdna3, fnuz, CDNA3, "decode") == fields(cdna4, ocp, CDNA4, "decode") == []
    assert fields(cdna3, ocp, CDNA3, "decode") == fields(cdna4, fnuz, CDNA4, "decode") == ["kv_dtype"]
    assert fields(cdna3, fnuz, CDNA4, "decode") == fields(cdna4, ocp, CDNA3, "decode") == ["arch"]
    (reason,) = cdna3.capabilities.reject_reasons(ocp, CDNA3, "decode")
    assert str(reason) == "kv_dtype: wanted float8_e4m3fn, supported auto, float8_e4m3fnuz; set kv_dtype='auto'"
    byte = torch.tensor([0x38], dtype=torch.uint8)
    assert byte.view(torch.float8_e4m3fn).float() == 2 * byte.view(torch.float8_e4m3fnuz).float()

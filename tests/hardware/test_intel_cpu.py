"""`intel_cpu` on this machine's CPU: cases of the kit and of its own, on AVX2 too; what it needs, and what it holds.

A variant of dtypes and dims is compiled in seconds, once for steps of one new token and once for those of several, so
variants are few, and most cases are of one. Those of one new token for each sequence compile half.
"""

import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import anyattn
from anyattn import AttentionSpec, ContractError
from anyattn.hardware_backend.intel import openmp
from anyattn.hardware_backend.intel.cpu import IntelCPUBackend
from anyattn.platforms.cpu import probe
from anyattn.testing.numerics.cases import Case, cases_for
from anyattn.testing.numerics.checks import check_case

CPU = probe().devices[0]
WIDTHS = {
    "AVX-512": CPU,
    "AVX2": dataclasses.replace(CPU, features=frozenset(f for f in CPU.features if not f.startswith("avx512"))),
}
LACKING = sorted({"avx2", "f16c", "fma"} - CPU.features)
HAS_NUMBA = importlib.util.find_spec("numba") is not None


@pytest.fixture
def kernels():
    """Skips where the kernels cannot be compiled or run."""
    if LACKING:
        pytest.skip(f"needs a CPU with {', '.join(LACKING)}")
    if not HAS_NUMBA:
        pytest.skip("needs numba")


KIT = (
    "plain", "causal False, return_lse=True", "sliding_window=33, return_lse=True",
    "sinks=True, return_lse=True, from -1e4 to 30", "sinks=True, return_lse=True, in bfloat16", "layout HND",
    "page size 1, NHD", "page size 3, HND", "joined layers, HND", "joined layers, sliding_window=33", "chunked prefill",
    "mixed", "prefill of 600 tokens", "2 to 13 new tokens", "decode of 33 sequences", "sequences without tokens",
    "3000 tokens, return_lse=True", "q at odd strides", "scores beyond 100", "pages in random order",
    "nothing behind a sequence's end is read", "one plan for two layers, sinks=True",
    "sliding_window=16, in pages that are all kept", "sliding_window=4096", "deterministic=True, 33 sequences",
    "deterministic=True, 3000 tokens", "KV float8_e4m3fn, a scale for each head", "KV float8_e4m3fn, tensor scales",
    "joined layers, KV float8_e4m3fn", "MLA 64+16 plain",
    "MLA 64+16 sliding_window=33, return_lse=True", "MLA 64+16 sinks=True, return_lse=True",
    "MLA 64+16 prefill of 600 tokens", "MLA 64+16 joined layers, NHD",
)  # fmt: skip
"""Cases of the kit, which has ten times as many: those of a feature each, of three variants."""


def heads(num_kv_heads, group_size, head_dim, **fields):
    return AttentionSpec(
        num_qo_heads=num_kv_heads * group_size, num_kv_heads=num_kv_heads, head_dim=head_dim, return_lse=True, **fields
    )


def decode(name, spec, page_size, layout, **fields):
    """Steps of one new token for each sequence."""
    return Case(
        name=name, spec=spec, page_size=page_size, layout=layout, stored_before=(40, 7, 129), steps=((1, 1, 1),) * 2,
        **fields,
    )  # fmt: skip


MIXED = {"dtype": "float32", "kv_dtype": "bfloat16"}
OWN = [
    decode("float32, no groups, heads of 72", heads(3, 1, 72, dtype="float32", sliding_window=33), 3, "HND"),
    decode(
        "float16 on float8_e5m2, groups of 16",
        heads(1, 16, 40, dtype="float16", kv_dtype="float8_e5m2", causal=False), 1, "NHD", scale_as_tensor=True,
    ),
    decode(
        "bfloat16 on float16, values shorter than keys",
        heads(2, 6, 96, v_head_dim=80, kv_dtype="float16", logits_soft_cap=3.0, sinks=True), 16, "HND",
    ),
    decode("float16 on float32, groups of 5", heads(2, 5, 20, dtype="float16", kv_dtype="float32"), 5, "NHD"),
    decode("float32 on bfloat16, keys of 7 and values of 5", heads(5, 3, 7, v_head_dim=5, **MIXED), 7, "HND"),
    Case(
        name="several new tokens, values longer than keys, a scale for each head",
        spec=heads(
            2, 3, 32, v_head_dim=48, kv_dtype="float8_e4m3fn", kv_scale_per_head=True, sliding_window=33,
            logits_soft_cap=3.0, sinks=True,
        ),
        page_size=256, layout="HND", stored_before=(40, 7, 129), steps=((2, 13, 5), (80, 2, 2)), scale_as_tensor=True,
    ),
    *(
        Case(
            name=f"prompts of several blocks, sliding_window={window}", spec=heads(2, 4, 64, sliding_window=window),
            page_size=16, layout="NHD", steps=((1300, 100), (70, 600)),
        )
        for window in (33, 511, 513, 900)
    ),
    decode(
        "MLA, float8_e5m2, one head",
        AttentionSpec.mla(
            num_qo_heads=1, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=0.05, kv_dtype="float8_e5m2",
            return_lse=True,
        ),
        2, "NHD",
    ),
]  # fmt: skip
ON_AVX2 = (
    "plain", "mixed", "3000 tokens, return_lse=True", "deterministic=True, 33 sequences",
    "several new tokens, values longer than keys, a scale for each head",
    "float32 on bfloat16, keys of 7 and values of 5",
)  # fmt: skip


def chosen():
    found = {case.name: case for case in cases_for(IntelCPUBackend.capabilities) if case.name in KIT}
    found |= {case.name: case for case in OWN}
    wanted = {"AVX-512": (*KIT, *(case.name for case in OWN)), "AVX2": ON_AVX2}
    for width, names in wanted.items():
        yield from (pytest.param(width, found[name], id=f"{name}, {width}") for name in names)


@pytest.mark.parametrize(("width", "case"), list(chosen()))
def test_it_is_right_in_what_it_declares(kernels, width, case):
    if width == "AVX-512" and "avx512f" not in CPU.features:
        pytest.skip("needs a CPU with avx512f")
    assert check_case(IntelCPUBackend, case, WIDTHS[width], torch.seed() % (1 << 31)).failure is None


CAPS = [0.01, 30.0, 50.0, 1e4, 1e29]


@pytest.mark.parametrize("cap", CAPS)
def test_a_soft_cap_of_any_size_keeps_float32_s_precision(kernels, cap):
    """Scores far below the cap are in the part of tanh where an absolute error, times the cap, would be large."""
    spec = heads(2, 2, 16, dtype="float32", logits_soft_cap=cap)
    case = Case(
        name="", spec=spec, page_size=16, layout="NHD", stored_before=(40, 5), steps=((1, 1), (3, 2)), query_scale=2.0
    )
    assert check_case(IntelCPUBackend, case, CPU, torch.seed() % (1 << 31)).failure is None


def survey(platform=CPU, **fields):
    return anyattn.survey(heads(2, 4, 64, **fields), device=platform)


def test_it_is_chosen_for_both_roles_on_this_cpu(kernels):
    selection = survey().selection
    assert (selection.prefill, selection.decode) == ("intel_cpu", "intel_cpu")
    assert survey(WIDTHS["AVX2"]).selection.decode == "intel_cpu"


def test_without_numba_torch_native_is_chosen_and_the_explanation_says_what_to_install(monkeypatch):
    version = importlib.metadata.version

    def without_numba(name):
        if name == "numba":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_numba)
    capable = dataclasses.replace(CPU, arch="x86_64", features=CPU.features | {"avx2", "f16c", "fma"})
    selection = survey(capable).selection
    assert (selection.prefill, selection.decode) == ("torch_native", "torch_native")
    (line,) = (line for line in selection.explain().splitlines() if line.strip().startswith("intel_cpu: "))
    assert "wanted numba>=0.62, supported not installed" in line
    assert 'pip install "anyattn[cpu]"' in line


@pytest.mark.parametrize("feature", ["avx2", "f16c", "fma"])
def test_a_cpu_without_the_instructions_is_refused_with_what_it_lacks(feature):
    less = dataclasses.replace(CPU, arch="x86_64", features=(CPU.features | {"avx2", "f16c", "fma"}) - {feature})
    (reason,) = IntelCPUBackend.capabilities.reject_reasons(heads(2, 4, 64), less, "decode")
    assert feature in reason.wanted


@pytest.fixture
def runtime():
    """Sequences of some lengths, and a step of one new token or as many as are asked for."""

    def make(spec, lengths, counts):
        pages = sum(-(-(length + count) // 16) for length, count in zip(lengths, counts, strict=True))
        sizes = {"num_layers": 1, "num_pages": pages, "page_size": 16}
        rt = anyattn.create_runtime(spec, **sizes, backend="intel_cpu", device="cpu")
        seqs = rt.new_sequences(len(lengths))
        rt.extend(seqs, list(lengths))
        plan = rt.plan(rt.extend(seqs, list(counts)))
        dtype, tokens = getattr(torch, spec.dtype), sum(counts)
        q = torch.randn(tokens, spec.num_qo_heads, spec.head_dim).to(dtype)
        k, v = (torch.randn(tokens, spec.num_kv_heads, spec.head_dim).to(dtype) for _ in range(2))
        for part in rt.pools[0].layers[0].stored:
            part.fill_(0.5)
        return lambda: rt.run(0, q, k, v, plan)

    return make


def test_a_torch_without_openmp_s_threads_is_told_with_what_to_use_instead(kernels, runtime, monkeypatch):
    """As where no library of the process has the function that starts them."""
    call = runtime(heads(2, 4, 64), (20,), (1,))
    with monkeypatch.context() as patched:
        patched.setattr(ctypes, "CDLL", lambda *arguments, **named: SimpleNamespace())
        openmp._parallel.cache_clear()
        with pytest.raises(ContractError, match="backend='torch_native'"):
            call()
    out, _ = call()
    assert out.isfinite().all(), "what was refused is not kept"


def test_threads_are_torch_s_where_the_process_has_another_openmp(tmp_path):
    """As scikit-learn brings one. torch's is what its own library is bound to."""
    folder = Path(torch.__file__).parent / "lib"
    files = sorted(folder.glob("libgomp*"))
    if not files or not (folder / "libtorch_cpu.so").exists():
        pytest.skip("needs a torch that brings GNU's OpenMP")
    shutil.copy(files[0], tmp_path / "libgomp-another.so")
    ctypes.CDLL(str(tmp_path / "libgomp-another.so"))
    openmp._parallel.cache_clear()
    wanted = ctypes.CDLL(str(folder / "libtorch_cpu.so")).GOMP_parallel
    addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in (openmp._parallel(), wanted)]
    assert addresses[0] == addresses[1]


def peak_of(call):
    """How far a call raises the memory that this process holds, in bytes."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        clear.write_text("5")
    except OSError:
        pytest.skip("needs Linux's /proc/self/clear_refs")

    def held(name):
        return 1024 * int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    before = held("VmRSS")
    call()
    return held("VmHWM") - before


MIB = 1 << 20


def test_decode_of_16_sequences_of_4096_tokens_holds_a_few_hundred_kilobytes_beside_the_pool(kernels, runtime):
    """Of a thread 100 KiB of scratch memory, 16 results, and of 8 parts a thread at most 3 KiB each: 4 MiB has room for
    what Python and the allocator take meanwhile, where gathering takes 32 MiB."""
    call = runtime(heads(2, 4, 64), (4095,) * 16, (1,) * 16)
    runtime(heads(2, 4, 64), (20,), (1,))()  # so that what is compiled is there
    assert peak_of(call) < 4 * MIB


def test_a_prompt_behind_40_thousand_tokens_holds_gathered_copies_of_32_mib_however_long(kernels, runtime):
    """One in pages and one by heads, for torch, which may pack them once more for its products: a third. 80 tokens'
    results in float32 are 1.3 MiB, of which a merge has six."""
    call = runtime(heads(8, 4, 128), (40_000,), (80,))
    runtime(heads(8, 4, 128), (20,), (80,))()  # torch's own first call
    assert peak_of(call) < (3 * 32 + 12) * MIB

"""What has the `triton` backend's kernels compiled anew: never a step's size, and all that Triton compiles in.

`BoundKernel` finds a compiled kernel by a key that the backend makes. Where two launches that Triton would tell apart
had one key, the second would run what was compiled for the first: with other strides, or for pointers that are aligned.
"""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from anyattn.attention.graph import GraphBatch, GraphSizes
from anyattn.mem_cache.base import LayerKV
from anyattn.types import GraphLevel


def _load(path):
    spec = importlib.util.spec_from_file_location(f"triton_keys_{path.stem}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


launched = _load(Path(__file__).with_name("triton_attention") / "launched.py")
kernel_keys = _load(Path(__file__).parents[1] / "mem_cache" / "kernel_keys.py")
gqa, mla = launched.gqa, launched.mla

ARCHS = ("sm90", "gfx942")
SPECS = {
    "gqa": gqa(128),
    "features": gqa(80, sliding_window=40, logits_soft_cap=5.0, sinks=True, alibi=True, return_lse=True),
    "fp8": gqa(64, kv_dtype="float8_e4m3fn", kv_scale_per_head=True),
    "tree": gqa(64, tree_mask=True),
    "deterministic": gqa(64, deterministic=True),
    "mla": mla(),
    "mla-128-heads": mla(128),
}
DECODE = [
    ((10,), (1,)),
    ((1, 16, 17), (1, 1, 1)),
    ((0,) * 16, (1,) * 16),
    ((900, 3), (1, 1)),
    ((40,) * 129, (1,) * 129),
    ((3000,), (1,)),
]
PREFILL = [
    ((0,), (17,)),
    ((0, 0), (100, 20)),
    ((512, 0, 1), (16, 17, 33)),
    ((0,) * 16, (48,) * 16),
    ((2500,), (64,)),
    ((0,) * 130, (20,) * 130),
    ((0, 0), (1000, 900)),
]
MIXED = [
    ((10, 0), (1, 17)),
    ((1, 16, 17), (1, 40, 1)),
    ((5,) * 16 + (0,), (1,) * 16 + (300,)),
    ((1000, 3), (1, 64)),
    ((40,) * 129 + (0, 0), (1,) * 129 + (33, 500)),
    ((3000, 900, 10), (1, 20, 31)),
]
STEPS = {"decode": DECODE, "prefill": PREFILL, "mixed": MIXED}
"""Tokens of each sequence before the step, and new ones: of as many lengths and numbers as may tell steps apart."""


def compiled_of(launches, arch):
    """By the kernels' names, what Triton would compile for the launches."""
    found: dict[str, set[str]] = {}
    for launch in launches:
        found.setdefault(launch.name, set()).add(str(launch.specialised(launched.TARGETS[arch])))
    return found


def variants_of(launches, arch):
    """By the bound kernels and their keys, what Triton would compile for the launches. There has to be one for each."""
    found: dict[object, set[str]] = {}
    for launch in launches:
        compiled = str(launch.specialised(launched.TARGETS[arch]))
        found.setdefault((launch.name, launch.bound, launch.key), set()).add(compiled)
    return found


def require_one_each(launches, arch):
    for (name, _, key), compiled in variants_of(launches, arch).items():
        assert len(compiled) == 1, f"{name} is compiled in {len(compiled)} ways for one key: {key}: {compiled}"


@pytest.mark.parametrize("phase", STEPS)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_no_size_of_a_step_asks_for_another_compiled_kernel(arch, name, phase):
    kernel_keys.compiler()
    trees = SPECS[name].tree_mask and phase == "prefill"
    engine = launched.Engine(SPECS[name], arch, num_pages=1500)
    launches, most = [], {}
    for before, new in STEPS[phase]:
        of_step = engine.launches(engine.batch(before, new, trees=trees and max(new) < 100))
        for kernel, compiled in compiled_of(of_step, arch).items():
            most[kernel] = max(most.get(kernel, 0), len(compiled))
        launches += of_step
    assert {kernel: len(compiled) for kernel, compiled in compiled_of(launches, arch).items()} == most
    assert len({launch.grid for launch in launches}) > 5
    require_one_each(launches, arch)


@pytest.mark.parametrize("name", ["gqa", "fp8", "mla"])
@pytest.mark.parametrize("arch", ARCHS)
def test_no_size_of_the_pool_and_no_width_of_the_table_asks_for_another_compiled_kernel(arch, name):
    kernel_keys.compiler()
    launches, widths = [], set()
    for num_pages, before, page_size in ((3, 20, 16), (16, 100, 16), (17, 200, 16), (1025, 10_000, 16)):
        engine = launched.Engine(SPECS[name], arch, num_pages=num_pages, page_size=page_size)
        for new in ((1,), (20,)):
            batch = engine.batch((before,), new)
            widths.add(batch.block_table.stride(0))
            launches += engine.launches(batch)
    assert len(widths) > 3
    kinds = compiled_of(launches, arch)
    of_both_phases = {kernel: len(compiled) for kernel, compiled in kinds.items()}
    assert max(of_both_phases.values()) <= 2
    assert of_both_phases["ranges_kernel"] == of_both_phases["parts_kernel"] == 1


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_tokens_of_each_sequence_choose_among_three_tiles(arch, name):
    """Sequences of one to 16 new tokens each, as a draft's verification has them."""
    kernel_keys.compiler()
    spec = SPECS[name]
    engine = launched.Engine(spec, arch)
    launches = []
    for count in range(1, 17):
        launches += engine.launches(engine.batch((50, 60), (count, count), trees=spec.tree_mask))
    attending = [launch for launch in launches if launch.name not in ("ranges_kernel", "parts_kernel", "merge_kernel")]
    keys = {key for compiled in compiled_of(attending, arch).values() for key in compiled}
    assert len(keys) <= 3
    require_one_each(launches, arch)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_the_first_steps_have_few_kernels_compiled(arch, name):
    """Whoever waits for the first token waits for these: what divides the work, what attends and what merges."""
    kernel_keys.compiler()
    for phase, most in (("decode", 3), ("prefill", 3), ("mixed", 6)):
        engine = launched.Engine(SPECS[name], arch)
        kinds = compiled_of(engine.launches(engine.batch(*STEPS[phase][1])), arch)
        assert sum(map(len, kinds.values())) <= most


def part_of_fused(tokens, heads, dim, dtype, *, gap, offset):
    """q as a fused projection leaves it: `gap` elements between tokens, begun `offset` elements behind the first."""
    row = torch.zeros(tokens * (heads * dim + gap) + offset, dtype=dtype)[offset:]
    return row.as_strided((tokens, heads, dim), (heads * dim + gap, dim, 1))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("arch", ARCHS)
def test_what_tells_launches_apart_tells_compiled_kernels_apart(arch, name):
    """Queries, outputs, sinks and scales at any address and with any strides; layers whose pages lie differently."""
    kernel_keys.compiler()
    spec = SPECS[name]
    engine = launched.Engine(spec, arch, num_layers=2)
    dtype, heads = getattr(torch, spec.dtype), spec.num_qo_heads
    layers = [*engine.pool.layers, *other_layers(spec, engine.pool.cache)]
    engine.pool.layers = layers
    launches, tokens = [], 0
    for before, new in ((20, 30), (1, 1)), ((20, 30), (1, 40)):
        batch = engine.batch(before, new)
        plan = engine.backend.plan
        tokens = batch.num_tokens
        with launched.noted():
            planned = plan(batch)
        for gap, offset in ((0, 0), (8, 0), (3, 0), (0, 8), (0, 1), (8, 8), (5, 3)):
            q = part_of_fused(tokens, heads, spec.head_dim, dtype, gap=gap, offset=offset)
            for shift in (0, 1, 8):
                out = torch.empty(tokens * heads * spec.vo_head_dim + shift, dtype=dtype)[shift:]
                out = out.view(tokens, heads, spec.vo_head_dim)
                launches += engine.launches(batch, plan=planned, q=q, out=out)
        for layer in range(len(layers)):
            launches += engine.launches(batch, plan=planned, layer=layer)
        if spec.sinks:
            for sink_dtype in (torch.bfloat16, torch.float32):
                for shift in (0, 1):
                    sinks = torch.zeros(heads + shift, dtype=sink_dtype)[shift:]
                    launches += engine.launches(batch, plan=planned, sinks=sinks)
    require_one_each(launches, arch)
    if not (spec.is_mla and arch == "sm90"):  # its kernel in Gluon copies what it cannot take
        attending = compiled_of(launches, arch)
        assert max(map(len, attending.values())) > 3


def other_layers(spec, cache):
    """Layers whose pages have other strides, another address, and for fp8 scales that begin anywhere."""
    joined = launched.Engine(spec, "sm90", num_layers=3, joined_layers=True).pool.layers[1]
    made = [joined]
    plain = launched.Engine(spec, "sm90").pool.layers[0]

    def shifted(pages):
        bytes_of = torch.zeros(pages.numel() * pages.element_size() + 8, dtype=torch.uint8)[8:]
        return bytes_of.view(pages.dtype).view(pages.shape)

    k = shifted(plain.k)
    v = k[..., : spec.vo_head_dim] if spec.is_mla else shifted(plain.v)
    scales = {}
    if spec.kv_scale_per_head:
        all_scales = torch.ones(2 * spec.num_kv_heads + 1)
        scales = {"k_scale": all_scales[1 : 1 + spec.num_kv_heads], "v_scale": all_scales[1 + spec.num_kv_heads :]}
    made.append(LayerKV(k=k, v=v, layout=plain.layout, v_in_k=plain.v_in_k, **scales))
    return made


@pytest.mark.parametrize("name", ["gqa", "fp8", "deterministic", "mla"])
@pytest.mark.parametrize("arch", ARCHS)
def test_a_graph_s_steps_run_what_steps_without_it_have_compiled(arch, name):
    kernel_keys.compiler()
    spec = SPECS[name].replace(graph=GraphLevel.DECODE)
    engine = launched.Engine(spec, arch)
    before = engine.launches(engine.batch((20, 30), (1, 1)))
    for num_seqs in (1, 5, 16):
        sizes = GraphSizes(level=GraphLevel.DECODE, num_seqs=num_seqs, num_tokens=num_seqs, max_kv_len=200)
        batch = GraphBatch(engine.table, sizes).batch
        with launched.noted() as planning:
            plan = engine.backend.init_graph(batch)
            engine.backend.refresh_graph(plan, batch)
        launches = [*planning, *engine.launches(batch, plan=plan)]
        assert {launch.name for launch in launches} == {launch.name for launch in before}
        assert compiled_of(launches, arch) == compiled_of(before, arch)
        require_one_each([*before, *launches], arch)

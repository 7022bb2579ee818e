"""Every kernel that the `triton` backend launches compiles for its architecture, and fits: no device is needed.

Steps are planned and run by the backend itself, for architectures that are not here; what it would have launched is
compiled with the types, constants and options of that launch. So nothing has to be listed, and what is tuned anew is
compiled anew. A kernel that wants more shared memory than there is compiles all the same and fails at its launch: what
the compiler took is compared with what `tuning` says there is.

sm80, sm90 and gfx942 stand for what they are and for their makers' other architectures: all tiles, and all features.
Of the others there is what differs: less shared memory, or other instructions.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: TRITON_INTERPRET is set", allow_module_level=True)

from anyattn.attention.triton_attention import tuning

_spec = importlib.util.spec_from_file_location(
    "triton_launched", Path(__file__).with_name("triton_attention") / "launched.py"
)
launched = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launched)
gqa, mla = launched.gqa, launched.mla

pytestmark = pytest.mark.slow

BEFORE = (100, 300)
STEPS = {"16 rows": (1, 1), "32 rows": (4, 4), "64 rows": (8, 8), "long": (70, 90)}
"""New tokens of two sequences, so that 8 rows for each token want each of the tiles."""
MIXED = (1, 90)
SMALL_PAGES, LARGE_PAGES = 16, 128
"""Of fewer tokens than any block, and of more, as descriptors want it."""
MOST_STACK = 400
"""Bytes of a thread that the main tiles of sm90 may spill; there are 1020 of registers."""

SPECS = {
    "64": gqa(64),
    "80": gqa(80),
    "128": gqa(128),
    "192-128": gqa(192, 128),
    "256": gqa(256),
    "512": gqa(512),
    "mla": mla(),
    "widest": gqa(576),
    "wide-values": gqa(16, 512),
}
FEATURES = {
    "window-cap-sinks-lse": gqa(128, sliding_window=100, logits_soft_cap=5.0, sinks=True, return_lse=True),
    "alibi-e4m3-a-scale-a-head": gqa(128, alibi=True, kv_dtype="float8_e4m3fn", kv_scale_per_head=True),
    "tree-e5m2-cap": gqa(80, tree_mask=True, kv_dtype="float8_e5m2", logits_soft_cap=5.0),
    "non-causal-float32-lse": gqa(128, causal=False, dtype="float32", return_lse=True),
    "deterministic-float16": gqa(64, deterministic=True, dtype="float16"),
    "float32-keys-in-float16": gqa(64, dtype="float32", kv_dtype="float16"),
    "mla-float32": mla(dtype="float32"),
    "mla-e4m3-sinks-lse": mla(kv_dtype="float8_e4m3fn", sinks=True, return_lse=True),
}
GLUON = {
    "64": gqa(64),
    "128": gqa(128),
    "192-128-window-sinks-lse": gqa(192, 128, sliding_window=100, sinks=True, return_lse=True),
    "non-causal-float16": gqa(128, causal=False, dtype="float16"),
    "mla": mla(),
    "mla-128-heads-float16-sinks-lse": mla(128, dtype="float16", sinks=True, return_lse=True),
    "mla-non-causal-deterministic": mla(64, causal=False, deterministic=True),
}
TILES = {
    **dict.fromkeys(("sm80", "sm90", "gfx942"), tuple(SPECS)),
    "sm86": ("mla",),
    "sm89": ("128", "256", "mla", "widest", "wide-values"),
    "sm100": ("128", "mla"),
    "sm103": ("64",),
    "sm120": ("128", "256", "mla"),
    "sm121": ("64",),
    "gfx950": ("128", "256", "mla"),
}
FEATURED = ("sm80", "sm90", "gfx942")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """An empty cache, and none in the user's home; who sets TRITON_CACHE_DIR gets quick second runs."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("TRITON_CACHE_DIR"):
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(scope="module")
def seen():
    """What was compiled already: by target and kernel, and what Triton tells its variants apart by."""
    return set()


def compile_all(arch, launches, seen, *, most_stack=None):
    """Compiles what is new among the launches. Fails with all that does not compile or does not fit."""
    target, problems, kinds = launched.TARGETS[arch], [], set()
    for launch in launches:
        key = (target, launch.name, str(launch.specialised(target)))
        kinds.add(launch.name)
        if key in seen:
            continue
        seen.add(key)
        names = [name for name in ("BLOCK_M", "BLOCK_N", "STAGES") if name in launch.kernel.arg_names]
        what = f"{launch.name} {({name: launch.constant(name) for name in names})}"
        try:
            compiled = launch.compiled(target)
        except Exception as error:
            problems.append(f"{what} does not compile: {type(error).__name__}: {error}")
            continue
        assert compiled.asm["hsaco" if target[0] == "hip" else "cubin"]
        most = tuning.TUNINGS[arch].shared_bytes
        if compiled.metadata.shared > most:
            problems.append(f"{what} wants {compiled.metadata.shared} bytes of shared memory, and there are {most}")
        stack = None if most_stack is None else stack_bytes(compiled.asm["cubin"])
        if stack is not None and stack > most_stack:
            problems.append(f"{what} spills {stack} bytes of registers")
    assert not problems, "\n".join(problems)
    return kinds


def stack_bytes(cubin):
    """What a thread has on its stack, which is where registers are spilled to; None where the tool is missing."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    tool = tool if tool.exists() else shutil.which("cuobjdump")
    if tool is None:
        return None
    path = Path(os.environ["TRITON_CACHE_DIR"]) / "measured.cubin"
    path.write_bytes(cubin)
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True)
    found = re.findall(r"STACK:(\d+)", told.stdout + told.stderr)
    return max(map(int, found)) if found else None


def steps_of(engine, steps):
    """What the steps launch, one after the other."""
    trees = engine.spec.tree_mask
    return [launch for new in steps for launch in engine.launches(engine.batch(BEFORE, new, trees=trees))]


def test_the_architectures_are_all_that_triton_compiles_for():
    assert set(TILES) == set(launched.TARGETS) == set(tuning.TUNINGS) - {"pvc"}
    others = {
        arch: other
        for arch, other in (("sm103", "sm100"), ("sm121", "sm120"), ("sm86", "sm80"))
        if tuning.TUNINGS[arch].long == tuning.TUNINGS[other].long
    }
    assert len(others) == 3, "those of which little is compiled have tables of their own now"


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, names in TILES.items() for name in names])
def test_every_tile_of_the_tables_compiles_and_fits(arch, name, seen):
    sizes = (SMALL_PAGES, LARGE_PAGES) if tuning.TUNINGS[arch].descriptors else (SMALL_PAGES,)
    for page_size in sizes:
        engine = launched.Engine(SPECS[name], arch, page_size=page_size, backend=launched.PlainBackend)
        launches = steps_of(engine, STEPS.values())
        tiles = {launch.constant("BLOCK_M") for launch in launches if launch.name == "attend_kernel"}
        assert {16, 32, 64} <= tiles
        with_descriptors = {launch.constant("k_desc1") is not None for launch in launches if "attend" in launch.name}
        assert with_descriptors == {page_size == LARGE_PAGES}
        is_main = arch == "sm90" and name in ("64", "128", "mla")
        kinds = compile_all(arch, launches, seen, most_stack=MOST_STACK if is_main else None)
        assert kinds == {"ranges_kernel", "parts_kernel", "attend_kernel", "merge_kernel"}


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("arch", FEATURED)
def test_every_feature_compiles_and_fits(arch, name, seen):
    engine = launched.Engine(FEATURES[name], arch, page_size=LARGE_PAGES, backend=launched.PlainBackend)
    compile_all(arch, steps_of(engine, [MIXED]), seen)


@pytest.mark.parametrize("name", GLUON)
def test_the_kernels_in_gluon_compile_and_fit(name, seen):
    kinds = set()
    for page_size, layout in ((SMALL_PAGES, "NHD"), (LARGE_PAGES, "HND")):
        engine = launched.Engine(GLUON[name], "sm90", page_size=page_size, layout=layout)
        kinds |= compile_all("sm90", steps_of(engine, STEPS.values()), seen, most_stack=MOST_STACK)
    assert ("hopper_mla_kernel" if GLUON[name].is_mla else "hopper_extend_kernel") in kinds

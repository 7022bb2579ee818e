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

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: TRITON_INTERPRET is set", allow_module_level=True)

import triton

from anyattn.attention.triton_attention import tuning

_spec = importlib.util.spec_from_file_location(
    "triton_launched", Path(__file__).with_name("triton_attention") / "launched.py"
)
launched = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(launched)
gqa, mla = launched.gqa, launched.mla

pytestmark = pytest.mark.slow

BEFORE = (100, 300)
STEPS = {"16 rows": (1, 1), "32 rows": (4, 4), "64 rows": (8, 8), "long": (70, 90), "mixed": (1, 90)}
"""New tokens of two sequences: 8 rows for each token, so that each of the tiles is wanted."""
TILES = ("16 rows", "32 rows", "64 rows", "long")
ENDS = ("16 rows", "long")
SMALL, LARGE = 16, 128
"""Tokens of a page: fewer than a block has, and as many at least, as descriptors want it."""
MOST_STACK = 400
"""Bytes that a thread of sm90's main kernels may spill of its registers, of which it has 1020."""

SPECS = {
    "64": gqa(64),
    "80": gqa(80),
    "128": gqa(128),
    "192-128": gqa(192, 128),
    "256": gqa(256),
    "512": gqa(512),
    "widest": gqa(576),
    "mla": mla(),
}
CASES = {
    "sm80": {"64": (SMALL,), "128": (SMALL,), "256": (SMALL,), "512": (SMALL,), "widest": (SMALL,), "mla": (SMALL,)},
    "sm90": {
        "64": (LARGE,), "80": (SMALL,), "128": (SMALL, LARGE), "192-128": (LARGE,), "256": (SMALL,), "512": (LARGE,),
        "mla": (LARGE,),
    },
    "gfx942": {"128": (SMALL,), "256": (SMALL,), "widest": (SMALL,), "mla": (SMALL,)},
    "sm86": {"mla": (SMALL,)},
    "sm89": {"128": (SMALL,), "widest": (SMALL,)},
    "sm100": {"128": (LARGE,)},
    "sm103": {"64": (LARGE,)},
    "sm120": {"256": (LARGE,)},
    "sm121": {"64": (LARGE,)},
    "gfx950": {"mla": (SMALL,)},
}  # fmt: skip
"""By architecture: what of SPECS, and with which pages. FEATURED have all tiles, the others ENDS."""
FEATURED = {"sm80": "long", "sm90": "mixed", "gfx942": "16 rows"}
"""What has all tiles and all features, and in which step these are looked at."""
MAIN = ("64", "128")
DIVIDES_AND_MERGES = ("ranges_kernel", "parts_kernel", "merge_kernel")

FEATURES = {
    "window-cap-sinks-lse": gqa(128, sliding_window=100, logits_soft_cap=5.0, sinks=True, return_lse=True),
    "alibi-e4m3-scales": gqa(128, alibi=True, kv_dtype="float8_e4m3fn", kv_scale_per_head=True),
    "e4m3fnuz": gqa(64, kv_dtype="float8_e4m3fnuz"),
    "tree-e5m2-cap": gqa(64, tree_mask=True, kv_dtype="float8_e5m2", logits_soft_cap=5.0),
    "deterministic-non-causal-float16": gqa(64, deterministic=True, causal=False, dtype="float16"),
    "mla-e4m3-sinks-lse": mla(kv_dtype="float8_e4m3fn", sinks=True, return_lse=True),
    "float32": gqa(32, dtype="float32", kv_dtype="float16"),  # of wider heads it takes the compiler long
    "mla-float32": mla(dtype="float32"),
}
GLUON = {
    "64": (gqa(64, causal=False), SMALL, "NHD"),
    "128": (gqa(128), SMALL, "HND"),
    "128-window": (gqa(128, sliding_window=100, dtype="float16"), LARGE, "NHD"),
    "192-128-sinks-lse": (gqa(192, 128, sinks=True, return_lse=True), LARGE, "HND"),
    "mla": (mla(), SMALL, "NHD"),
    "mla-128-heads-sinks-lse": (mla(128, dtype="float16", sinks=True, return_lse=True), LARGE, "NHD"),
}


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
    target, problems = launched.TARGETS[arch], []
    for launch in launches:
        key = (target, launch.name, str(launch.specialised(target)))
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
    return [launch for name in steps for launch in engine.launches(engine.batch(BEFORE, STEPS[name], trees=trees))]


def test_the_architectures_are_all_that_triton_compiles_for():
    assert set(CASES) == set(launched.TARGETS) == set(tuning.TUNINGS) - {"pvc", "bmg_g21", "bmg_g31"}


@pytest.mark.parametrize(("arch", "name"), [(arch, name) for arch, names in CASES.items() for name in names])
def test_every_tile_of_the_tables_compiles_and_fits(arch, name, seen):
    for page_size in CASES[arch][name]:
        engine = launched.Engine(SPECS[name], arch, page_size=page_size, backend=launched.PlainBackend)
        launches = steps_of(engine, TILES if arch in FEATURED else ENDS)
        attending = [launch for launch in launches if launch.name == "attend_kernel"]
        by_descriptors = {launch.constant("k_desc1") is not None for launch in attending}
        assert by_descriptors == {tuning.TUNINGS[arch].descriptors and page_size == LARGE}
        assert {launch.name for launch in launches} == {*DIVIDES_AND_MERGES, "attend_kernel"}
        is_main = arch == "sm90" and name in MAIN
        # What divides and what merges hardly depends on the tile: it is compiled with the first one, and the features.
        is_first = name == next(iter(CASES[arch]))
        compile_all(arch, launches if is_first else attending, seen, most_stack=MOST_STACK if is_main else None)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("arch", FEATURED)
def test_every_feature_compiles_and_fits(arch, name, seen):
    spec = FEATURES[name]
    engine = launched.Engine(spec, arch, page_size=LARGE, backend=launched.PlainBackend)
    compile_all(arch, steps_of(engine, [FEATURED[arch]]), seen)


@pytest.mark.parametrize("name", GLUON)
def test_the_kernels_in_gluon_compile_and_fit(name, seen):
    spec, page_size, layout = GLUON[name]
    engine = launched.Engine(spec, "sm90", page_size=page_size, layout=layout)
    launches = [each for each in steps_of(engine, ["64 rows", "long"]) if each.kernel.is_gluon()]
    assert {each.name for each in launches} == {"hopper_mla_kernel" if spec.is_mla else "hopper_extend_kernel"}
    compile_all("sm90", launches, seen, most_stack=MOST_STACK)

"""Every Triton kernel of mem_cache compiles for NVIDIA and AMD, on a machine that has neither.

offline_kernels/TOPIC.py lists those of kernels/TOPIC_triton.py: `KERNELS = [(kernel, types, constants), ...]`, types
and constants by argument name (an argument that is None is a constant), with compile options (num_warps, ...) as a
fourth where they are not the default. A kernel is listed once for each set of types that it is launched with.

A case that a target has no instructions for is never launched there: `REFUSED = {(index, target): message}` says what
the compiler says, and the test holds that it does.

sm_90 stands for NVIDIA with every case, and gfx942 for AMD. sm_80, the oldest, which lacks most, has one case of each
kernel, and all that cast to fp8, which is where instructions differ; sm_100 has those casts and one case of each topic.
"""

import ast
import importlib
import importlib.util
import os
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs Triton's compiler: TRITON_INTERPRET is set", allow_module_level=True)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import anyattn.mem_cache.kernels as room

LISTS = Path(__file__).with_name("offline_kernels")
SOURCES = sorted(Path(room.__file__).parent.glob("*_triton.py"))
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}


def listed(topic):
    """The list of one topic; test folders are no packages, so it is loaded by its path."""
    path = LISTS / f"{topic}.py"
    spec = importlib.util.spec_from_file_location(f"offline_kernels_{topic}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases():
    found = []
    for path in sorted(LISTS.glob("*.py")):
        module = listed(path.stem)
        kernels = [case[0] for case in module.KERNELS]
        for index, case in enumerate(module.KERNELS):
            first, casts = kernels.index(case[0]) == index, case[2].get("FP8") or case[2].get("NATIVE")
            chosen = {"sm_80": first or casts, "sm_100": index == 0 or casts}
            for target in (target for target in TARGETS if chosen.get(target, True)):
                refused = getattr(module, "REFUSED", {}).get((index, target))
                name = f"{path.stem}-{index}-{case[0].__name__}-{target}"
                found.append(pytest.param(case, target, refused, id=name))
    return found


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    """An empty cache, and none in the user's home; who sets TRITON_CACHE_DIR gets quick second runs."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("TRITON_CACHE_DIR"):
            patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.mark.parametrize(("case", "target", "refused"), cases())
def test_a_kernel_compiles_without_its_device(case, target, refused):
    kernel, types, constants, options = (*case, {})[:4]
    names = kernel.arg_names
    assert set(names) == set(types) | set(constants), "the list and the kernel's arguments differ"
    signature = {name: "constexpr" if name in constants else types[name] for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()})
    if refused is not None:
        with pytest.raises(Exception, match=refused):
            triton.compile(source, target=TARGETS[target], options=options)
        return
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    assert compiled.asm["hsaco" if target.startswith("gfx") else "cubin"]


def unlisted(source, functions, names):
    """Kernels of a module that are not among `names`: what it launches, and what no other kernel of it calls.

    functions: names of the module's @triton.jit functions.
    """
    tree = ast.parse(source)
    launched = {
        node.func.value.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and isinstance(node.func.value, ast.Name)
    }
    bodies = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in functions]
    called = {leaf.id for body in bodies for leaf in ast.walk(body) if isinstance(leaf, ast.Name)}
    return {name for name in functions if name in launched or name not in called} - set(names)


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_every_kernel_that_is_launched_is_listed(path):
    module = importlib.import_module(f"{room.__name__}.{path.stem}")
    own = {
        name
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and value.module == module.__name__
    }
    names = {case[0].__name__ for case in listed(path.stem.removesuffix("_triton")).KERNELS}
    assert unlisted(path.read_text(), own, names) == set()


def test_a_kernel_that_is_missing_from_the_list_is_found():
    source = textwrap.dedent(
        """
        @triton.jit
        def helper(x): pass

        @triton.jit
        def shared(x): pass

        @triton.jit
        def kernel(x): helper(x); shared(x)

        @triton.jit
        def chosen(x): helper(x)

        def run(x):
            kernel[(1,)](x)
            shared[(1,)](x)
            (chosen if x else kernel)[(1,)](x)
        """
    )
    functions = {"helper", "shared", "kernel", "chosen"}
    assert unlisted(source, functions, []) == {"shared", "kernel", "chosen"}
    assert unlisted(source, functions, ["kernel", "chosen"]) == {"shared"}
    assert unlisted(source, functions, ["shared", "kernel", "chosen"]) == set()

"""What pyproject.toml promises: extras that stand alone, an entry point that exists, types that are shipped."""

import importlib
import importlib.metadata
import pathlib
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
EXTRAS = PROJECT["optional-dependencies"]

# What each extra exists for. Any environment marker counts: which platforms have wheels is the vendor's affair.
PROVIDES = {
    "cpu": {"torch"},
    "cuda": {"torch", "triton", "flashinfer-python"},
    "fa3": {"sglang-kernel"},
    "flashmla": {"sgl-flash-mla"},
    "fa4": {"flash-attn-4"},
    "rocm": {"amd-aiter"},
    "ascend": {"torch-npu"},
    "xpu": {"vllm-xpu-kernels"},
    "apple": {"mlx", "torch"},
    "transformers": {"torch", "transformers", "gguf", "tokenizers", "accelerate"},
    "kit": {"pytest", "torch"},
    "bench": {"matplotlib"},
    "test": {"pytest", "hypothesis", "pytest-xdist", "transformers"},
    "dev": {"ruff", "mypy", "pytest"},
}


def requirements(extra: str) -> list[Requirement]:
    """All of an extra's requirements, with anyattn[other] replaced by what that brings."""
    found = []
    for text in EXTRAS[extra]:
        requirement = Requirement(text)
        if canonicalize_name(requirement.name) == PROJECT["name"]:
            assert requirement.extras <= EXTRAS.keys(), text
            found += [inner for name in requirement.extras for inner in requirements(name)]
        else:
            found.append(requirement)
    return found


def names(found: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in found}


def test_the_extras_are_the_documented_ones():
    assert set(EXTRAS) == set(PROVIDES)


@pytest.mark.parametrize("extra", sorted(PROVIDES))
def test_an_extra_brings_what_it_is_named_for(extra):
    assert PROVIDES[extra] <= names(requirements(extra))


@pytest.mark.parametrize("extra", sorted(PROVIDES))
def test_an_extra_sets_lower_bounds_only(extra):
    # Several vendor packages pin a torch of their own; an upper bound or a pin of ours would make them unresolvable.
    for requirement in requirements(extra):
        assert requirement.url is None, requirement
        assert [specifier.operator for specifier in requirement.specifier] == [">="], requirement


@pytest.mark.parametrize("extra", ["rocm", "xpu"])
def test_an_extra_does_not_bring_another_vendors_torch(extra):
    # torch for these is not in the default registry: asking for it here would install the build for NVIDIA.
    assert "torch" not in names(requirements(extra))


def test_the_core_needs_no_torch_and_no_vendor_kernels():
    core = [Requirement(text) for text in PROJECT["dependencies"]]
    assert names(core) == {"numpy", "nvidia-ml-py", "packaging", "pluggy", "psutil", "rich", "typer"}
    assert all([specifier.operator for specifier in requirement.specifier] == [">="] for requirement in core)


def test_the_constraints_pin_a_torch_that_every_extra_with_torch_accepts():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    [pinned] = [str(pin.specifier) for pin in pins if pin.name == "torch"]
    assert pinned == "==2.13.0"
    for extra in EXTRAS:
        for requirement in requirements(extra):
            if requirement.name == "torch":
                assert requirement.specifier.contains(pinned.removeprefix("==")), extra


def test_the_console_script_resolves_to_a_function():
    module, _, attribute = PROJECT["scripts"]["anyattn"].partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_built_ins_are_not_plugins_of_their_own_distribution():
    assert "anyattn.plugins" not in PROJECT.get("entry-points", {})


def test_the_version_that_is_installed_is_the_one_written_down():
    try:
        installed = importlib.metadata.version("anyattn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs anyattn to be installed: pip install --editable .")
    assert installed == PROJECT["version"]


def test_the_package_says_that_it_is_typed():
    assert (ROOT / "anyattn" / "py.typed").is_file()
    # The wheel takes all of this folder, and the build leaves out only what git ignores.
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["anyattn"]
    assert "py.typed" not in (ROOT / ".gitignore").read_text(encoding="utf-8")


def test_every_folder_with_python_in_it_is_a_package():
    # A folder without __init__.py imports from a checkout, but tools that look for packages pass it by.
    folders = {path.parent for path in (ROOT / "anyattn").rglob("*.py")}
    assert [str(folder.relative_to(ROOT)) for folder in folders if not (folder / "__init__.py").is_file()] == []

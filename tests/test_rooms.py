"""The import rules between the rooms, read from the sources; docs/architecture.md states them in words."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import anyattn

PACKAGE = Path(anyattn.__file__).parent
SHARED = {"types", "errors", "lazy"}

ALLOWED = {
    "types": set(),
    "errors": set(),
    "lazy": set(),
    "settings": {"errors"},
    "platforms.base": SHARED,  # but for `Platform.backends`, see below
    "platforms": SHARED | {"platforms"},
    "mem_cache": SHARED | {"mem_cache"},
    "attention": SHARED | {"attention", "mem_cache", "platforms.base"},
    "plugins.hookspecs": {"types"},
    "plugins": SHARED | {"plugins"},
    "hardware_backend": SHARED | {"attention", "mem_cache", "platforms.base"},
    "arguments": SHARED | {"attention", "platforms.base", "settings"},
    "discovery": SHARED | {"attention", "mem_cache", "platforms.base", "plugins", "settings"},
    "wiring": SHARED | {"arguments", "attention", "discovery", "mem_cache", "platforms.base", "plugins", "settings"},
    "dry_run": SHARED | {"arguments", "attention", "discovery", "platforms.base", "plugins", "settings"},
    "testing": SHARED | {"testing", "attention", "mem_cache", "platforms.base", "discovery", "plugins", "settings"},
    "testing.__main__": None,
    "scaffold": SHARED | {"plugins"},
    "integrations": None,
    "cli": None,
    "__main__": None,
    "": {"errors", "types", "attention", "mem_cache", "platforms.base", "plugins", "discovery", "dry_run", "wiring"},
}
"""By room: what it may import of anyattn; None for the outermost rooms, which may import every other."""

LEADING_ON = {"dry_run.backends_on", "attention.spec.AttentionSpec"}
"""What `Platform.backends`, by which facts lead on to selection, imports when it is called, or for its types."""

VENDOR_PACKAGES = {"flashinfer", "flash_attn", "flash_attn_interface", "sgl_kernel", "flash_mla", "vllm", "aiter"} | {
    "torch_npu", "torch_musa", "vllm_xpu_kernels", "mlx", "fa3_fwd_interface", "pynvml"
}  # fmt: skip


def modules():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(pytest.param(name, path, id=name or "anyattn"))
    return found


def imported(path):
    """Dotted names that a file imports anywhere, inside functions and under TYPE_CHECKING too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "lazy_import":
            names.add(ast.literal_eval(node.args[0]))
    return names


def backend_files():
    """The files that declare a backend, as modules."""
    files = [(param.values[0], param.values[1]) for param in modules()]
    in_room = [(module, path) for module, path in files if module.startswith("hardware_backend.")]
    return {module for module, path in in_room if "capabilities: ClassVar[Capabilities]" in path.read_text()}


def within(name, rooms):
    return any(name == room or name.startswith(room + ".") for room in rooms)


def room_of(module):
    parts = module.split(".")
    return next(key for key in (module, parts[0]) if key in ALLOWED)


@pytest.mark.parametrize(("module", "path"), modules())
def test_a_file_imports_only_what_its_room_may(module, path):
    allowed = ALLOWED[room_of(module)]
    own = {name.removeprefix("anyattn.") for name in imported(path) if name.startswith("anyattn.")}
    if module == "platforms.base":
        own -= LEADING_ON
    if room_of(module) == "hardware_backend":  # what several backends share lies beside them, and is none itself
        own = {name for name in own if not within(name, {"hardware_backend"}) or within(name, backend_files())}
    if allowed is not None:
        assert {name for name in own if not within(name, allowed)} == set()


def test_facts_lead_on_to_selection_in_one_method_and_only_when_it_is_called():
    tree = ast.parse((PACKAGE / "platforms/base.py").read_text())
    top_level = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert not any(node.module.startswith(("anyattn.dry_run", "anyattn.attention")) for node in top_level)
    (platform,) = (node for node in tree.body if getattr(node, "name", "") == "Platform")
    inside = [n.name for n in platform.body if any(isinstance(leaf, ast.ImportFrom) for leaf in ast.walk(n))]
    assert inside == ["backends"]


@pytest.mark.parametrize(("module", "path"), modules())
def test_only_hardware_backend_and_platforms_name_a_vendors_package(module, path):
    if not module.startswith(("hardware_backend", "platforms")):
        assert {name for name in imported(path) if within(name, VENDOR_PACKAGES)} == set()


@pytest.mark.parametrize(("module", "path"), modules())
def test_no_file_but_the_registration_names_a_hardware_backend(module, path):
    if module.startswith("hardware_backend") or module == "plugins.builtin":
        return
    assert "anyattn.hardware_backend" not in path.read_text()


def test_backends_are_found_by_their_class():
    assert "hardware_backend.cuda.flashinfer" in backend_files()


@pytest.mark.parametrize(("module", "path"), modules())
def test_one_backend_file_never_imports_another(module, path):
    own = {name.removeprefix("anyattn.") for name in imported(path)}
    if module.startswith("hardware_backend."):  # what several share lies beside them
        assert {name for name in own if within(name, backend_files() - {module})} == set()


def test_importing_anyattn_brings_in_no_torch_no_triton_and_no_vendor_package():
    heavy = sorted({"torch", "triton", "numpy", "transformers", "typer", "rich"} | VENDOR_PACKAGES)
    program = f"import sys, anyattn; dir(anyattn); print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_asking_what_would_be_chosen_brings_in_no_torch_and_no_vendor_package():
    heavy = sorted({"torch", "triton"} | (VENDOR_PACKAGES - {"pynvml"}))
    program = (
        "import sys; from anyattn import discovery, AttentionSpec, select\n"
        "plugins = discovery.plugin_manager()\n"
        "spec = AttentionSpec(num_qo_heads=8, num_kv_heads=2, head_dim=64)\n"
        "device = [d for d in discovery.detect(plugins).devices if d.kind == 'cpu'][0]\n"
        "select(spec, device, discovery.candidates(plugins)).explain()\n"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_public_name_is_found_where_it_is_said_to_be():
    for name in anyattn.__all__:
        assert getattr(anyattn, name) is getattr(importlib.import_module(anyattn._HOMES[name]), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        anyattn.no_such_name  # noqa: B018

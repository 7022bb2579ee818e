"""The packages that `anyattn new-plugin` writes: valid, loaded without a problem, and correct as they stand."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anyattn import discovery
from anyattn.attention.torch_native import TorchNativeBackend
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.plugins.manager import PluginManager
from anyattn.scaffold.package import PLUGIN_KINDS, plugin_files, write_plugin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@pytest.fixture
def written(site):
    """Writes a package into the site folder, and gives the manager that has loaded it, in strict mode."""

    def write(name, kind):
        module = name.replace("-", "_")
        write_plugin(name, kind, site.folder / "package")
        shutil.copytree(site.folder / "package" / module, site.folder / module)
        point = importlib.metadata.EntryPoint(name, module, "anyattn.plugins")
        manager = PluginManager(entry_points=[point], strict=True)
        discovery.load_offers(manager)
        return manager

    return write


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_no_placeholder_is_left_in_a_name_or_a_text(kind):
    for path, text in plugin_files("acme-attention", kind).items():
        for placeholder in ("plugin-name", "plugin_name", "PluginName", ".template"):
            assert placeholder not in path
            assert placeholder not in text, path


def test_a_name_that_holds_a_placeholder_is_kept_as_it_is():
    files = plugin_files("acme.plugin_name", "backend")
    assert '"acme.plugin_name" = "acme_plugin_name"' in files["pyproject.toml"]
    assert "class AcmePluginName(AttentionBackend):" in files["acme_plugin_name/backend.py"]


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_the_metadata_name_the_package_and_its_entry_point(kind):
    files = plugin_files("Acme.Attention", kind)
    metadata = tomllib.loads(files["pyproject.toml"])
    assert metadata["project"]["name"] == "Acme.Attention"
    assert metadata["project"]["entry-points"]["anyattn.plugins"] == {"Acme.Attention": "acme_attention"}
    assert metadata["project"]["readme"] in files
    assert metadata["project"]["dependencies"] == ["anyattn"]
    assert metadata["project"]["optional-dependencies"] == {"test": ["anyattn[kit]"]}
    assert "acme_attention/__init__.py" in files


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
def test_what_is_written_is_formatted_and_passes_the_linter(tmp_path, kind):
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent))
    if ruff is None:
        pytest.skip("needs ruff: pip install anyattn[dev]")
    write_plugin("acme-attention", kind, tmp_path / "package")
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    for command in (["check", "--ignore", "ANN"], ["format", "--check"]):
        run = subprocess.run([ruff, *command, *settings, "."], cwd=tmp_path / "package", capture_output=True, text=True)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_backend_is_less_than_sixty_lines_and_not_chosen_before_its_author_says_so(written):
    assert len(plugin_files("acme-loop", "backend")["acme_loop/backend.py"].splitlines()) < 60
    backend = written("acme-loop", "backend").attention_backends()["acme_loop"].load()
    assert backend.__name__ == "AcmeLoop"
    assert backend.capabilities.priority < TorchNativeBackend.capabilities.priority


def test_the_allocator_is_not_chosen_before_its_author_says_so(written):
    allocator = written("acme-books", "allocator").kv_allocators()["acme_books"].load()
    assert allocator.__name__ == "AcmeBooks"
    assert allocator.capabilities.priority < PagedAllocator.capabilities.priority


def test_the_platform_finds_its_devices_where_there_are_some_and_says_what_is_missing(written, monkeypatch):
    manager = written("acme-npu", "platform")
    assert discovery.find_device(manager, "sim:acme_npu1", discovery.detect(manager)).kind == "acme_npu"
    assert not [device for device in discovery.detect(manager).devices if device.kind == "acme_npu"]
    monkeypatch.setattr("glob.glob", lambda pattern: ["/dev/acme_npu0", "/dev/acme_npu1"])
    devices = [device for device in discovery.detect(manager).devices if device.kind == "acme_npu"]
    assert [device.torch_device for device in devices] == ["acme_npu:0", "acme_npu:1"]
    assert devices[0].problems == ("torch_acme_npu is not installed; run `pip install torch-acme-npu`",)

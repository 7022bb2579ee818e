"""Metadata as it is found in the field: left over, cut short, doubled. One message each, with what mends it."""

import json
import shutil
import sys

import pytest

from anyattn.plugins.installed import installed_plugins
from anyattn.plugins.manager import PluginManager

GOOD = """
@anyattn.hookimpl
def anyattn_attention_backends():
    return {}
"""


def record_of(name):
    (record,) = [record for record in PluginManager().records if record.name == name]
    return record


def problem_of(name):
    """The one problem of the one plugin of that name, which is not loaded for it."""
    record = record_of(name)
    assert record.state == "failed"
    (problem,) = record.problems
    return problem


def test_a_sound_plugin_has_no_problem(site):
    site.plugin("zoo", GOOD, version="1.2")
    record = record_of("zoo")
    assert (record.distribution, record.version, record.target) == ("zoo", "1.2", "zoo")
    assert (record.state, record.contract_version, record.problems) == ("loaded", 1, ())
    assert record.offers == {"anyattn_attention_backends": {}}


def test_an_object_in_a_module_can_be_the_plugin_and_extras_are_ignored(site):
    site.plugin(
        "zoo",
        """
        class Plugin:
            contract_version = 1

            @anyattn.hookimpl
            def anyattn_attention_backends(self):
                return {}

        class holder:
            plugin = Plugin()
        """,
        contract_version=None,
        entry_points="zoo = zoo : holder.plugin [extra, another]",
    )
    assert record_of("zoo").state == "loaded"


def test_a_module_that_is_gone_leaves_metadata_that_pip_can_mend(site):
    site.metadata("zoo")
    assert problem_of("zoo") == (
        "plugin zoo (zoo 1.0) cannot be imported: zoo is not there: run `pip install --force-reinstall zoo`, or "
        "`pip uninstall zoo`."
    )


def test_a_submodule_that_is_gone_is_told_like_a_module(site):
    site.plugin("zoo", entry_points="zoo = zoo.plugin.deep")
    assert "zoo.plugin.deep is not there: run `pip install --force-reinstall zoo`" in problem_of("zoo")


def test_a_folder_that_holds_only_a_cache_is_no_package(site):
    site.metadata("zoo")
    (site.folder / "zoo" / "__pycache__").mkdir(parents=True)
    assert "zoo is a folder without code: run `pip install --force-reinstall zoo`" in problem_of("zoo")


def test_a_missing_dependency_is_not_taken_for_a_missing_plugin(site):
    site.plugin("zoo", "import zoos_own_dependency")
    problem = problem_of("zoo")
    assert "No module named 'zoos_own_dependency'" in problem
    assert problem.endswith("run `pip check` to see what it needs.")


def test_a_target_without_its_attribute_names_both(site):
    site.plugin("zoo", entry_points="zoo = zoo:plugin")
    assert "zoo has no 'plugin', which its entry point names: run `pip install --force" in problem_of("zoo")


@pytest.mark.parametrize("target", ["zoo:", "zoo plugin", ":plugin", "zoo.:plugin", ""])
def test_a_target_that_is_no_target_is_told(site, target):
    site.plugin("zoo", entry_points=f"zoo = {target}")
    assert "which is not package.module or package.module:attribute" in problem_of("zoo")


def test_an_editable_install_whose_folder_is_gone_names_the_folder(site, tmp_path):
    folder = tmp_path / "sources of zoo"
    origin = json.dumps({"url": folder.as_uri(), "dir_info": {"editable": True}})
    site.metadata("zoo", direct_url=origin)
    assert problem_of("zoo") == (
        f"plugin zoo (zoo 1.0) cannot be imported: zoo is not there: it was installed as editable from {folder}, which "
        "is gone; run `pip uninstall zoo`."
    )


@pytest.mark.parametrize(
    "origin",
    ["not JSON", "[]", '{"dir_info": []}', '{"url": 3, "dir_info": {"editable": true}}', '{"url": "file:///x"}'],
)
def test_an_origin_that_cannot_be_read_is_no_origin(site, origin):
    site.metadata("zoo", direct_url=origin)
    assert "run `pip install --force-reinstall zoo`" in problem_of("zoo")


@pytest.mark.parametrize("metadata", [None, "Metadata-Version: 2.1\n", "\n\n"])
def test_metadata_that_names_no_distribution_is_told_with_its_folder(site, metadata):
    folder = site.plugin("zoo", GOOD, metadata=metadata)
    problem = problem_of("zoo")
    assert f"{folder} has no METADATA that names a distribution: delete that folder" in problem
    assert problem.endswith("run `pip install --force-reinstall zoo`.")


def test_metadata_that_is_not_utf8_names_no_distribution(site):
    (site.plugin("zoo", GOOD) / "METADATA").write_bytes(b"Name: zoo\xff\n")
    assert "has no METADATA that names a distribution" in problem_of("zoo")


def test_two_metadata_folders_of_one_distribution_are_told_once_with_both(site):
    folders = [
        site.plugin("my-zoo", GOOD, version="1.0"),
        site.metadata("My.Zoo", "2.0", folder="my_zoo-2.0.dist-info", entry_points="my-zoo = my_zoo"),
    ]
    problem = problem_of("my-zoo")
    assert all(str(folder) in problem for folder in folders)
    assert "until pip finds none, then `pip install " in problem


def test_each_entry_point_of_a_doubled_distribution_is_told(site):
    site.plugin("zoo", GOOD, version="1.0")
    site.metadata("zoo", "2.0", entry_points="zoo = zoo\nannex = zoo")
    assert "several metadata folders" in problem_of("zoo")
    assert "several metadata folders" in problem_of("annex")


def test_what_pip_was_removing_is_no_matter_beside_what_it_installed(site):
    site.plugin("zoo", GOOD, version="2.0")
    site.metadata("zoo", folder="~oo-1.0.dist-info")
    assert (record_of("zoo").state, record_of("zoo").version) == ("loaded", "2.0")


def test_what_pip_was_removing_is_told_with_its_folder(site):
    folder = site.metadata("zoo", folder="~oo-1.0.dist-info")
    assert f"{folder} is left over from a removal that was cut short: delete that folder." in problem_of("zoo")


@pytest.mark.parametrize("points", ["no equals sign", "[[\n=\n"])
def test_entry_points_that_cannot_be_read_are_told_and_harm_no_other(site, points):
    site.plugin("good", GOOD)
    site.plugin("zoo", GOOD, entry_points=points)
    assert record_of("good").state == "loaded"
    assert "run `pip install --force-reinstall zoo`" in problem_of("zoo")


def test_entry_points_of_others_are_not_read(site):
    site.plugin("good", GOOD)
    other = site.metadata("other")
    (other / "entry_points.txt").write_text("[console_scripts]\nno equals sign\n")
    binary = site.metadata("binary")
    (binary / "entry_points.txt").write_bytes(b"[anyattn.plugins]\nx = \xff\xfe\n")
    manager = PluginManager()
    assert {"other", "binary"}.isdisjoint(record.name for record in manager.records)
    assert manager.problems == []


def test_of_a_distribution_on_two_places_of_the_path_only_the_first_counts(site, tmp_path, monkeypatch):
    site.plugin("zoo", GOOD, version="2.0")
    later = tmp_path / "later"
    shutil.copytree(site.folder, later)
    (later / "zoo-2.0.dist-info").rename(later / "zoo-1.0.dist-info")
    (later / "zoo-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later), str(site.folder)])
    assert (record_of("zoo").state, record_of("zoo").version) == ("loaded", "2.0")


def test_a_plugin_that_a_newer_release_earlier_on_the_path_no_longer_names_is_not_found(site, tmp_path, monkeypatch):
    newer = site.metadata("zoo", "2.0")
    (newer / "entry_points.txt").unlink()
    later = tmp_path / "later"
    older = later / "zoo-1.0.dist-info"
    older.mkdir(parents=True)
    (older / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n")
    (older / "entry_points.txt").write_text("[anyattn.plugins]\nzoo = zoo\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(later)])
    assert [plugin for plugin in installed_plugins() if plugin.name == "zoo"] == []


def test_a_link_to_a_site_folder_is_the_same_folder(site, tmp_path, monkeypatch):
    site.plugin("zoo", GOOD)
    (tmp_path / "link").symlink_to(site.folder)
    monkeypatch.syspath_prepend(tmp_path / "link")
    assert record_of("zoo").state == "loaded"

"""`anyattn plugins`: the table, the JSON and the exit code. Broken plugins of every kind are in tests/plugins."""

from __future__ import annotations

import json
import sys

import pytest

RECORD_KEYS = {"name", "distribution", "version", "target", "state", "contract_version", "offers", "problems"}
HOOKS = {"platforms", "attention_backends", "kv_allocators", "kv_pools", "simulated_devices"}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a plugin of one object, which offers these attention backends."""
    monkeypatch.syspath_prepend(tmp_path)

    def plugin(name, **offers):
        (tmp_path / f"zoo_{name}.py").write_text(
            "import anyattn\ncontract_version = 1\n@anyattn.hookimpl\n"
            f"def anyattn_attention_backends():\n    return {offers}\n"
        )
        metadata = tmp_path / f"{name}_kernels-1.2.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-kernels\nVersion: 1.2\n")
        (metadata / "entry_points.txt").write_text(f"[anyattn.plugins]\n{name} = zoo_{name}\n")

    yield plugin
    for name in [name for name in sys.modules if name.startswith("zoo_")]:
        del sys.modules[name]


def rows(ended):
    return [" ".join(line.split()) for line in ended.out.splitlines()]


def test_without_plugins_the_built_in_one_is_shown_with_its_offers_by_kind(anyattn):
    ended = anyattn("plugins")
    assert (ended.code, ended.err) == (0, "")
    assert rows(ended)[0] == "plugin distribution contract state"
    for line in ("KV allocators paged", "KV pools ascend_mha, ascend_mla, ascend_nz, dsa, mha, mla"):
        assert line in rows(ended)
    assert any(row.startswith("attention backends ") and "torch_native" in row for row in rows(ended))
    assert "problems" not in ended.out


def test_the_json_holds_the_contract_version_and_every_record(anyattn, install):
    install("zoo", native="anyattn.attention.torch_native:TorchNativeBackend")
    ended = anyattn("plugins", "--json")
    document = json.loads(ended.out)
    assert (ended.code, ended.err) == (0, "")
    assert document.keys() == {"contract_version", "plugins"}
    assert document["contract_version"] == 1
    builtin, zoo = document["plugins"]
    assert builtin.keys() == zoo.keys() == RECORD_KEYS
    assert builtin["offers"].keys() == {f"anyattn_{name}" for name in HOOKS}
    assert (zoo["name"], zoo["distribution"], zoo["version"], zoo["state"]) == ("zoo", "zoo-kernels", "1.2", "loaded")


def test_a_plugin_is_shown_with_its_distribution_version_and_contract(anyattn, install):
    install("zoo", native="anyattn.attention.torch_native:TorchNativeBackend")
    lines = rows(anyattn("plugins"))
    assert "zoo zoo-kernels 1.2 1 loaded" in lines
    assert lines[lines.index("zoo offers") + 1] == "attention backends native"


def test_an_offer_that_cannot_be_loaded_is_its_plugins_problem_and_the_answer_no(anyattn, install):
    install("zoo", broken="zoo_nonesuch:Backend")
    ended = anyattn("plugins")
    assert (ended.code, ended.err) == (1, "")
    assert "zoo zoo-kernels 1.2 1 loaded, in part" in rows(ended)
    problem = rows(ended)[rows(ended).index("problems") + 1]
    assert problem.startswith("zoo 'broken' of plugin zoo (zoo-kernels 1.2): zoo_nonesuch:Backend cannot be imported: ")


def test_what_the_allow_list_leaves_out_is_shown_and_is_no_failure(anyattn, install, monkeypatch):
    install("zoo", broken="zoo_nonesuch:Backend")
    monkeypatch.setenv("ANYATTN_PLUGINS", "")
    ended = anyattn("plugins")
    lines = rows(ended)
    assert ended.code == 0
    assert "zoo zoo-kernels 1.2 not allowed" in lines
    assert lines[lines.index("installed, and not named by ANYATTN_PLUGINS") + 1] == "zoo zoo-kernels 1.2"


def test_what_the_allow_list_names_and_nobody_provides_is_a_failure(anyattn, install, monkeypatch):
    install("zoo")
    monkeypatch.setenv("ANYATTN_PLUGINS", "typo,zoo")
    ended = anyattn("plugins")
    assert ended.code == 1
    assert "typo missing" in rows(ended)
    assert "typo ANYATTN_PLUGINS names 'typo', which no installed distribution provides; installed: 'zoo'." in rows(
        ended
    )


def test_strict_mode_refuses_with_the_same_text(anyattn, install, monkeypatch):
    install("zoo", broken="zoo_nonesuch:Backend")
    problem = json.loads(anyattn("plugins", "--json").out)["plugins"][1]["problems"][0]
    monkeypatch.setenv("ANYATTN_STRICT", "1")
    ended = anyattn("plugins")
    assert (ended.code, ended.out, ended.err) == (1, "", f"error: {problem}\n")


def test_a_name_that_a_terminal_cannot_show_is_quoted(anyattn, install, tmp_path):
    install("zoo")
    (tmp_path / "zoo_kernels-1.2.dist-info" / "entry_points.txt").write_text("[anyattn.plugins]\n\x1b[31mred = zoo\n")
    ended = anyattn("plugins")
    assert "\x1b" not in ended.out
    assert "'\\x1b[31mred' zoo-kernels 1.2 failed" in rows(ended)

"""`anyattn backends`: all verdicts, the choice, and the exit code."""

from __future__ import annotations

import dataclasses
import json
from importlib.util import find_spec

import pytest

from anyattn import Platform
from anyattn.attention.reference import ReferenceBackend
from anyattn.types import STATUSES, VENDOR_LAYOUTS

KEYS = {"device", "model", "choice", "choices", "error", "backends", "problems"}
BACKEND_KEYS = {"name", "distribution", "valid", "installed", "status", "contract_tested_with", "roles", "reasons"}
REASON_KEYS = {"layer_kind", "role", "field", "wanted", "supported", "remedy"}


def document(ended) -> dict:
    parsed = json.loads(ended.out)
    assert parsed.keys() == KEYS
    for backend in parsed["backends"]:
        assert backend.keys() == BACKEND_KEYS
        assert backend["status"] in STATUSES
        assert all(reason.keys() == REASON_KEYS for reason in backend["reasons"])
        assert backend["valid"] or backend["reasons"]
    return parsed


def spec_of(parsed: dict) -> dict:
    (kind,) = parsed["model"]["layer_kinds"]
    return kind["spec"]


def test_the_table_shows_every_backend_in_both_roles_and_the_choice(anyattn):
    ended = anyattn("backends", "--backend", "torch_native")  # which it would be by itself depends on the CPU
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["backend", "from", "status", "installed", "prefill", "decode"] in rows
    assert ["torch_native", "anyattn", "run", "on", "hardware", "yes", "chosen", "(10)", "chosen", "(10)"] in rows
    assert ["reference", "anyattn", "run", "on", "hardware", "yes", "valid", "(0)", "valid", "(0)"] in rows
    assert "page size 16, layout NHD, allocator paged, pool mha" in ended.out


def test_the_json_holds_the_device_the_spec_the_choice_and_all_verdicts(anyattn):
    parsed = document(anyattn("backends", "--json", "--backend", "torch_native"))
    assert parsed["device"]["kind"] == "cpu"
    assert spec_of(parsed)["head_dim"] == 128
    assert parsed["choice"] == {
        "prefill": "torch_native",
        "decode": "torch_native",
        "page_size": 16,
        "layout": "NHD",
        "allocator": "paged",
        "pool": "mha",
    }
    assert parsed["error"] is None
    shown = {backend["name"]: backend for backend in parsed["backends"]}
    assert {"torch_native", "reference", "flashinfer"} <= shown.keys()
    assert shown["torch_native"]["roles"] == [
        {"layer_kind": 0, "role": "prefill", "priority": 10},
        {"layer_kind": 0, "role": "decode", "priority": 10},
    ]
    assert {reason["role"] for reason in shown["flashinfer"]["reasons"]} == {"prefill", "decode"}
    assert {reason["layer_kind"] for reason in shown["flashinfer"]["reasons"]} == {0}


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--num-qo-heads", "28", "--num-kv-heads", "4"], {"num_qo_heads": 28, "num_kv_heads": 4}),
        (["--head-dim", "96", "--dtype", "float16"], {"head_dim": 96, "dtype": "float16"}),
        (["--kv-dtype", "float8_e4m3fn"], {"kv_dtype": "float8_e4m3fn"}),
        (["--sliding-window", "4096"], {"sliding_window": 4096}),
        (["--logits-soft-cap", "30"], {"logits_soft_cap": 30.0}),
        (["--sinks", "--alibi", "--return-lse"], {"sinks": True, "alibi": True, "return_lse": True}),
        (["--tree-mask", "--deterministic"], {"tree_mask": True, "deterministic": True}),
        (
            ["--model", "deepseek-v3"],
            {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 576, "num_qo_heads": 128},
        ),
        (["--model", "deepseek-v3", "--tp", "8", "--return-lse"], {"num_qo_heads": 16, "return_lse": True}),
        (["--model", "llama-3-8b", "--dtype", "float16", "--kv-dtype", "float8_e5m2"], {"kv_dtype": "float8_e5m2"}),
    ],
)
def test_every_option_of_the_spec_reaches_it(anyattn, options, fields):
    ended = anyattn("backends", "--json", *options)
    assert ended.code == 0
    spec = spec_of(document(ended))
    assert {name: spec[name] for name in fields} == fields


def test_the_page_size_layout_and_backend_asked_for_are_chosen(anyattn):
    ended = anyattn("backends", "--json", "--page-size", "3", "--layout", "hnd", "--backend", "reference")
    choice = document(ended)["choice"]
    assert (choice["page_size"], choice["layout"], choice["decode"]) == (3, "HND", "reference")


@pytest.mark.parametrize("layout", ["nhd", "HND", "nz", "5d"])
def test_every_layout_can_be_asked_for_and_a_backend_that_has_it_is_chosen(anyattn, layout):
    parsed = document(anyattn("backends", "--json", "--layout", layout))
    assert parsed["choice"]["layout"] == layout.upper()
    refused = {b["name"] for b in parsed["backends"] if any(r["field"] == "layout" for r in b["reasons"])}
    assert parsed["choice"]["decode"] not in refused
    assert ("torch_native" in refused) == (layout.upper() in VENDOR_LAYOUTS)


def test_a_layout_that_does_not_exist_is_refused_with_those_that_do(anyattn):
    ended = anyattn("backends", "--layout", "DHN")
    assert ended.code == 2
    assert "'DHN' is not one of NHD, HND, NZ, 5D." in ended.err
    assert "Of a page: NHD, HND, NZ, 5D." in " ".join(anyattn("backends", "--help").out.split())


def test_joined_layers_are_part_of_the_choice_and_refused_where_pages_must_lie_one_behind_the_other(anyattn):
    parsed = document(anyattn("backends", "--json", "--joined-layers"))
    assert parsed["choice"]["joined_layers"] is True
    assert "pool mha, joined layers" in anyattn("backends", "--joined-layers").out
    ended = anyattn("backends", "--json", "--joined-layers", "--device", "sim:h100", "--backend", "fa4")
    assert ended.code == 1
    assert "joined_layers: wanted pages of joined layers" in document(ended)["error"]
    assert "joined_layers" not in document(anyattn("backends", "--json"))["choice"]


def test_the_environment_takes_part_in_the_choice_and_arguments_beat_it(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_PREFILL_BACKEND", "reference")
    monkeypatch.setenv("ANYATTN_PAGE_SIZE", "64")
    monkeypatch.setenv("ANYATTN_DECODE_BACKEND", "torch_native")
    choice = document(anyattn("backends", "--json"))["choice"]
    assert (choice["prefill"], choice["decode"], choice["page_size"]) == ("reference", "torch_native", 64)
    choice = document(anyattn("backends", "--json", "--backend", "torch_native", "--page-size", "8"))["choice"]
    assert (choice["prefill"], choice["decode"], choice["page_size"]) == ("torch_native", "torch_native", 8)


def test_without_a_choice_the_json_still_lists_all_reasons(anyattn):
    ended = anyattn("backends", "--json", "--graph", "always")
    parsed = document(ended)
    assert ended.code == 1
    assert parsed["choice"] is None
    assert parsed["device"]["kind"] == "cpu"
    assert "No attention backend can serve prefill" in parsed["error"]
    refused = next(backend for backend in parsed["backends"] if backend["name"] == "torch_native")
    assert [reason["field"] for reason in refused["reasons"]] == ["graph", "graph"]
    assert not refused["valid"]
    assert ended.err == f"error: {parsed['error']}\n"


def test_without_a_choice_the_table_still_shows_all_reasons(anyattn):
    ended = anyattn("backends", "--graph", "always")
    assert ended.code == 1
    assert "refused" in ended.out
    assert "graph: wanted always, supported never; set graph='never'" in ended.out


def test_without_a_device_the_json_says_so(anyattn):
    ended = anyattn("backends", "--json", "--device", "cuda:77")
    parsed = document(ended)
    assert ended.code == 1
    assert parsed["device"] is parsed["choice"] is None
    assert "cuda:77" in parsed["error"]


def test_reasons_are_neither_cut_nor_wrapped_in_a_pipe(anyattn, monkeypatch, stranger):
    class Long(ReferenceBackend):
        capabilities = dataclasses.replace(ReferenceBackend.capabilities, features=frozenset({"word " * 500}))

    stranger(backends={"Long": Long})
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "Long")
    ended = anyattn("backends")
    assert any("word " * 499 in line for line in ended.out.splitlines())
    assert "word " * 499 in ended.err
    assert not any(line.endswith(" ") for line in ended.out.splitlines())


def test_a_device_that_torch_cannot_drive_is_told_of_and_judged_when_it_is_asked_for(anyattn, monkeypatch, stranger):
    gpu = Platform(kind="gpu", vendor="v", name="GPU", arch="a1", torch_device="gpu:0", problems=("torch lacks it",))
    stranger(gpu)
    monkeypatch.delenv("ANYATTN_PLATFORM")
    parsed = document(anyattn("backends", "--json"))
    assert parsed["device"]["kind"] == "cpu"
    assert any("gpu:0 (GPU, a1) cannot be used here: torch lacks it" in problem for problem in parsed["problems"])
    ended = anyattn("backends", "--json", "--device", "gpu")
    parsed = document(ended)
    assert (ended.code, parsed["choice"], parsed["device"]["kind"]) == (1, None, "gpu")
    assert {reason["field"] for backend in parsed["backends"] for reason in backend["reasons"]} >= {"device"}
    assert not any(backend["valid"] for backend in parsed["backends"])


def test_without_torch_every_backend_is_still_shown_with_what_it_lacks(isolated):
    ended = isolated("from anyattn.cli import main; sys.exit(main(['backends']))", "torch")
    assert ended.returncode == 1
    assert "torch_native" in ended.stdout
    assert 'package: wanted torch>=2.9, supported not installed; run `pip install "anyattn[cpu]"`' in ended.stdout


def test_every_preset_on_every_simulated_device_is_answered_without_torch_in_less_than_a_second_each(isolated):
    """In CPU time, which other tests beside this one stretch less; the command waits for nothing."""
    ended = isolated(
        """
        import contextlib, io, json, time
        from anyattn.attention.presets import PRESETS
        from anyattn.cli import main
        from anyattn.plugins.manager import PluginManager
        slowest = 0
        for preset in PRESETS:
            for device in PluginManager(entry_points=[]).simulated_devices():
                dtype = ["--dtype", "float16"] if device == "ascend310p" else []  # which has no bfloat16
                page, start = io.StringIO(), time.process_time()
                with contextlib.redirect_stdout(page):
                    assert main(["backends", "--model", preset, "--device", f"sim:{device}", "--json", *dtype]) == 0
                slowest = max(slowest, time.process_time() - start)
                assert json.loads(page.getvalue())["choice"]["page_size"]
        assert slowest < 1, slowest
        assert "torch" not in sys.modules
        """,
        "torch",
    )
    assert ended.returncode == 0, ended.stderr


def test_a_model_with_several_kinds_of_layers_shows_each_kind_and_one_choice_of_pages(anyattn):
    parsed = document(anyattn("backends", "--json", "--model", "gemma-3-27b", "--device", "sim:h100"))
    kinds = parsed["model"]["layer_kinds"]
    assert [kind["spec"]["sliding_window"] for kind in kinds] == [1024, None]
    assert [len(kind["layers"]) for kind in kinds] == [52, 10]
    assert sorted(kinds[0]["layers"] + kinds[1]["layers"]) == list(range(62))
    assert len(parsed["choices"]) == 2
    assert len({choice["page_size"] for choice in parsed["choices"]}) == 1
    ended = anyattn("backends", "--model", "gemma-3-27b", "--device", "sim:h100")
    assert "layers 0-4, 6-10, 12-16" in ended.out
    assert "layers 5, 11, 17" in ended.out


def test_a_config_json_and_its_folder_are_models_too(anyattn, tmp_path):
    config = {
        "model_type": "qwen2", "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_size": 3584,
        "num_hidden_layers": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        spec = spec_of(document(anyattn("backends", "--json", "--model", str(path), "--tp", "4")))
        assert (spec["num_qo_heads"], spec["num_kv_heads"], spec["head_dim"]) == (7, 1, 128)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "llama-3-9b"], "llama-3-8b"),
        (["--model", "./nowhere/config.json"], "nowhere"),
        (["--model", "qwen2-7b", "--tp", "8"], "1, 2, 4, 28"),
    ],
)
def test_a_model_that_cannot_be_read_or_divided_is_an_error_that_says_what_could(anyattn, options, message):
    ended = anyattn("backends", *options)
    assert (ended.code, ended.out) == (1, "")
    assert message in ended.err


@pytest.mark.parametrize(
    "options", [["--model", "llama-3-8b", "--head-dim", "64"], ["--tp", "2"], ["--model", "mpt-7b", "--alibi"]]
)
def test_dimensions_and_a_model_contradict_each_other(anyattn, options):
    assert anyattn("backends", *options).code == 2


def test_on_a_simulated_device_packages_count_as_installed_unless_told_otherwise(anyattn):
    options = ("backends", "--json", "--device", "sim:a100", "--head-dim", "64")
    assumed = document(anyattn(*options))
    flashinfer = next(backend for backend in assumed["backends"] if backend["name"] == "flashinfer")
    assert (flashinfer["valid"], flashinfer["installed"]) == (True, False)
    assert assumed["choice"]["decode"] == "flashinfer"
    assert assumed["device"]["simulated"] is True
    here = document(anyattn(*options, "--installed-only"))
    flashinfer = next(backend for backend in here["backends"] if backend["name"] == "flashinfer")
    assert [reason["field"] for reason in flashinfer["reasons"]] == ["package", "package"]
    assert here["choice"]["decode"] == ("triton" if find_spec("triton") else "torch_native")


def test_a_simulated_device_that_nobody_offers_is_an_error_that_lists_those_there_are(anyattn, monkeypatch):
    ended = anyattn("backends", "--device", "sim:h9000")
    assert ended.code == 1
    assert "sim:a100" in ended.err
    monkeypatch.setenv("ANYATTN_PLATFORM", "sim:h9000")
    assert "sim:xeon-amx" in anyattn("backends").err

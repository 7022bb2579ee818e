"""`anyattn backends`: all verdicts, the choice, and the exit code."""

from __future__ import annotations

import json

import pytest

KEYS = {"device", "spec", "choice", "error", "backends", "problems"}
VERDICT_KEYS = {"name", "distribution", "role", "priority", "valid", "reasons"}
REASON_KEYS = {"field", "wanted", "supported", "remedy"}


def document(ended) -> dict:
    parsed = json.loads(ended.out)
    assert parsed.keys() == KEYS
    for verdict in parsed["backends"]:
        assert verdict.keys() == VERDICT_KEYS
        assert all(reason.keys() == REASON_KEYS for reason in verdict["reasons"])
        assert verdict["valid"] == (not verdict["reasons"])
    return parsed


def test_the_table_shows_every_backend_in_both_roles_and_the_choice(anyattn):
    ended = anyattn("backends")
    assert (ended.code, ended.err) == (0, "")
    rows = [line.split() for line in ended.out.splitlines()]
    assert ["prefill", "torch_native", "anyattn", "10", "chosen"] in rows
    assert ["decode", "reference", "anyattn", "0", "valid"] in rows
    assert "paging    page size 16, layout NHD, allocator paged, pool mha" in ended.out


def test_the_json_holds_the_device_the_spec_the_choice_and_all_verdicts(anyattn):
    parsed = document(anyattn("backends", "--json"))
    assert parsed["device"]["kind"] == "cpu"
    assert parsed["spec"]["head_dim"] == 128
    assert parsed["choice"] == {
        "prefill": "torch_native",
        "decode": "torch_native",
        "page_size": 16,
        "layout": "NHD",
        "allocator": "paged",
        "pool": "mha",
    }
    assert parsed["error"] is None
    shown = {(verdict["name"], verdict["role"]) for verdict in parsed["backends"]}
    assert {(name, role) for name in ("torch_native", "reference") for role in ("prefill", "decode")} <= shown


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
        (["--mla"], {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 576, "num_qo_heads": 128}),
        (["--mla", "--num-qo-heads", "16"], {"num_qo_heads": 16}),
    ],
)
def test_every_option_of_the_spec_reaches_it(anyattn, options, fields):
    ended = anyattn("backends", "--json", *options)
    assert ended.code == 0
    spec = document(ended)["spec"]
    assert {name: spec[name] for name in fields} == fields


def test_the_page_size_layout_and_backend_asked_for_are_chosen(anyattn):
    ended = anyattn("backends", "--json", "--page-size", "3", "--layout", "hnd", "--backend", "reference")
    choice = document(ended)["choice"]
    assert (choice["page_size"], choice["layout"], choice["decode"]) == (3, "HND", "reference")


def test_the_environment_takes_part_in_the_choice_and_arguments_beat_it(anyattn, monkeypatch):
    monkeypatch.setenv("ANYATTN_PREFILL_BACKEND", "reference")
    monkeypatch.setenv("ANYATTN_PAGE_SIZE", "64")
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
    refused = [verdict for verdict in parsed["backends"] if verdict["name"] == "torch_native"]
    assert [reason["field"] for verdict in refused for reason in verdict["reasons"]] == ["graph", "graph"]
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


def test_reasons_are_neither_cut_nor_wrapped_in_a_pipe(anyattn, monkeypatch):
    from anyattn.attention.reference import ReferenceBackend
    from anyattn.attention.selection import BackendCandidate, Candidates
    from anyattn.types import Reason

    long = Reason(field="f", wanted="w", supported=" ".join(["word"] * 500), remedy='pip install "anyattn[cpu]"')
    candidate = BackendCandidate(
        name="b", distribution="d", capabilities=ReferenceBackend.capabilities, missing=(long,)
    )
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(
        "anyattn.cli.survey.candidates", lambda plugins: Candidates(backends=[candidate], allocators={}, pools={})
    )
    ended = anyattn("backends")
    assert f"  b  {long}" in ended.out.splitlines()
    assert str(long) in ended.err
    assert not any(line.endswith(" ") for line in ended.out.splitlines())

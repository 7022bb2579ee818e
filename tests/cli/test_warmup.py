"""`anyattn warmup`: which backends ran which steps of which layers, and where what was compiled is kept."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import sys

import pytest

from anyattn import GraphLevel, Platform
from anyattn.attention.reference import ReferenceBackend

KEYS = {"device", "model", "choices", "warmed", "seconds", "triton_caches"}
PLAIN = ["prefill", "decode", "mixed", "several"]
GPU = Platform(kind="gpu", vendor="v", name="GPU", arch="a1", torch_device="cpu", triton=True)


def document(ended) -> dict:
    assert ended.code == 0, ended.err
    parsed = json.loads(ended.out)
    assert parsed.keys() == KEYS
    return parsed


@pytest.fixture
def torch_native(monkeypatch):
    """Chosen wherever a test asks for no other: what is chosen by itself depends on the CPU, and may compile."""
    monkeypatch.setenv("ANYATTN_ATTENTION_BACKEND", "torch_native")


def test_it_tells_which_backends_ran_what_and_how_long_it_took(anyattn, torch_native):
    ended = anyattn("warmup")
    assert (ended.code, ended.err) == (0, "")
    device, _, spec, steps, _, took = ended.out.splitlines()
    assert device.startswith("device    cpu (")
    assert spec == "32/8 heads of 128, bfloat16"
    assert steps == "  torch_native  prefill, decode, mixed, several"
    assert took.startswith("warmed up in ")
    assert took.endswith(" s")


def test_the_json_holds_the_device_the_choice_and_what_ran(anyattn, torch_native):
    parsed = document(anyattn("warmup", "--json"))
    assert parsed["device"]["kind"] == "cpu"
    assert parsed["model"] == {"name": None, "tp": 1, "num_layers": 1}
    assert parsed["choices"][0]["decode"] == "torch_native"
    (kind,) = parsed["warmed"]
    assert (kind["layers"], kind["spec"]["head_dim"]) == ([0], 128)
    assert kind["backends"] == {"torch_native": PLAIN}
    assert parsed["seconds"] > 0
    assert parsed["triton_caches"] == []  # Triton compiles nothing for a CPU


def test_layers_are_described_and_chosen_for_as_by_the_other_commands(anyattn, monkeypatch, torch_native):
    monkeypatch.setenv("ANYATTN_PREFILL_BACKEND", "reference")
    options = ["--num-qo-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--sinks", "--return-lse"]
    options += ["--tree-mask", "--page-size", "3", "--layout", "hnd", "--dtype", "float32", "--logits-soft-cap", "5"]
    parsed = document(anyattn("warmup", "--json", *options))
    (kind,) = parsed["warmed"]
    assert kind["backends"] == {
        "reference": ["prefill", "mixed", "several", "verify"],
        "torch_native": ["decode"],
    }
    assert (parsed["choices"][0]["page_size"], parsed["choices"][0]["layout"]) == (3, "HND")
    named = document(anyattn("warmup", "--json", "--backend", "reference", "--decode-backend", "torch_native"))
    assert named["warmed"][0]["backends"].keys() == {"reference", "torch_native"}
    assert document(anyattn("warmup", "--json", "--joined-layers"))["choices"][0]["joined_layers"] is True


def test_each_kind_of_a_model_s_layers_is_warmed(anyattn, torch_native):
    parsed = document(anyattn("warmup", "--json", "--model", "gpt-oss-20b", "--tp", "8"))
    assert parsed["model"] == {"name": "gpt-oss-20b", "tp": 8, "num_layers": 24}
    assert [kind["spec"]["sliding_window"] for kind in parsed["warmed"]] == [128, None]
    assert [kind["backends"] for kind in parsed["warmed"]] == [{"torch_native": PLAIN}] * 2
    ended = anyattn("warmup", "--model", "gpt-oss-20b", "--tp", "8")
    assert "model     gpt-oss-20b, 24 layers, tensor parallel 8" in ended.out
    assert "layers 0, 2, 4" in ended.out


def test_mla_is_warmed_with_up_projections_and_without(anyattn, torch_native):
    parsed = document(anyattn("warmup", "--json", "--model", "deepseek-v3", "--tp", "32"))
    (kind,) = parsed["warmed"]
    assert sorted(kind["backends"]["torch_native"]) == sorted([*PLAIN, "expanded"])
    assert document(
        anyattn("warmup", "--json", "--model", "deepseek-v3", "--tp", "32", "--deterministic", "--backend", "reference")
    )["warmed"][0]["backends"] == {"reference": PLAIN}


def test_a_config_json_is_a_model_too(anyattn, tmp_path, torch_native):
    config = {
        "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
        "num_hidden_layers": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = document(anyattn("warmup", "--json", "--model", str(tmp_path)))
    assert parsed["model"]["num_layers"] == 2
    assert parsed["warmed"][0]["layers"] == [0, 1]


@pytest.mark.parametrize("device", ["sim:h100", "sim:mi300x", "sim:xeon-amx"])
def test_on_hardware_that_is_not_here_nothing_is_compiled(anyattn, device, monkeypatch):
    ended = anyattn("warmup", "--device", device)
    assert (ended.code, ended.out) == (1, "")
    assert "is simulated: nothing runs on it" in ended.err
    assert "`anyattn backends --device ...`" in ended.err
    monkeypatch.setenv("ANYATTN_PLATFORM", device)
    ended = anyattn("warmup", "--json", "--graph", "always")
    assert ended.code == 1
    assert "is simulated: nothing runs on it" in json.loads(ended.out)["error"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "nonesuch"], "No device 'nonesuch' can be used here"),
        (["--backend", "nonesuch"], "There is no attention backend named 'nonesuch'"),
        (["--graph", "always"], "No attention backend can serve"),
        (["--model", "llama-3-9b"], "llama-3-8b"),
        (["--head-dim", "0"], "head_dim must be a positive integer"),
        (["--pool", "nonesuch"], "nonesuch"),
    ],
)
def test_what_is_refused_is_an_error_before_anything_is_made(anyattn, options, message):
    ended = anyattn("warmup", *options)
    assert (ended.code, ended.out) == (1, "")
    assert message in ended.err
    assert ended.err.startswith("error: ")


@pytest.mark.parametrize(
    "options",
    [["--model", "llama-3-8b", "--head-dim", "64"], ["--tp", "2"], ["--layout", "DHN"], ["--graph", "sometimes"]],
)
def test_options_that_mean_nothing_together_are_wrong_usage(anyattn, options):
    assert anyattn("warmup", *options).code == 2


def test_what_a_backend_prints_while_it_compiles_is_not_in_the_answer(anyattn, stranger):
    class Talks(ReferenceBackend):
        def run(self, *args, **more):
            print("compiling")
            return super().run(*args, **more)

    stranger(backends={"Talks": Talks})
    ended = anyattn("warmup", "--json", "--backend", "Talks")
    assert document(ended)["warmed"][0]["backends"] == {"Talks": PLAIN}
    assert "compiling" in ended.err


def test_steps_of_graphs_are_told_of(anyattn, stranger, monkeypatch):
    class Graphs(ReferenceBackend):
        capabilities = dataclasses.replace(ReferenceBackend.capabilities, graph=GraphLevel.UNIFORM, priority=99)

        def init_graph(self, batch):
            return [batch]

        def refresh_graph(self, plan, batch):
            plan[0] = batch

        def run(self, q, kv, plan, out, **more):
            return super().run(q, kv, plan[0] if isinstance(plan, list) else plan, out, **more)

    stranger(dataclasses.replace(GPU, graph=GraphLevel.UNIFORM), backends={"Graphs": Graphs})
    monkeypatch.setenv("ANYATTN_PLATFORM", "gpu")
    ended = anyattn("warmup", "--graph", "uniform")
    assert ended.code == 0, ended.err
    assert "  Graphs  prefill, decode, mixed, several, decode graph, several graph\n" in ended.out


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_where_triton_keeps_its_kernels_is_told_where_it_compiles_for_the_device(
    anyattn, stranger, monkeypatch, tmp_path
):
    class Moves(ReferenceBackend):
        def run(self, *args, **more):
            os.environ["TRITON_CACHE_DIR"] = os.environ.get("MOVED", os.environ["TRITON_CACHE_DIR"])
            return super().run(*args, **more)

    stranger(GPU, backends={"Moves": Moves})
    monkeypatch.setenv("ANYATTN_PLATFORM", "gpu")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kept"))
    ended = anyattn("warmup", "--backend", "Moves")
    assert ended.out.splitlines()[-1] == f"Triton's kernels are kept in {tmp_path / 'kept'}"
    assert document(anyattn("warmup", "--json", "--backend", "Moves"))["triton_caches"] == [str(tmp_path / "kept")]
    monkeypatch.setenv("MOVED", str(tmp_path / "moved"))  # as torch.compile does at its first kernel
    ended = anyattn("warmup", "--json", "--backend", "Moves")
    assert document(ended)["triton_caches"] == [str(tmp_path / "kept"), str(tmp_path / "moved")]
    monkeypatch.delenv("MOVED")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    ended = anyattn("warmup", "--json")
    assert document(ended)["triton_caches"] == [str(tmp_path / ".triton" / "cache")]


def test_without_triton_no_folder_of_it_is_told(anyattn, stranger, monkeypatch):
    stranger(GPU)
    monkeypatch.setenv("ANYATTN_PLATFORM", "gpu")
    monkeypatch.setitem(sys.modules, "triton", None)
    assert document(anyattn("warmup", "--json", "--backend", "reference"))["triton_caches"] == []


def test_a_refusal_imports_no_torch(isolated):
    ended = isolated(
        """
        from anyattn.cli import main
        assert main(["warmup", "--device", "sim:h100"]) == 1
        assert main(["warmup", "--model", "nonesuch"]) == 1
        assert "torch" not in sys.modules
        """
    )
    assert ended.returncode == 0, ended.stderr

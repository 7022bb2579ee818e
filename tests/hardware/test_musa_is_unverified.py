"""That Moore Threads' GPUs are declared only is said wherever they are shown."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import anyattn
from anyattn import AttentionSpec
from anyattn.cli import app

DOCS = Path(__file__).parents[2] / "docs"
GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
MUSA = "sim:mtt-s5000"


def test_the_command_says_so_with_the_device_and_with_each_backend():
    shown = CliRunner().invoke(app, ["backends", "--device", MUSA]).output
    assert "unverified" in shown.splitlines()[0]
    told = json.loads(CliRunner().invoke(app, ["backends", "--device", MUSA, "--json"]).output)
    assert told["device"]["status"] == "declared"
    assert "unverified" not in CliRunner().invoke(app, ["backends", "--device", "sim:b580"]).output


def test_what_is_chosen_is_torchs_and_declared_only():
    found = anyattn.survey(GQA, device=MUSA)
    assert (found.selection.prefill, found.selection.backends("decode")) == ("torch_native", ("torch_native",))
    valid = {verdict.name for verdict in found.selection.verdicts if not verdict.reasons}
    assert valid == {"torch_native", "reference"}


@pytest.mark.parametrize(("page", "text"), [("support.md", "| `mtt-s5000` |"), ("musa.md", "Unverified.")])
def test_the_documents_say_so(page, text):
    lines = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if text in line]
    assert any("declared" in line for line in lines[:1])

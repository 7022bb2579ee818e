"""Where TRITON_INTERPRET=1 has Triton's kernels interpreted on the CPU; `test_triton_interpreted.py` sees to that."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from anyattn.attention.triton_attention import tuning
from anyattn.mem_cache.kernels import triton_runs_on

_spec = importlib.util.spec_from_file_location("triton_interpreted", Path(__file__).with_name("interpreted.py"))
_module = sys.modules[_spec.name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if not triton_runs_on(torch.device("cpu")):
        pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1")
    monkeypatch.setitem(tuning.TUNINGS, _module.CPU.arch, _module.TUNING)

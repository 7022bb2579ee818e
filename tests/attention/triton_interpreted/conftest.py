"""Where TRITON_INTERPRET=1 has Triton's kernels interpreted on the CPU; `test_triton_interpreted.py` sees to that."""

import pytest
import torch

from anyattn.mem_cache.kernels import triton_runs_on


@pytest.fixture(autouse=True)
def _interpreted():
    if not triton_runs_on(torch.device("cpu")):
        pytest.skip("needs Triton's interpreter: set TRITON_INTERPRET=1")

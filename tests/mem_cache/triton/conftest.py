"""The device on which Triton kernels are tried: a GPU, or the CPU where TRITON_INTERPRET=1 has them interpreted."""

import pytest
import torch

from anyattn.mem_cache.kernels import triton_runs_on


def _device():
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    for device in (accelerator, torch.device("cpu")):
        if device is not None and triton_runs_on(device):
            return device
    return None


@pytest.fixture(scope="session")
def device():
    found = _device()
    if found is None:
        pytest.skip("Triton has no device here: set TRITON_INTERPRET=1, or use a GPU")
    return found

"""What every test shares: no network, a skip for each piece of hardware that is missing, hypothesis without a clock,
and the order in which several workers take files."""

import collections
import functools
import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports transformers: the weights are on disk

# The first call into torch takes longer than any per-example deadline. CI draws the same examples in every run, so
# that a red one can be repeated; a run by hand goes on searching.
try:
    from hypothesis import settings
except ImportError:
    pass  # a machine may have pytest alone, which is enough for the kernels' tests
else:
    settings.register_profile("anyattn", deadline=None)
    settings.register_profile("anyattn-ci", deadline=None, derandomize=True, print_blob=True)
    settings.load_profile("anyattn-ci" if os.environ.get("CI") else "anyattn")


def pytest_configure(config: pytest.Config) -> None:
    # By itself pytest-xdist hands out files with few tests last, which are those whose tests take minutes: all workers
    # but one would wait for the last of them.
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For workers: files with slow tests first, then those with many, so that what comes last is short."""
    if not hasattr(config, "workerinput"):
        return
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path], item.path))


@functools.cache
def missing_for(marker: str) -> str | None:
    """Why a test with this marker cannot run here, or None. Asked per test, so that plain runs import no torch."""
    if marker not in {"cuda", "hopper", "rocm", "npu", "xpu"}:
        return None
    try:
        import torch
    except ImportError as error:
        return f"needs torch: {error}"
    if marker == "cuda":
        if torch.version.cuda is None:
            return f"needs an NVIDIA GPU: torch {torch.__version__} is built without CUDA"
        return None if torch.cuda.is_available() else "needs an NVIDIA GPU: torch.cuda.is_available() is false"
    if marker == "hopper":
        if reason := missing_for("cuda"):
            return reason
        capability = torch.cuda.get_device_capability()
        return None if capability[0] == 9 else f"needs a Hopper GPU: the compute capability is {capability}, not 9.x"
    if marker == "rocm":
        if torch.version.hip is None:
            return f"needs an AMD GPU: torch {torch.__version__} is built without ROCm"
        return None if torch.cuda.is_available() else "needs an AMD GPU: torch.cuda.is_available() is false"
    if marker == "npu":
        try:
            import torch_npu  # noqa: F401 adds torch.npu; without CANN it fails in ways of its own
        except Exception as error:
            return f"needs an Ascend NPU: import torch_npu failed: {error!r}"
        return None if torch.npu.is_available() else "needs an Ascend NPU: torch.npu.is_available() is false"
    return None if torch.xpu.is_available() else "needs an Intel GPU: torch.xpu.is_available() is false"


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers():
        if reason := missing_for(marker.name):
            pytest.skip(reason)

"""Huawei's kernels for Ascend NPUs, from torch-npu."""

SERVERS = frozenset({"ascend910b", "ascend910_93"})
"""Atlas A2 and A3."""

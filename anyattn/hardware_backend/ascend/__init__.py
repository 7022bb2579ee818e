"""Huawei's kernels for Ascend NPUs, from torch-npu."""

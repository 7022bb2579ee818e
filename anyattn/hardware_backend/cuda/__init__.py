"""NVIDIA's and its ecosystem's kernels."""

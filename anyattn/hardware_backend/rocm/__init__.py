"""AMD's kernels."""

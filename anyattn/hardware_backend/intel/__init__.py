"""Intel CPUs and GPUs."""

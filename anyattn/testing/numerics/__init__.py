"""Backends against float64, on random batches, with NaN in every place that must not be read."""

"""Captured steps replayed, against the same steps without a graph."""

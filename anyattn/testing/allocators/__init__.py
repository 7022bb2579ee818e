"""Allocators against a model of the books in plain Python."""

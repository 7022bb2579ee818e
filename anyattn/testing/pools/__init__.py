"""Pools against what was stored, byte by byte."""

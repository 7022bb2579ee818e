"""The compliance kit: whether a backend computes what it declares. `python -m anyattn.testing PKG.MODULE:Backend`."""

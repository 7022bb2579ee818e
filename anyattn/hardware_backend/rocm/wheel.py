"""What every backend on AMD's aiter declares alike."""

CDNA3, CDNA4 = frozenset({"gfx942"}), frozenset({"gfx950"})
ARCHS = CDNA3 | CDNA4

PACKAGES = ("torch>=2.9", "amd-aiter>=0.1.7.post2.dev18")
CONTRACT_TESTED_WITH = "amd-aiter 0.1.7.post2.dev18"

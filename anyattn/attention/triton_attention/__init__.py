"""The `triton` backend: our own kernels, for every GPU that Triton compiles for.

backend.py  what is declared, the host work of a step, launches      tuning.py   which tiles, by architecture
work.py     who computes what: the device divides each step's keys   attend.py   plain Triton: attention and the merge
hopper_mla.py, hopper_extend.py  Gluon: producer and consumer warpgroups, for what plain Triton cannot overlap
"""

"""The device that the plugin is for, which no machine has, and its facts for asking what would be chosen there."""

# A frozen copy of a plugin as it was written against contract version 1. It is never edited: should it stop working,
# the contract has broken plugins that are out there, and its version has to be raised.

import os

from anyattn import GraphLevel, Platform, ProbeResult


def probe():
    if not os.path.exists("/dev/frozen0"):
        return ProbeResult()
    device = Platform(
        kind="frozen",
        vendor="frozen",
        name="Frozen One",
        arch="frozen1",
        torch_device="frozen:0",
        problems=("torch_frozen is not installed; run `pip install torch-frozen`",),
    )
    return ProbeResult(devices=(device,))


FROZEN1 = Platform(
    kind="frozen",
    vendor="frozen",
    name="Frozen One",
    arch="frozen1",
    torch_device="sim:frozen1",
    features=frozenset({"matrix"}),
    memory_total_bytes=64 << 30,
    num_cores=8,
    collective="gloo",
    graph=GraphLevel.ALWAYS,
    simulated=True,
)

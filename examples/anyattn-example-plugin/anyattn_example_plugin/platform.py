"""The example device: an accelerator emulated on the CPU, found where EXAMPLE_DEVICES=1 says that it is there."""

import importlib.util
import os
from dataclasses import replace

from anyattn import GraphLevel, Platform, ProbeResult

VARIABLE = "EXAMPLE_DEVICES"
"""Stands for a driver. Without it no device is found, so that installing this package takes no machine over."""

_EXAMPLE = Platform(
    kind="example",
    vendor="anyattn",
    name="Example One",
    arch="example1",
    torch_device="cpu",  # who computes for it
    graph=GraphLevel.ALWAYS,  # the kit emulates capture and replay where torch has no graphs for a device
    status="emulated",
)

EXAMPLE1 = replace(_EXAMPLE, torch_device="sim:example1", memory_total_bytes=16 << 30, simulated=True)
"""For `anyattn backends --device sim:example1`, on any machine."""


def probe() -> ProbeResult:
    """The device where there is one. What cannot be told, or used, is said in words, with what mends it."""
    text = os.environ.get(VARIABLE, "0")
    if text not in ("0", "1"):
        # Devices of a kind must differ in what torch calls them, and torch has one CPU.
        return ProbeResult(problems=(f"{VARIABLE} is {text!r}: set it to 0 or 1, as torch has one CPU to emulate on",))
    if text == "0":
        return ProbeResult()
    problems = () if importlib.util.find_spec("torch") else ("torch is not installed; run `pip install torch`",)
    return ProbeResult(devices=(replace(_EXAMPLE, problems=problems),))

"""What a platform is to the rest of anyattn: one device's facts as frozen data, and what a probe returns."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.types import STATUSES, GraphLevel, Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anyattn.attention.spec import AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """One device as it was found: facts, never opinions. Unknown facts are None or empty."""

    kind: str
    """Device family, the first part of what backends declare: cpu, cuda, rocm, ascend, xpu, ..."""
    vendor: str
    name: str
    arch: str
    """The vendor's name of the instruction set or generation: sm90, gfx942, x86_64, aarch64, ..."""
    torch_device: str
    """What torch calls it: "cpu", "cuda:0", ..."""
    index: int = 0
    """Position among the devices of this kind that the process may see."""
    features: frozenset[str] = frozenset()
    """Instruction sets or units that kernels may need: avx2, avx512_bf16, amx_bf16, ..."""
    compute_capability: tuple[int, int] | None = None
    uuid: str | None = None
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    """Free when the probe looked; None when it could not be told."""
    num_cores: int | None = None
    """Physical cores of a CPU, multiprocessors or the vendor's equivalent of an accelerator."""
    num_threads: int | None = None
    """Logical CPUs that this process may run on; None for accelerators."""
    cpus: str | None = None
    """Which these are, as Linux writes lists ("0-3,8"), where a CPU quota may pay for fewer. None for accelerators."""
    numa_nodes: str | None = None
    """The NUMA nodes that these CPUs are on, as such a list."""
    memory_nodes: str | None = None
    """The NUMA nodes that this process may take memory from, as such a list."""
    driver_version: str | None = None
    runtime_version: str | None = None
    """Version of the vendor runtime that the installed torch was built for, where there is one."""
    collective: str = "gloo"
    """The library for collective communication: nccl, rccl, hccl, xccl, mccl or gloo. torch.distributed calls its
    backends by these names too, but for rccl, which is "nccl" there."""
    graph: GraphLevel = GraphLevel.NEVER
    """The most that a device graph can do on this kind of device."""
    triton: bool = False
    """Whether Triton has a compiler for this device (not whether it is installed)."""
    missing_dtypes: frozenset[str] = frozenset()
    """What torch has not on this device, of the dtypes that the contract knows: float64, float8_e4m3fn, ..."""
    status: Status = "declared"
    """What stands behind the probe of this kind of device."""
    torch_remedy: str = ""
    """How a torch that drives such a device is installed, for remedies; empty where the registry's usual one does."""
    simulated: bool = False
    """Facts of hardware that is not here, for asking what would be chosen there."""
    problems: tuple[str, ...] = ()
    """Why the torch that is installed here cannot drive the device; empty when nothing speaks against it."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            kinds = _FIELD_TYPES[field.name]
            value = getattr(self, field.name)
            # A bool is an int to isinstance, and would be shown as one.
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                wanted = " or ".join(kind.__name__ for kind in kinds)
                raise TypeError(f"{field.name} of a Platform must be of type {wanted}, not {type(value).__name__}")
        for name in ("features", "missing_dtypes", "problems"):
            if not all(isinstance(member, str) for member in getattr(self, name)):
                raise TypeError(f"{name} of a Platform must hold strings")
        if self.status not in STATUSES:
            raise TypeError(f"status of a Platform must be one of {', '.join(STATUSES)}, not {self.status!r}")

    def backends(self, spec: AttentionSpec | Sequence[AttentionSpec] | None = None) -> tuple[str, ...]:
        """Names of the attention backends that are valid on this device, those of plugins too.

        spec: of all layers, or one for each: they also have to serve these, in at least one role. The best is then
            first, otherwise they are sorted by name.
        """
        # The one place where facts lead on to what can be done with them: for people at a prompt. The import waits for
        # the call, because everything else is built on this file.
        from anyattn.dry_run import backends_on

        return backends_on(self, spec)

    def __str__(self) -> str:
        return f"{self.torch_device} ({self.name}, {self.arch})"

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        facts = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        facts["features"] = sorted(self.features)
        facts["missing_dtypes"] = sorted(self.missing_dtypes)
        facts["graph"] = self.graph.name.lower()
        facts["problems"] = list(self.problems)
        if self.compute_capability is not None:
            facts["compute_capability"] = list(self.compute_capability)
        return facts


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("kind", "vendor", "name", "arch", "torch_device", "torch_remedy", "collective", "status"), (str,)),
    **dict.fromkeys(("uuid", "driver_version", "runtime_version"), (str, type(None))),
    **dict.fromkeys(("cpus", "numa_nodes", "memory_nodes"), (str, type(None))),
    **dict.fromkeys(("memory_total_bytes", "memory_free_bytes", "num_cores", "num_threads"), (int, type(None))),
    **dict.fromkeys(("triton", "simulated"), (bool,)),
    "index": (int,),
    **dict.fromkeys(("features", "missing_dtypes"), (frozenset,)),
    "compute_capability": (tuple, type(None)),
    "graph": (GraphLevel,),
    "problems": (tuple,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """What one probe found: its devices, and in words what kept it from finding out more."""

    devices: tuple[Platform, ...] = ()
    problems: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, member in (("devices", Platform), ("problems", str)):
            values = getattr(self, name)
            if not (isinstance(values, tuple) and all(isinstance(value, member) for value in values)):
                raise TypeError(f"{name} of a ProbeResult must be a tuple of {member.__name__}")

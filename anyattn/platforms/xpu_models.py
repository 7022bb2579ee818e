"""Intel GPUs by PCI device id: those that PyTorch's documentation names for torch.xpu.

Which: "Getting Started on Intel GPU" (Data Center GPU Max, Arc A and B, and Core Ultra of Meteor Lake-H, Arrow Lake-H,
Lunar Lake and Panther Lake), and the Flex cards, which are Arc A chips. Graphics that came before, and those of Meteor
Lake-U and Arrow Lake-U and -S, are not named there and not here.

Ids: Linux, include/drm/intel/pciids.h. Names: Intel's compute-runtime (devices_base.inl) and, for Arc Pro B50 and B60,
Mesa (iris_pci_ids.h); an id without a name there is called "Intel Graphics". Architectures: the enumerators of SYCL's
sycl_ext_oneapi_device_architecture without "intel_gpu_". Which ids of Panther Lake are its ptl_h and which its ptl_u is
in none of these, so they are "ptl" here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What the PCI device id says of a GPU."""

    arch: str
    name: str
    num_cores: int | None = None
    """Xe cores of the whole card, where Intel tells them: the GPU Occupancy Calculator in oneAPI-samples (a Xe core has
    16 vector engines, 8 in Max), and the announcement of Arc B580 and B570."""

    @property
    def is_discrete(self) -> bool:
        """A card of its own, not a part of the CPU."""
        return self.arch.startswith(("pvc", "acm", "bmg"))


def _model(arch: str, name: str = "Graphics", num_cores: int | None = None) -> Model:
    return Model(arch=arch, name=f"Intel {name}", num_cores=num_cores)


MODELS = {
    0x0B69: _model("pvc", "Data Center GPU Max 1450"),
    0x0B6E: _model("pvc", "Data Center GPU Max 1100C"),
    0x0BD4: _model("pvc_vg", "Data Center GPU Max 1550VG"),
    0x0BD5: _model("pvc", "Data Center GPU Max 1550", 128),
    0x0BD6: _model("pvc", "Data Center GPU Max 1550", 128),
    0x0BD7: _model("pvc", "Data Center GPU Max 1350"),
    0x0BD8: _model("pvc", "Data Center GPU Max 1350"),
    0x0BD9: _model("pvc", "Data Center GPU Max 1100", 56),
    0x0BDA: _model("pvc", "Data Center GPU Max 1100", 56),
    0x0BDB: _model("pvc", "Data Center GPU Max 1100", 56),
    0x5690: _model("acm_g10", "Arc A770M", 32),
    0x5691: _model("acm_g10", "Arc A730M", 24),
    0x5692: _model("acm_g10", "Arc A550M", 16),
    0x56A0: _model("acm_g10", "Arc A770", 32),
    0x56A1: _model("acm_g10", "Arc A750", 28),
    0x56A2: _model("acm_g10", "Arc A580"),
    0x56BE: _model("acm_g10", "Arc A750E"),
    0x56BF: _model("acm_g10", "Arc A580E"),
    0x56C0: _model("acm_g10", "Data Center GPU Flex 170", 32),
    0x56C2: _model("acm_g10", "Data Center GPU Flex 170V"),
    0x5693: _model("acm_g11", "Arc A370M", 8),
    0x5694: _model("acm_g11", "Arc A350M", 6),
    0x5695: _model("acm_g11"),
    0x56A5: _model("acm_g11", "Arc A380", 8),
    0x56A6: _model("acm_g11", "Arc A310 LP", 6),
    0x56B0: _model("acm_g11", "Arc Pro A30M"),
    0x56B1: _model("acm_g11", "Arc Pro A40/A50"),
    0x56BA: _model("acm_g11", "Arc A380E"),
    0x56BB: _model("acm_g11", "Arc A310E"),
    0x56BC: _model("acm_g11", "Arc A370E"),
    0x56BD: _model("acm_g11", "Arc A350E"),
    0x56C1: _model("acm_g11", "Data Center GPU Flex 140", 8),
    0x5696: _model("acm_g12", "Arc A570M"),
    0x5697: _model("acm_g12", "Arc A530M"),
    0x56A3: _model("acm_g12"),
    0x56A4: _model("acm_g12"),
    0x56B2: _model("acm_g12", "Arc Pro A60M"),
    0x56B3: _model("acm_g12", "Arc Pro A60"),
    0xE202: _model("bmg_g21"),
    0xE209: _model("bmg_g21"),
    0xE20B: _model("bmg_g21", "Arc B580", 20),
    0xE20C: _model("bmg_g21", "Arc B570", 18),
    0xE20D: _model("bmg_g21"),
    0xE210: _model("bmg_g21"),
    0xE211: _model("bmg_g21", "Arc Pro B60"),
    0xE212: _model("bmg_g21", "Arc Pro B50"),
    0xE216: _model("bmg_g21"),
    **dict.fromkeys(range(0xE220, 0xE224), _model("bmg_g31")),
    0x7D55: _model("mtl_h", "Arc Graphics"),
    0x7DD5: _model("mtl_h"),
    0x7D51: _model("arl_h", "Arc Graphics"),
    0x7DD1: _model("arl_h"),
    0x6420: _model("lnl_m"),
    0x64A0: _model("lnl_m", "Arc Graphics"),
    0x64B0: _model("lnl_m"),
    **dict.fromkeys((*range(0xB080, 0xB088), 0xB08F, 0xB090, 0xB0A0, 0xB0B0), _model("ptl")),
}
"""By PCI device id."""

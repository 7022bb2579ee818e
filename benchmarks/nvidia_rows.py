"""The shapes that nvidia.py measures, whose kernels they are measured with, and the least time that each can take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from anyattn import AttentionSpec
from anyattn.types import DTYPE_BYTES

BYTES_PER_S = 4.4e12
"""What the best attention kernels were seen to read from an H200's memory; a copy reads and writes 4.27e12."""
OPERATIONS_PER_S = 790e12
"""Of bf16 matrix products, as measured on an H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One shape. length: tokens of each sequence, of which the last `num_new` are the step's.

    ragged: where sequences differ, each one's tokens and how many of them are new; the others then only name the row.
    """

    batch: int
    length: int
    num_new: int = 1
    ragged: tuple[tuple[int, int], ...] = ()

    @property
    def kv_lens(self) -> npt.NDArray[np.int64]:
        """[batch], tokens of each sequence, the new ones included."""
        return self._lens()[:, 0]

    @property
    def qo_lens(self) -> npt.NDArray[np.int64]:
        """[batch], new tokens of each sequence."""
        return self._lens()[:, 1]

    def _lens(self) -> npt.NDArray[np.int64]:
        return np.array(self.ragged or [(self.length, self.num_new)] * self.batch, dtype=np.int64)

    def __str__(self) -> str:
        if self.num_new == 1:
            return f"batch {self.batch}, length {self.length}"
        if self.num_new == self.length:
            return f"{self.batch} x {self.length}"
        return f"{self.num_new} new after {self.length - self.num_new}, batch {self.batch}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of one kind of layer, which share runtimes.

    kernels: by the backend of anyattn, those raw kernels that do the same work; it is held against the fastest.
    host_row: small enough that the host takes longer than the device.
    """

    name: str
    spec: AttentionSpec
    page_size: int
    rows: Sequence[Row]
    kernels: Mapping[str, Sequence[str]]
    host_row: Row = Row(batch=4, length=64)

    @property
    def kernel_names(self) -> list[str]:
        """All raw kernels, without repeats."""
        return list(dict.fromkeys(kernel for kernels in self.kernels.values() for kernel in kernels))

    @property
    def decodes(self) -> bool:
        """Whether each sequence has one new token in every row."""
        return all(row.num_new == 1 for row in self.rows)

    def pages_of(self, row: Row) -> int:
        """Pages that a row's sequences need."""
        return int((-(-row.kv_lens // self.page_size)).sum())

    def operations(self, row: Row) -> int:
        """Multiplications and additions of both matrix products, over what the causal mask lets through."""
        new = row.qo_lens
        seen = int((new * (row.kv_lens - new) + new * (new + 1) // 2).sum())
        return 2 * seen * self.spec.num_qo_heads * (self.spec.head_dim + self.spec.vo_head_dim)

    def num_bytes(self, row: Row) -> int:
        """Keys and values read once, q read and the output written once."""
        spec = self.spec
        cache = spec.cache_spec(num_layers=1, page_size=self.page_size, layout="NHD")
        q_and_out = spec.num_qo_heads * (spec.head_dim + spec.vo_head_dim) * DTYPE_BYTES[spec.dtype]
        return int(row.kv_lens.sum() * cache.bytes_per_token + row.qo_lens.sum() * q_and_out)

    def limit_us(self, row: Row) -> float:
        """The least time, in microseconds, that memory and matrix units allow."""
        return 1e6 * max(self.num_bytes(row) / BYTES_PER_S, self.operations(row) / OPERATIONS_PER_S)


def _decodes(*shapes: tuple[int, int]) -> tuple[Row, ...]:
    return tuple(Row(batch=batch, length=length) for batch, length in shapes)


def _mla(num_qo_heads: int) -> Group:
    """DeepSeek-V3's latent attention, on one device or on one of eight."""
    return Group(
        name=f"MLA decode, {num_qo_heads} heads",
        spec=AttentionSpec.mla(
            num_qo_heads=num_qo_heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=192**-0.5, graph="decode"
        ),
        page_size=64,
        rows=_decodes((1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 8192), (128, 8192)),
        kernels={"flashmla": ["FlashMLA"], "flashinfer_mla": ["FlashInfer MLA fa3"], "fa3": ["FA3"]},
    )


_GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)

GROUPS = (
    _mla(128),
    _mla(16),
    Group(
        name="GQA decode",
        spec=_GQA.replace(graph="decode"),
        page_size=16,
        rows=_decodes((1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 1024), (64, 8192), (256, 1024)),
        kernels={"fa3": ["FA3"], "flashinfer": ["FlashInfer decode"]},
    ),
    Group(
        name="GQA prefill",
        spec=_GQA,
        page_size=64,
        rows=(
            Row(batch=1, length=4096, num_new=4096),
            Row(batch=4, length=8192, num_new=8192),
            Row(batch=4, length=16384, num_new=512),
            Row(batch=32, length=4096, num_new=4),
        ),
        kernels={"fa3": ["FA3"], "flashinfer": ["FlashInfer fa2", "FlashInfer fa3"]},
        host_row=Row(batch=4, length=64, num_new=16),
    ),
)

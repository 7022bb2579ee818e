"""The shapes that triton_backend.py measures, each with lengths that are alike and with lengths drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from nvidia_rows import Group, Row

from anyattn import AttentionSpec

PAGE_SIZES = (1, 16, 64)
FLASHMLA_PAGE_SIZE = 64
"""The one that FlashMLA takes; all other kernels take each of them."""

MLA_DECODE_HEADS = (8, 16, 32, 128)
MLA_VERIFY_HEADS = (16, 128)


def groups() -> list[Group]:
    """A group for each kind of layer and step, and for each page size."""
    mla = [_mla_decode(heads) for heads in MLA_DECODE_HEADS]
    verify = [_mla_verify(heads) for heads in MLA_VERIFY_HEADS]
    kinds = [*mla, _gqa_decode(), _gqa_prefill(), _gqa_verify(), *verify]
    return [_at_page_size(kind, page_size) for kind in kinds for page_size in PAGE_SIZES]


def name_of(group: Group, row: Row) -> str:
    """What `--only` looks at, with a comma behind it, so that "page 1," is not page 16."""
    return f"{group.name}, {row}, page {group.page_size}{', ragged' if row.ragged else ''}"


def select(only: Sequence[str]) -> list[tuple[Group, list[Row]]]:
    """The groups that have rows with all of these in their name, and those rows."""
    chosen = []
    for group in groups():
        rows = [row for row in group.rows if all(part in f"{name_of(group, row)}," for part in only)]
        if rows:
            chosen.append((group, rows))
    return chosen


def ragged(row: Row, *, with_new: bool = False) -> Row:
    """The row with lengths drawn at random, the same at each call, and about as many tokens in all.

    Lengths are log-uniform between 1 and twice the row's, times what makes their sum that of the row; none is less than
    its new tokens. with_new: new tokens are drawn likewise, or where the row has no others are all of its tokens.
    """
    rng = np.random.default_rng([row.batch, row.length, row.num_new])
    kv_lens, qo_lens = _drawn(rng, row.batch, row.length), row.qo_lens
    if with_new:
        qo_lens = kv_lens if row.num_new == row.length else _drawn(rng, row.batch, row.num_new)
    kv_lens = np.maximum(kv_lens, qo_lens)
    return replace(row, ragged=tuple(zip(kv_lens.tolist(), qo_lens.tolist(), strict=True)))


def spread(batch: int, longest: int) -> Row:
    """A decode step of lengths from 1 to the longest: these two, and log-uniform ones between them."""
    between = _log_uniform(np.random.default_rng([batch, longest]), batch - 2, longest).round().astype(np.int64)
    lens = [longest, 1, *between.tolist()]
    return Row(batch=batch, length=longest, ragged=tuple((length, 1) for length in lens))


def _drawn(rng: np.random.Generator, batch: int, mean: int) -> npt.NDArray[np.int64]:
    values = _log_uniform(rng, batch, 2 * mean)
    lens: npt.NDArray[np.int64] = (values * (batch * mean / values.sum())).round().astype(np.int64)
    return np.maximum(lens, 1)


def _log_uniform(rng: np.random.Generator, count: int, most: int) -> npt.NDArray[np.float64]:
    return np.exp(rng.uniform(0, np.log(most), count))


def _both(rows: Sequence[Row], *, with_new: bool = False) -> Iterator[Row]:
    """Each row, and after it its ragged version, which a single sequence has not."""
    for row in rows:
        yield row
        if row.batch > 1:
            yield ragged(row, with_new=with_new)


def _decodes(*shapes: tuple[int, int]) -> list[Row]:
    return list(_both([Row(batch=batch, length=length) for batch, length in shapes]))


def _verifies() -> list[Row]:
    return list(_both([Row(batch=32, length=4096, num_new=num_new) for num_new in (2, 4, 8)]))


def _mla(num_qo_heads: int) -> AttentionSpec:
    """DeepSeek-V3's latent attention, with some of its 128 heads."""
    return AttentionSpec.mla(num_qo_heads=num_qo_heads, kv_lora_rank=512, qk_rope_head_dim=64, sm_scale=192**-0.5)


_GQA = AttentionSpec(num_qo_heads=32, num_kv_heads=8, head_dim=128)
_MLA_KERNELS = ("FA3", "FlashInfer MLA fa3", "FlashMLA")
_SPREAD = spread(16, 131072)


def _group(name: str, spec: AttentionSpec, rows: Sequence[Row], kernels: Sequence[str]) -> Group:
    return Group(name=name, spec=spec, page_size=64, rows=rows, kernels={"triton": kernels})


def _at_page_size(group: Group, page_size: int) -> Group:
    """With those kernels that take it."""
    kernels = [name for name in group.kernel_names if name != "FlashMLA" or page_size == FLASHMLA_PAGE_SIZE]
    return replace(group, page_size=page_size, kernels={"triton": kernels})


def _mla_decode(num_qo_heads: int) -> Group:
    rows = _decodes((1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 8192), (128, 8192))
    if num_qo_heads == 16:
        rows.append(_SPREAD)
    return _group(f"MLA decode, {num_qo_heads} heads", _mla(num_qo_heads), rows, _MLA_KERNELS)


def _mla_verify(num_qo_heads: int) -> Group:
    return _group(f"MLA verify, {num_qo_heads} heads", _mla(num_qo_heads), _verifies(), _MLA_KERNELS)


def _gqa_decode() -> Group:
    rows = _decodes((1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 1024), (64, 8192), (256, 1024))
    return _group("GQA decode", _GQA, [*rows, _SPREAD], ("FA3", "FlashInfer decode"))


def _gqa_prefill() -> Group:
    rows = (
        Row(batch=1, length=4096, num_new=4096),
        Row(batch=4, length=8192, num_new=8192),
        Row(batch=4, length=16384, num_new=512),
    )
    return _group("GQA prefill", _GQA, list(_both(rows, with_new=True)), ("FA3", "FlashInfer fa2", "FlashInfer fa3"))


def _gqa_verify() -> Group:
    return _group("GQA verify", _GQA, _verifies(), ("FA3", "FlashInfer fa2", "FlashInfer fa3"))

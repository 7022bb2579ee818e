"""What the steps of some sequences must give, and the comparison with what a backend gave."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.pool import quantize
from anyattn.testing.check import CheckFailedError, Measured
from anyattn.testing.numerics.attending import Rows, round_q, visible_keys
from anyattn.testing.numerics.diagnosis import diagnose
from anyattn.testing.numerics.driver import PerHead, Step
from anyattn.testing.numerics.expectation import Expected, Results, expect, judge

__all__ = ["Expected", "Oracle", "compare"]

_TILE = 128
_E4M3_MAX, _SMALLEST_SCALE = 448.0, 2.0**-126


class Oracle:
    """Every sequence's keys and values, kept apart from the runtime's pool, as the pool's dtype would hold them."""

    def __init__(
        self,
        spec: AttentionSpec,
        num_seqs: int,
        k_scale: float | torch.Tensor,
        v_scale: float | torch.Tensor,
        *,
        page_size: int | None = None,
    ) -> None:
        """k_scale, v_scale: as `set_scales` returns them for a layer.

        page_size: for mistakes that have to do with pages.
        """
        self.spec = spec
        self.k = [torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=torch.float64) for _ in range(num_seqs)]
        self.v = [torch.empty(0, spec.num_kv_heads, spec.vo_head_dim, dtype=torch.float64) for _ in range(num_seqs)]
        self._scales = (k_scale, v_scale)
        self._stored: torch.dtype = getattr(torch, spec.storage_dtype)
        self._page_size = page_size
        self._num_steps = 0

    def append(self, i: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """New tokens of the i-th sequence."""
        if not k.shape[0]:
            return
        if self.spec.topk is not None:
            self.k[i] = torch.cat([self.k[i], _sparse_rows(k, self.spec.vo_head_dim).double()])
            self.v[i] = self.k[i][..., : self.spec.vo_head_dim]
            return
        for history, new, scale in ((self.k, k, self._scales[0]), (self.v, v, self._scales[1])):
            history[i] = torch.cat([history[i], quantize(new, scale, self._stored).double() * scale])

    def expect(self, step: Step, per_head: PerHead, *, name: str | None = None) -> Expected:
        """Appends a step's tokens, and says what it must give.

        name: of the step, in messages; "step N" by default, counted from 0.
        """
        name = f"step {self._num_steps}" if name is None else name
        self._num_steps += 1
        counts = [rows.stop - rows.start for rows in step.rows]
        prefixes = [k.shape[0] for k in self.k]
        chosen = step.indices(prefixes)
        q, masks = round_q(self.spec, step.q), step.tree_masks or [None] * len(step.rows)
        sequences = []
        for i, rows in enumerate(step.rows):
            self.append(i, step.k[rows], step.v[rows])
            sequences.append(
                Rows(
                    spec=self.spec,
                    q=step.q[rows],
                    rounded_q=q[rows],
                    k=self.k[i],
                    v=self.v[i],
                    seen=visible_keys(self.spec, counts[i], self.k[i].shape[0], masks[i])
                    if chosen is None
                    else _chosen_keys(chosen[rows], self.k[i].shape[0]),
                    tree_mask=masks[i],
                    sinks=per_head.sinks,
                    alibi_slopes=per_head.alibi_slopes,
                    k_scale=self._scales[0],
                    v_scale=self._scales[1],
                    page_size=self._page_size,
                )
            )
        phase = _phase(counts, prefixes, has_tree=step.tree_masks is not None)
        return expect(name, phase, step.rows, sequences)


def _sparse_rows(k: torch.Tensor, rank: int) -> torch.Tensor:
    """What the rows of sparse attention keep of k, float32: tiles of latents in fp8 with scales, rope in bfloat16.

    Source: the format that flash_mla_interface.py of FlashMLA states for DeepSeek-V3.2.
    """
    tiles = torch.unflatten(k[..., :rank].float(), -1, (-1, _TILE))
    scales = (tiles.abs().amax(dim=-1, keepdim=True) / _E4M3_MAX).clamp(min=_SMALLEST_SCALE)
    stored = (tiles / scales).clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.cat([(stored.float() * scales).flatten(-2), k[..., rank:].bfloat16().float()], dim=-1)


def _chosen_keys(indices: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """As `visible_keys`: [num_new, num_tokens], bool, of positions [num_new, topk], negative ones being of none."""
    seen = torch.zeros(indices.shape[0], num_tokens + 1, dtype=torch.bool)
    seen.scatter_(1, indices.long().masked_fill(indices < 0, num_tokens), True)
    return seen[:, :num_tokens]


def _phase(counts: Sequence[int], prefixes: Sequence[int], *, has_tree: bool) -> str:
    if has_tree:
        return "verify"
    if counts and all(count == 1 for count in counts):
        return "decode"
    return "mixed" if any(pair[0] == 1 and pair[1] for pair in zip(counts, prefixes, strict=True)) else "prefill"


def compare(got: Sequence[Results], expected: Sequence[Expected]) -> Measured:
    """Judges the results of one or several steps, each as `run_step` returns it; `expectation` says what is allowed.

    Raises CheckFailedError, with what well-known mistake gives the same, where one does.
    """
    verdict = judge(got, expected)
    if verdict.failure:
        # Mistakes are made of masks, which here the engine's choice stands for.
        is_sparse = any(rows.spec.topk is not None for each in expected for rows in each.sequences)
        raise CheckFailedError(verdict.failure + ("" if verdict.is_nan or is_sparse else diagnose(got, expected)))
    return Measured(error=verdict.error, allowed=verdict.allowed)

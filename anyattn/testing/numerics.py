"""One case driven through a backend and compared with float64, NaN lying in every place that must not be read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from anyattn.attention.backend import AttentionBackend
from anyattn.attention.batch import Batch
from anyattn.attention.hybrid import HybridBackend
from anyattn.attention.reference import ReferenceBackend, reference_attention, visible
from anyattn.attention.runtime import AttentionRuntime
from anyattn.attention.select import select
from anyattn.attention.selection import BackendCandidate, Candidates, Preference
from anyattn.attention.spec import AttentionSpec
from anyattn.mem_cache.allocator import PagedAllocator
from anyattn.mem_cache.page_table import PageTable
from anyattn.mem_cache.pool import MHAPool, MLAPool, quantize
from anyattn.mem_cache.windows import WindowPages
from anyattn.platforms.base import Platform
from anyattn.testing.cases import Case
from anyattn.types import FP8_DTYPES


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """error, allowed: largest absolute error of the output against float64, and what was allowed in that place.

    failure: in words, None when the case passed.
    """

    case: Case
    error: float
    allowed: float
    failure: str | None


class ShuffledAllocator(PagedAllocator):
    """Hands out pages in random order, so that no kernel gets away with assuming consecutive ones."""

    def __init__(
        self, num_pages: int, page_size: int, device: Any = None, *, debug: bool = False, seed: int = 0
    ) -> None:
        super().__init__(num_pages, page_size, device, debug=debug)
        self._free = np.random.default_rng(seed).permutation(self._free)


def build_runtime(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> AttentionRuntime:
    """A runtime of one layer around one backend, its pools full of NaN and its pages in random order.

    A role whose phases the backend does not declare is filled by the reference.
    """
    spec, page_size = case.spec, case.page_size
    pool_class = MLAPool if spec.is_mla else MHAPool
    classes: dict[str, type[AttentionBackend]] = {"tested": backend, "reference": ReferenceBackend}
    candidates = Candidates(
        backends=[
            BackendCandidate(name=name, distribution="anyattn", capabilities=cls.capabilities)
            for name, cls in classes.items()
        ],
        allocators={"shuffled": ShuffledAllocator.capabilities},
        pools={"torch": pool_class.capabilities},
    )
    phases = backend.capabilities.phases
    preference = Preference(
        prefill_backend="tested" if phases & {"prefill", "mixed", "verify"} else "reference",
        decode_backends=("tested" if "decode" in phases else "reference",),
        page_size=page_size,
        layout=case.layout,
        joined_layers=case.joined_layers,
    )
    choice = select(spec, platform, candidates, preference)
    layer, num_layers = (1, 3) if case.joined_layers else (0, 1)
    cache = spec.cache_spec(
        num_layers=num_layers, page_size=page_size, layout=case.layout, joined_layers=case.joined_layers
    )
    longest = [sum(step[i] for step in case.steps) for i in range(len(case.steps[0]))]
    num_pages = sum(-(-tokens // page_size) for tokens in longest) + 3
    windows = []
    if spec.sliding_window is not None and case.window_pages:
        pages = ShuffledAllocator(num_pages, page_size, debug=True, seed=seed + 1)
        windows = [WindowPages(spec.sliding_window, pages, num_pages=num_pages, page_size=page_size)]
    pools = [pool_class(cache, num_pages, platform.torch_device) for _ in range(1 + len(windows))]
    for kv in (kv for pool in pools for kv in pool.layers):
        kv.k.fill_(float("nan"))
        kv.v.fill_(float("nan"))
    instances = {name: classes[name](spec, cache, platform) for name in {choice.prefill, choice.decode}}
    table = PageTable(
        ShuffledAllocator(num_pages, page_size, debug=True, seed=seed),
        page_size,
        device=platform.torch_device,
        windows=windows,
        debug=True,
    )
    return AttentionRuntime(
        [spec],
        {spec: choice},
        {spec: HybridBackend(choice, instances)},
        pools,
        table,
        [(len(windows), layer)],
    )


class _Oracle:
    """Every sequence's keys and values, kept apart from the runtime's pool, as the pool's dtype would hold them."""

    def __init__(
        self, spec: AttentionSpec, num_seqs: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor
    ) -> None:
        """k_scale, v_scale: as `_set_scales` returns them."""
        self.spec = spec
        self._scales = (k_scale, v_scale)
        self._stored: torch.dtype = getattr(torch, spec.storage_dtype)
        self.k = [torch.empty(0, spec.num_kv_heads, spec.head_dim, dtype=torch.float64) for _ in range(num_seqs)]
        self.v = [torch.empty(0, spec.num_kv_heads, spec.vo_head_dim, dtype=torch.float64) for _ in range(num_seqs)]

    def append(self, i: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for history, new, scale in ((self.k, k, self._scales[0]), (self.v, v, self._scales[1])):
            history[i] = torch.cat([history[i], quantize(new, scale, self._stored).double() * scale])


def plain_attention(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    tree_mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same attention as a model's eager code writes it, in the spec's dtype: what rounding alone costs.

    Shapes as for `reference_attention`.
    """
    dtype = q.dtype
    k, v = (x.to(dtype).repeat_interleave(spec.group_size, dim=1).transpose(0, 1) for x in (k, v))
    scores = (q.transpose(0, 1) @ k.transpose(1, 2) * spec.scale).float()
    if spec.logits_soft_cap is not None:
        scores = spec.logits_soft_cap * torch.tanh(scores / spec.logits_soft_cap)
    if alibi_slopes is not None:
        distance = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - q.shape[0], k.shape[1])[:, None]
        scores = scores + alibi_slopes[:, None, None] * distance
    scores = scores.masked_fill(~visible(spec, q.shape[0], k.shape[1], "cpu", tree_mask), float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    total = lse if sinks is None else torch.logaddexp(lse, sinks[:, None])
    weights = torch.exp(scores - torch.where(total.isneginf(), 0.0, total)[..., None]).to(dtype)
    return (weights @ v).transpose(0, 1), lse.T


def check_case(backend: type[AttentionBackend], case: Case, platform: Platform, seed: int) -> Result:
    """Runs the case with fresh random inputs and judges output and LSE.

    Allowed is twice the largest error of `plain_attention` in the case, plus one unit in the last place of the
    output dtype at the row's largest value.
    """
    generator = torch.Generator().manual_seed(seed)
    rt = build_runtime(backend, case, platform, seed)
    spec, num_seqs = case.spec, len(case.steps[0])
    oracle = _Oracle(spec, num_seqs, *_set_scales(rt, case))
    sinks = torch.randn(spec.num_qo_heads, generator=generator) if spec.sinks else None
    slopes = torch.rand(spec.num_qo_heads, generator=generator) * 0.2 if spec.alibi else None
    seqs = rt.new_sequences(num_seqs)
    steps, got, exact, rounded = [], [], [], []
    for counts in case.steps:
        step = _Step.draw(spec, counts, generator)
        steps.append(step)
        batch = rt.extend(seqs, counts, tree_masks=step.tree_masks)
        got.append(_run(rt, step, batch, sinks, slopes))
        for i, rows in enumerate(step.rows):
            oracle.append(i, step.k[rows], step.v[rows])
            mask = None if step.tree_masks is None else step.tree_masks[i]
            inputs = (spec, step.q[rows], oracle.k[i], oracle.v[i])
            exact.append(reference_attention(*inputs, tree_mask=mask, sinks=sinks, alibi_slopes=slopes))
            rounded.append(plain_attention(*inputs, tree_mask=mask, sinks=sinks, alibi_slopes=slopes))
    rt.free(seqs)
    rt.table.check()
    results = []
    if spec.deterministic:
        results.append(_compare_alone(backend, case, platform, seed, steps, got, (sinks, slopes)))
    for part, name in enumerate(["output", "LSE"] if spec.return_lse else ["output"]):
        results.append(_compare(case, name, *(torch.cat([pair[part] for pair in x]) for x in (got, exact, rounded))))
    return max(results, key=lambda result: (result.failure is not None, result.error / result.allowed))


def _set_scales(rt: AttentionRuntime, case: Case) -> tuple[float | torch.Tensor, float | torch.Tensor]:
    """Gives an fp8 pool scales other than 1.

    Returns k's and v's as the pool will use them: float32, [1, 1] or [num_kv_heads, 1], on the CPU; 1.0 where there
    are none.
    """
    spec = case.spec
    if spec.storage_dtype not in FP8_DTYPES:
        return 1.0, 1.0
    k_scale, v_scale = torch.tensor([0.05]), torch.tensor([0.05 if spec.is_mla else 0.07])
    if spec.kv_scale_per_head:  # so far apart that another head's scale is out of every tolerance
        factors = 2.0 ** (torch.arange(spec.num_kv_heads) % 4)
        k_scale, v_scale = k_scale * factors, v_scale * factors.flip(0)
    if case.scale_as_tensor:
        k_given = k_scale.to(rt.device)
        rt.set_scales(0, k_given, k_given if spec.is_mla else v_scale.to(rt.device))
    else:
        rt.set_scales(0, float(k_scale), float(v_scale))
    return k_scale[:, None], v_scale[:, None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Step:
    """Fresh inputs of one step on the CPU; k and v in the shapes of heads, for MLA v the latent part of k."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: list[slice]
    tree_masks: list[torch.Tensor] | None

    @classmethod
    def draw(cls, spec: AttentionSpec, counts: tuple[int, ...], generator: torch.Generator) -> _Step:
        tokens, dtype = sum(counts), getattr(torch, spec.dtype)
        k = torch.randn(tokens, spec.num_kv_heads, spec.head_dim, generator=generator).to(dtype)
        v = torch.randn(tokens, spec.num_kv_heads, spec.vo_head_dim, generator=generator).to(dtype)
        ends = np.cumsum(counts).tolist()
        return cls(
            q=torch.randn(tokens, spec.num_qo_heads, spec.head_dim, generator=generator).to(dtype),
            k=k,
            v=k[..., : spec.vo_head_dim] if spec.is_mla else v,
            rows=[slice(end - count, end) for end, count in zip(ends, counts, strict=True)],
            tree_masks=[_tree(count, generator) for count in counts] if spec.tree_mask else None,
        )


def _tree(num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """A random tree in which each token sees its ancestors and itself: [num_tokens, num_tokens], bool."""
    mask = torch.eye(num_tokens, dtype=torch.bool)
    for token in range(1, num_tokens):
        parent = int(torch.randint(-1, token, (1,), generator=generator))
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def _run(
    rt: AttentionRuntime, step: _Step, batch: Batch, sinks: torch.Tensor | None, slopes: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Output, and LSE where there is one, on the CPU.

    The inputs are strided views, as fused projections give them; their gaps hold NaN.
    """
    spec, device = rt.layer_specs[0], rt.device
    gapped = [torch.cat([x, torch.full_like(x, float("nan"))], dim=1).to(device) for x in (step.q, step.k, step.v)]
    q, k, v = (x[:, : x.shape[1] // 2] for x in gapped)
    result = rt.run(
        0,
        q,
        k[:, 0] if spec.is_mla else k,
        None if spec.is_mla else v,
        rt.plan(batch),
        sinks=None if sinks is None else sinks.to(device),
        alibi_slopes=None if slopes is None else slopes.to(device),
    )
    return tuple(part.cpu() for part in result) if spec.return_lse else (result.cpu(),)


def _compare_alone(
    backend: type[AttentionBackend],
    case: Case,
    platform: Platform,
    seed: int,
    steps: list[_Step],
    got: list[tuple[torch.Tensor, ...]],
    per_head: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Result:
    """Drives each sequence by itself through the same steps, on other pages: every bit must be as in the batch."""
    for i in range(len(case.steps[0])):
        rt = build_runtime(backend, case, platform, seed + 1 + i)
        _set_scales(rt, case)
        seqs = rt.new_sequences(1)
        for number, (step, together) in enumerate(zip(steps, got, strict=True)):
            rows = step.rows[i]
            masks = None if step.tree_masks is None else [step.tree_masks[i]]
            alone = _Step(
                q=step.q[rows],
                k=step.k[rows],
                v=step.v[rows],
                rows=[slice(0, rows.stop - rows.start)],
                tree_masks=masks,
            )
            batch = rt.extend(seqs, [rows.stop - rows.start], tree_masks=masks)
            for mine, ours in zip(_run(rt, alone, batch, *per_head), together, strict=True):
                if not torch.equal(mine, ours[rows]):
                    failure = f"sequence {i} depends on its batch-mates in step {number}, and deterministic is declared"
                    return Result(case=case, error=float("inf"), allowed=1.0, failure=failure)
    return Result(case=case, error=0.0, allowed=1.0, failure=None)


def _compare(case: Case, name: str, got: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> Result:
    """got: output or LSE of all tokens. exact: in float64. rounded: of `plain_attention`."""

    def failed(text: str) -> Result:
        return Result(case=case, error=float("inf"), allowed=1.0, failure=f"{name} {text}")

    if got.shape != exact.shape:
        return failed(f"is {list(got.shape)}, not {list(exact.shape)}")
    if got.isnan().any():
        return failed("is NaN somewhere")
    unseen = exact.isneginf()
    if not torch.equal(got.isneginf(), unseen):
        return failed("is not -inf where nothing is seen, or is where something is")
    unit = torch.finfo(torch.float32 if name == "LSE" else got.dtype).eps
    got, exact, rounded = (x.double().masked_fill(unseen, 0.0) for x in (got, exact, rounded))
    allowed = (2 * (rounded - exact).abs().max() + unit * exact.abs().amax(dim=-1, keepdim=True)).expand_as(got)
    error = (got - exact).abs()
    place = int((error / allowed).argmax())
    at_error, at_allowed = float(error.flatten()[place]), float(allowed.flatten()[place])
    failure = None
    if at_error > at_allowed:
        failure = f"{name} is off by {at_error:.3g} against float64, {at_allowed:.3g} allowed"
    return Result(case=case, error=at_error, allowed=at_allowed, failure=failure)

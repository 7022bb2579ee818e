"""Both layers of an engine in one device graph, with static inputs, into which each step's values are copied."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.testing.graphs.capture import capture
from anyattn.testing.graphs.engine import Engine, Results, Work

_ANY_POSITION = 20
"""What tokens of padding are said to see, beside what no sequence has: some token of many."""


class Graph:
    """Both layers' `run`, captured once for all steps that fit."""

    def __init__(
        self,
        engine: Engine,
        num_seqs: int,
        num_tokens: int | None,
        max_kv_len: int,
        *,
        captured_with: Work | None = None,
    ) -> None:
        """num_seqs, num_tokens, max_kv_len: as for `init_graph`. captured_with: a step that it holds from before."""
        self.engine = engine
        rt, spec = engine.rt, engine.spec
        self.plan = rt.init_graph(num_seqs, num_tokens=num_tokens, max_kv_len=max_kv_len)
        rows, dtype = self.plan.batch.num_tokens, getattr(torch, spec.dtype)

        def part_of_fused(heads: int, dim: int) -> torch.Tensor:
            fused = torch.full((rows, 2 * heads, dim), float("nan"), dtype=dtype, device=rt.device)
            return fused[:, :heads]

        self.inputs = [
            (
                part_of_fused(spec.num_qo_heads, spec.head_dim),
                part_of_fused(spec.num_kv_heads, spec.head_dim),
                part_of_fused(spec.num_kv_heads, spec.vo_head_dim),
            )
            for _ in engine.per_head
        ]
        self._per_head = [
            {
                name: None if values is None else values.to(rt.device)
                for name, values in (("sinks", of.sinks), ("alibi_slopes", of.alibi_slopes))
            }
            for of in engine.per_head
        ]
        self._indices = [
            None if spec.topk is None else torch.full((rows, spec.topk), -1, dtype=torch.int32, device=rt.device)
            for _ in engine.per_head
        ]
        if captured_with is not None:
            self.load(captured_with)
        self._results, self.replay = capture(self._run, rt.device)

    def _run(self) -> list[Any]:
        spec = self.engine.spec
        return [
            self.engine.rt.run(
                layer,
                q,
                k[:, 0] if spec.is_mla else k,
                None if spec.is_mla else v,
                self.plan,
                indices=self._indices[layer],
                **self._per_head[layer],
            )
            for layer, (q, k, v) in enumerate(self.inputs)
        ]

    def refresh(self, work: Work) -> None:
        """The step's lengths and pages."""
        self.engine.rt.refresh_graph(self.plan, work.batch)

    def load(self, work: Work) -> None:
        """The step and its inputs; rows of padding are NaN."""
        self.refresh(work)
        self.copy_inputs(work)

    def copy_inputs(self, work: Work) -> None:
        """The step's inputs; rows of padding are NaN, and choose keys as if they were tokens."""
        tokens = work.batch.num_tokens
        for inputs, step in zip(self.inputs, work.steps, strict=True):
            for static, values in zip(inputs, (step.q, step.k, step.v), strict=True):
                static[:tokens].copy_(values)
                static[tokens:].fill_(float("nan"))
        for indices, step in zip(self._indices, work.steps, strict=True):
            if indices is not None and (chosen := step.indices(work.batch.host.prefix_lens.tolist())) is not None:
                indices[:tokens].copy_(chosen)
                indices[tokens:, ::2].fill_(_ANY_POSITION)
                indices[tokens:, 1::2].fill_(torch.iinfo(indices.dtype).max)

    def results(self, work: Work) -> Results:
        """What the last replay gave each layer, without padding, on the CPU."""
        tokens = work.batch.num_tokens
        each = [result if self.engine.spec.return_lse else (result,) for result in self._results]
        return [tuple(part[:tokens].to("cpu", copy=True) for part in result) for result in each]

    def step(self, name: str, work: Work) -> None:
        """A step from the engine's side: refresh, inputs, replay. Judged under the name."""
        self.load(work)
        self.again(name, work)

    def again(self, name: str, work: Work) -> None:
        """A replay of the step that the graph holds. Judged under the name."""
        self.replay()
        self.engine.judge(name, work, self.results(work))

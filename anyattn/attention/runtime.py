"""The object an engine drives: sequences, steps and layers over one paged KV cache on one device."""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anyattn.attention.batch import Batch, checked_tree_masks
from anyattn.attention.graph import GraphBatch, GraphSizes
from anyattn.attention.mla import MLAPath, MLAStep, UpProjections
from anyattn.attention.warmup import Warmed, Warmup, WarmupStep, warmup_steps
from anyattn.errors import ContractError, OutOfPagesError
from anyattn.lazy import lazy_import
from anyattn.types import GraphLevel, dtype_name

if TYPE_CHECKING:
    import torch

    from anyattn.attention.hybrid import HybridBackend, PlannedStep
    from anyattn.attention.mla import Expansion
    from anyattn.attention.selection import Selection
    from anyattn.attention.spec import AttentionSpec
    from anyattn.mem_cache.base import KVPool
    from anyattn.mem_cache.page_table import PageTable
else:
    torch = lazy_import("torch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """One step, planned: made by `AttentionRuntime.plan`, used by `run` for every layer.

    batch: as the full layers' pages serve it; `batch.windows` as those of layers with windows do.
    steps: for each distinct spec of the layers, None where all of them have up-projections; none at all for a batch
        without tokens, which needs no kernel.
    mla: likewise, for the layers that `bind_mla` gave up-projections; None where there are none.
    slots: of the new tokens in each pool.
    graph: where the plan is one of `AttentionRuntime.init_graph`, the tensors that stay.
    """

    runtime: AttentionRuntime
    batch: Batch
    steps: tuple[PlannedStep | None, ...]
    mla: tuple[MLAStep | None, ...]
    slots: tuple[torch.Tensor, ...]
    num_frees: int
    graph: GraphBatch | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class _Layer:
    """What `run` has to know of a layer.

    is_plain: whether `run` takes and returns nothing beside q, k, v and out.
    group: number of its spec. pool, place: where its pages are; number: the pool's. bound: its up-projections.
    q, k, v: the shapes that one token of each has; MLA has no v, or one beside a k of latents alone, which is looked at
        as the rare case that it is.
    """

    spec: AttentionSpec
    is_mla: bool
    is_plain: bool
    group: int
    number: int
    pool: KVPool
    place: int
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    out: tuple[int, ...]
    kind: tuple[torch.dtype, torch.device, torch.layout]
    bound: UpProjections | None = None
    num_tokens: int = -1
    wanted: tuple[tuple[Any, ...], ...] = ()

    def takes(self, num_tokens: int, q: Any, k: Any, v: Any) -> bool:
        """Whether these are plainly what the layer wants; `AttentionRuntime._check_inputs` says what is not, if any."""
        if num_tokens != self.num_tokens:
            self.num_tokens = num_tokens
            self.wanted = tuple(((num_tokens, *shape), *self.kind) for shape in (self.q, self.k, self.v, self.out))
        of_q, of_k, of_v, _ = self.wanted
        try:
            if _facts(q) != of_q or _facts(k) != of_k or (v is not None if self.is_mla else _facts(v) != of_v):
                return False
        except AttributeError:
            return False
        return not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v) if x is not None)

    def writes(self, out: Any) -> bool:
        """Whether a result can be written there; asked for behind `takes`, for as many tokens."""
        try:
            return _facts(out) == self.wanted[3] and out.is_contiguous() and not out.requires_grad
        except AttributeError:
            return False


_facts = operator.attrgetter("shape", "dtype", "device", "layout")
"""Of a tensor, in one call, as every layer of every step asks for them."""

_MOST_SPARSE_SLOTS = (1 << 31) - 1
"""Slots of a pool, those of the null page included, that sparse attention can name."""


class AttentionRuntime:
    """Made by `anyattn.create_runtime`.

    layer_specs: one for each layer; all of them have the same KV heads.
    selections: what was chosen for each distinct spec.
    pools: where the KV bytes are; the first is that of the layers that keep all of a sequence's pages, the others
        those of `table.windows`. places: for each layer its pool's number and its own number there.
    table: which pages each sequence owns.
    """

    def __init__(
        self,
        layer_specs: Sequence[AttentionSpec],
        selections: Mapping[AttentionSpec, Selection],
        backends: Mapping[AttentionSpec, HybridBackend],
        pools: Sequence[KVPool],
        table: PageTable,
        places: Sequence[tuple[int, int]],
        expansions: Mapping[AttentionSpec, Expansion] | None = None,
    ) -> None:
        """expansions: of MLA specs, what attends where keys and values are expanded from the latents."""
        self.layer_specs = tuple(layer_specs)
        self.selections = tuple(selections.values())
        self.pools = tuple(pools)
        self.places = tuple(places)
        self.table = table
        self.device = torch.device(self.selection.platform.torch_device)
        self._backends = tuple(backends[spec] for spec in selections)
        self._dtype: torch.dtype = getattr(torch, self.layer_specs[0].dtype)
        groups = {spec: group for group, spec in enumerate(selections)}
        self._layers = [self._new_layer(number, groups[spec]) for number, spec in enumerate(self.layer_specs)]
        self._pool_of_group = [self.places[self.layer_specs.index(spec)][0] for spec in selections]
        self.expansions = dict(expansions or {})
        self._mla_paths = [
            MLAPath(spec, backends[spec], self.expansions.get(spec), self.device) if spec.is_mla else None
            for spec in selections
        ]
        self._device_type = self.device.type
        num_slots = (max(pool.num_pages for pool in self.pools) + 1) * table.page_size
        if num_slots > _MOST_SPARSE_SLOTS and any(spec.topk for spec in self.layer_specs):
            raise ContractError(
                f"sparse attention names slots in int32, and {num_slots} of them are more than that holds: "
                f"give num_pages={_MOST_SPARSE_SLOTS // table.page_size - 1} or fewer."
            )
        self._zeroes_tails = [
            table.page_size > 1
            and any(
                backend.needs_finite_tails
                for backend, own in zip(self._backends, self._pool_of_group, strict=True)
                if own == number
            )
            for number in range(len(self.pools))
        ]
        for pool, zeroes in zip(self.pools, self._zeroes_tails, strict=True):
            if zeroes:
                _ = pool.tail_zeroer  # now, as it compiles, and copies its table to the device

    def _new_layer(self, number: int, group: int) -> _Layer:
        spec = self.layer_specs[number]
        pool, place = self.places[number]
        return _Layer(
            spec=spec,
            is_mla=spec.is_mla,
            is_plain=not (spec.sinks or spec.alibi or spec.topk or spec.return_lse),
            group=group,
            number=pool,
            pool=self.pools[pool],
            place=place,
            q=(spec.num_qo_heads, spec.head_dim),
            k=(spec.head_dim,) if spec.is_mla else (spec.num_kv_heads, spec.head_dim),
            v=() if spec.is_mla else (spec.num_kv_heads, spec.vo_head_dim),
            out=(spec.num_qo_heads, spec.vo_head_dim),
            kind=(self._dtype, self.device, torch.strided),
        )

    @property
    def selection(self) -> Selection:
        """What was chosen for the first layer; `selections` has every distinct spec's."""
        return self.selections[0]

    def new_sequences(self, count: int) -> list[int]:
        """Handles of `count` new, empty sequences."""
        return self.table.new_sequences(count)

    def extend(
        self,
        seqs: Sequence[int],
        num_new_tokens: Sequence[int],
        *,
        tree_masks: Sequence[torch.Tensor | None] | None = None,
    ) -> Batch:
        """Reserves slots for new tokens, which may be none, and builds the step's metadata. Decode extends by one.

        A partial last page that other sequences share is copied first.

        tree_masks: for each sequence None or [num_new, num_new], bool: row i sees new token j; needs
            `spec.tree_mask`.

        Raises ContractError for freed or repeated sequences, negative counts and masks that do not fit,
        OutOfPagesError when pages are short; nothing has changed then.
        """
        checked = None
        if tree_masks is not None:
            if not self._has_trees:
                raise ContractError("tree_masks need a runtime whose spec has tree_mask=True.")
            checked = checked_tree_masks(tree_masks, num_new_tokens, self.device)
        view = self.table.extend(seqs, num_new_tokens)
        for copy in view.copies:
            self.pools[copy.pool].copy_pages(copy.sources, copy.targets)
        if view.tails is not None:
            for number, zeroes in enumerate(self._zeroes_tails):
                if zeroes:
                    self.pools[number].zero_tails(*view.tail_pages(number))
        return Batch.from_view(view, view.tensors(), checked)

    def plan(self, batch: Batch) -> Plan:
        """The step's host work, once for all layers.

        Raises ContractError when a sequence of the batch has been freed or truncated, or it is another runtime's.
        """
        self._check_batch("plan", batch)
        steps: list[PlannedStep | None] = []
        mla: list[MLAStep | None] = []
        for group, pool in enumerate(self._pool_of_group if batch.num_tokens else ()):
            bound = [layer.bound is not None for layer in self._layers if layer.group == group]
            path, there = self._mla_paths[group], batch.of_pool(pool)
            steps.append(None if all(bound) else self._backends[group].plan(there))
            mla.append(path.plan(there) if path is not None and any(bound) else None)
        return self._planned(batch, steps, mla)

    def _planned(
        self,
        batch: Batch,
        steps: Sequence[PlannedStep | None],
        mla: Sequence[MLAStep | None],
        graph: GraphBatch | None = None,
    ) -> Plan:
        return Plan(
            runtime=self,
            batch=batch,
            steps=tuple(steps),
            mla=tuple(mla),
            slots=tuple(batch.of_pool(number).out_slots for number in range(len(self.pools))),
            num_frees=self.table.num_frees,
            graph=graph,
        )

    def init_graph(self, num_seqs: int, *, num_tokens: int | None = None, max_kv_len: int) -> Plan:
        """A plan to capture `run` with in a device graph, for every layer; several may live beside each other.

        num_seqs, num_tokens: of the largest step, padding included. Without num_tokens, a graph of decode steps.
        max_kv_len: most tokens of a sequence, the new ones included.

        It holds a step without sequences, which may be run to warm up. `refresh_graph` puts others in its place, and
        the graph is then replayed; tokens of padding get any result, and store nothing. `run` takes `num_tokens` rows,
        in tensors that stay where they are.

        Raises ContractError where the spec's graph level allows no such step.
        """
        graph = self._new_graph(num_seqs, num_tokens, max_kv_len)
        steps = [
            backend.init_graph(graph.batch.of_pool(pool), graph.sizes.level)
            for backend, pool in zip(self._backends, self._pool_of_group, strict=True)
        ]
        return self._planned(graph.batch, steps, [MLAStep(absorbed=step) for step in steps], graph)

    def _new_graph(self, num_seqs: int, num_tokens: int | None, max_kv_len: int) -> GraphBatch:
        level = min(each.graph for each in self.layer_specs)
        sizes = GraphSizes(
            level=level if num_tokens is not None else min(level, GraphLevel.DECODE),
            num_seqs=num_seqs,
            num_tokens=num_seqs if num_tokens is None else num_tokens,
            max_kv_len=max_kv_len,
            tree_mask=self._has_trees and num_tokens not in (None, num_seqs),
        )
        return GraphBatch(self.table, sizes)

    @property
    def _has_trees(self) -> bool:
        return all(each.tree_mask for each in self.layer_specs)

    def refresh_graph(self, plan: Plan, batch: Batch) -> None:
        """Puts a step into a plan of `init_graph`, in place: replay the graph then.

        batch: what `extend` returned last. Its first token is the graph's first; the others follow, padding last.

        Does not wait for the device: call it on the stream of the replays. A replay stores at the slots of the step
        that was put in last, so that each wants a refresh before it once sequences have changed.

        Raises ContractError, and changes nothing, for a step that the graph does not serve, or that is not the last.
        After an error that a backend raises, the graph wants another refresh before it is replayed.
        """
        if not isinstance(plan, Plan) or plan.runtime is not self or plan.graph is None:
            raise ContractError("refresh_graph takes a plan that this runtime's init_graph returned.")
        self._check_batch("refresh_graph", batch)
        now = plan.graph.refresh(batch)
        for step, pool in zip(plan.steps, self._pool_of_group, strict=True):
            if step is not None:  # a graph's are all there
                step.backend.refresh_graph(step.plan, now.of_pool(pool))

    def _check_batch(self, method: str, batch: Batch) -> None:
        if not isinstance(batch, Batch) or batch.host.table is not self.table:
            raise ContractError(f"{method} takes what this runtime's extend returned, not a batch of another runtime.")
        self.table.require_whole(batch.host)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        plan: Plan,
        *,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Stores one layer's new keys and values, then attends.

        q: [num_tokens, num_qo_heads, head_dim]; with `bind_mla`, [num_tokens, num_qo_heads, qk_nope + qk_rope].
        k: [num_tokens, num_kv_heads, head_dim]; for MLA [num_tokens, kv_lora_rank + qk_rope_head_dim].
        v: [num_tokens, num_kv_heads, v_head_dim]; for MLA None, or the rope part [num_tokens, qk_rope_head_dim] beside
            a k that is the latent part alone, [num_tokens, kv_lora_rank].
        sinks, alibi_slopes: [num_qo_heads], when and only when the spec asks for them. Sinks that a model
            has in bfloat16 are best passed so: some kernels take no others.
        indices: [num_tokens, topk], int32, when and only when the spec has a topk: for each token positions in its own
            sequence, none of them twice, in any order. A token sees those of [0, its own position]; others, as -1,
            stand for none, anywhere in a row. A row of none gives 0, and an LSE of -inf.
        out: where to write, [num_tokens, num_qo_heads, vo_head_dim], contiguous, in memory that is not q's, k's or v's;
            a new tensor otherwise.

        q, k and v may have any strides. Returns the output, and with spec.return_lse a pair of it and the LSE,
        [num_tokens, num_qo_heads], float32, natural log.

        Raises ContractError before anything is written when a shape, dtype or device is not that of the spec, or a
        sequence of the plan has been freed or truncated.
        """
        if torch.is_autocast_enabled(self._device_type):  # it would lower the precision that the spec asks for
            with torch.autocast(self._device_type, enabled=False):
                return self.run(layer, q, k, v, plan, sinks=sinks, alibi_slopes=alibi_slopes, indices=indices, out=out)
        if (
            type(layer) is not int
            or not 0 <= layer < len(self._layers)
            or type(plan) is not Plan
            or plan.runtime is not self
            or plan.num_frees != self.table.num_frees
        ):
            self._check_plan(layer, plan)
        here, tokens = self._layers[layer], plan.batch.num_tokens
        if not here.takes(tokens, q, k, v):
            self._check_inputs(here, q, k, v, tokens)
        if out is not None and not here.writes(out):
            _check_tensor("out", out, (tokens, *here.out), self._dtype, self.device)
            raise ContractError("out must be contiguous and without gradient.")
        more: dict[str, torch.Tensor | None] = {}
        if not (here.is_plain and sinks is None and alibi_slopes is None and indices is None):
            more = self._checked_more(here, plan, sinks, alibi_slopes, indices)
        if not tokens:
            out = q.new_empty((0, *here.out)) if out is None else out
            return (out, q.new_empty((0, here.q[0]), dtype=torch.float32)) if here.spec.return_lse else out
        bound = here.bound
        step: Any = (plan.steps if bound is None else plan.mla)[here.group]
        if step is None:
            raise ContractError(f"layer {layer} was given up-projections after this step was planned: plan it again.")
        here.pool.store(here.place, k, v, plan.slots[here.number])
        kv = here.pool.layers[here.place]
        out, lse = step.run(q, kv, out, **more) if bound is None else step.run(q, kv, bound, out, **more)
        if here.is_plain or not here.spec.return_lse:
            return out
        if lse is None or lse.shape != (tokens, here.q[0]):
            raise ContractError(f"the backend gave no LSE of {[tokens, here.q[0]]}.")
        return out, lse

    def _checked_more(
        self,
        here: _Layer,
        plan: Plan,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        indices: torch.Tensor | None,
    ) -> dict[str, torch.Tensor | None]:
        """What a backend's `run` takes besides, by name. Raises ContractError for what the spec does not ask for."""
        spec, batch = here.spec, plan.batch
        more: dict[str, torch.Tensor | None] = {}
        if sinks is not None or spec.sinks:
            more["sinks"] = _per_head("sinks", sinks, spec.sinks, spec, self.device)
        if alibi_slopes is not None or spec.alibi:
            more["alibi_slopes"] = _per_head("alibi_slopes", alibi_slopes, spec.alibi, spec, self.device)
        if indices is not None or spec.topk is not None:
            _check_indices(indices, spec, batch.num_tokens, self.device)
            if batch.num_tokens and indices is not None:
                more["indices"] = batch.of_pool(here.number).slots_of(indices)
        return more

    def bind_mla(self, layer: int, w_uk: torch.Tensor, w_uv: torch.Tensor) -> None:
        """Gives one MLA layer its up-projections; `run` then takes q before absorption and returns heads of v_head_dim.

        Whether they are absorbed into q and the output, or keys and values are expanded from the latents, is chosen
        for each sequence of a step by its length; see `attention/mla.py`. Graphs absorb.

        w_uk: [num_qo_heads, qk_nope_head_dim, kv_lora_rank]. w_uv: [num_qo_heads, kv_lora_rank, v_head_dim].
        Both spec.dtype. With a layer's kv_b_proj weight as [num_qo_heads, qk_nope + v, kv_lora_rank], w_uk is its
        first qk_nope rows of each head, w_uv the transpose of the others.
        """
        self._check_layer(layer)
        spec = self.layer_specs[layer]
        if spec.qk_nope_head_dim is None or spec.v_head_dim is None:
            raise ContractError(
                "bind_mla needs the sizes before absorption: AttentionSpec.mla(..., qk_nope_head_dim=, v_head_dim=)."
            )
        if spec.deterministic:
            raise ContractError(
                "deterministic does not cover up-projections, whose products round by batch size: absorb q yourself."
            )
        rank = spec.vo_head_dim
        _check_tensor("w_uk", w_uk, (spec.num_qo_heads, spec.qk_nope_head_dim, rank), self._dtype, self.device)
        _check_tensor("w_uv", w_uv, (spec.num_qo_heads, rank, spec.v_head_dim), self._dtype, self.device)
        here = self._layers[layer]
        here.bound = UpProjections(w_uk=w_uk.detach(), w_uv=w_uv.detach())
        here.q, here.num_tokens = (spec.num_qo_heads, spec.qk_nope_head_dim + spec.head_dim - rank), -1
        here.out = (spec.num_qo_heads, spec.v_head_dim)

    def fork(self, seq: int, count: int = 1) -> list[int]:
        """New sequences that begin as `seq` is now, and share its pages; a partial last page is copied when written."""
        return self.table.fork(seq, count)

    def truncate(self, seqs: Sequence[int], lengths: Sequence[int]) -> None:
        """Shortens sequences, as after rejected speculation; see `PageTable.truncate`."""
        self.table.truncate(seqs, lengths)

    def set_scales(self, layer: int, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor) -> None:
        """Sets one layer's fp8 scales before anything of it is stored; see `KVPool.set_scales`."""
        self._check_layer(layer)
        per_head = any(isinstance(scale, torch.Tensor) and scale.numel() > 1 for scale in (k_scale, v_scale))
        if per_head and not self.layer_specs[layer].kv_scale_per_head:
            raise ContractError("scales for each KV head need a runtime whose spec has kv_scale_per_head=True.")
        number, place = self.places[layer]
        self.pools[number].set_scales(place, k_scale, v_scale)

    def free(self, seqs: Sequence[int]) -> None:
        """Ends sequences and gives their pages back; their handles and the plans that hold them are then refused."""
        self.table.free(seqs)

    def warmup(self) -> Warmup:
        """Has everything compiled that kernels compile at their first use, so that no request has to wait for it.

        Runs a layer of each distinct spec, or where some have up-projections (`bind_mla`) and others none, one of
        either, through the steps that an engine makes: prefill, decode, mixed, several tokens each, tree masks where
        all specs have them, and graphs' steps where they ask for these; with each backend that such a step goes to at
        some load. All of it is zeros, in sequences of its own on free pages, which are free again when it ends, by an
        error too; other sequences, and pages that others hold, are as before. Where pages are short, steps are made
        smaller or left out: `warmup_pages` (attention/warmup.py) says how many do for all.

        Waits for the device. Call it between steps: a batch of before is not the table's last any more, which
        `refresh_graph` wants.

        Raises OutOfPagesError, and changes nothing, where no page is free; and what a backend raises.
        """
        start = time.perf_counter()
        steps = self._warmup_steps()
        seen: dict[tuple[int, str], dict[str, None]] = {}
        seqs = self.new_sequences(len(steps[0].counts))
        try:
            for step in steps:
                for layer, name, kind in self._warm(step, seqs):
                    seen.setdefault((layer, name), {})[kind] = None
                self.truncate(seqs, [step.keep] * len(seqs))
        finally:
            self.free(seqs)
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        warmed = [Warmed(layer=layer, backend=name, steps=tuple(kinds)) for (layer, name), kinds in seen.items()]
        return Warmup(seconds=time.perf_counter() - start, warmed=tuple(warmed))

    def _warmup_steps(self) -> list[WarmupStep]:
        """Raises OutOfPagesError where not even the smallest fits."""
        pages = self.table.allocator
        if not pages.num_free_pages:
            raise OutOfPagesError(1, 0, pages.num_pages)
        for window in self.table.windows:
            window.refuse_shortage(1)
        free = min(each.num_free_pages for each in (pages, *(window.allocator for window in self.table.windows)))
        level = min(each.graph for each in self.layer_specs)
        return warmup_steps(free, self.table.page_size, graph=level, trees=self._has_trees)

    def _warm(self, step: WarmupStep, seqs: Sequence[int]) -> Iterator[tuple[int, str, str]]:
        """Extends the sequences and runs the step, once for each layer and each way to serve it.

        Yields for each run the layer, the backend's name and what kind of step it was.
        """
        masks = None
        if step.has_trees:
            masks = [torch.ones(count, count, dtype=torch.bool).tril() for count in step.counts]
        batch, graph = self.extend(seqs, step.counts, tree_masks=masks), None
        if step.is_graph:
            num_tokens = None if max(step.counts) == 1 else batch.num_tokens
            graph = self._new_graph(batch.num_seqs, num_tokens, batch.max_kv_len)
        whole = batch if graph is None else graph.batch
        layers: dict[tuple[int, bool], int] = {}  # the first of each distinct spec, with up-projections and without
        for layer, here in enumerate(self._layers):
            layers.setdefault((here.group, here.bound is not None), layer)
        for layer in layers.values():
            here = self._layers[layer]
            for name, kind, planned, mla in self._ways(here, whole, step, graph):
                steps: list[PlannedStep | None] = [None] * len(self._backends)
                parts: list[MLAStep | None] = [None] * len(self._backends)
                steps[here.group], parts[here.group] = planned, mla
                plan = self._planned(whole, steps, parts, graph)
                if graph is not None:
                    self.refresh_graph(plan, batch)
                self.run(layer, plan=plan, **self._zeros(here, whole.num_tokens))
                yield layer, name, kind

    def _ways(
        self, here: _Layer, batch: Batch, step: WarmupStep, graph: GraphBatch | None
    ) -> Iterator[tuple[str, str, PlannedStep | None, MLAStep]]:
        """All that may become of a step in one layer: whose it is, of what kind, and planned as `Plan` holds it."""
        there, backend = batch.of_pool(here.number), self._backends[here.group]
        every = backend.plan_all(there) if graph is None else backend.init_graph_all(there, graph.sizes.level)
        for name, planned in every.items():
            yield name, step.kind, planned, MLAStep(absorbed=planned)
        path = self._mla_paths[here.group]
        if path is not None and here.bound is not None and step.has_prompt:
            expanded = path.plan_expanded(there)
            if expanded is not None:
                names = dict.fromkeys(self.expansions[here.spec].names)
                yield " and ".join(names), "expanded", None, expanded

    def _zeros(self, here: _Layer, tokens: int) -> dict[str, Any]:
        """What `run` takes for so many tokens of a layer, but the plan."""
        spec = here.spec
        more: dict[str, Any] = {}
        if spec.sinks:
            sinks_dtype = self._dtype if self._dtype == torch.bfloat16 else torch.float32
            more["sinks"] = torch.zeros(spec.num_qo_heads, dtype=sinks_dtype, device=self.device)
        if spec.alibi:
            more["alibi_slopes"] = torch.zeros(spec.num_qo_heads, dtype=torch.float32, device=self.device)
        if spec.topk is not None:
            more["indices"] = torch.arange(spec.topk, dtype=torch.int32, device=self.device).repeat(tokens, 1)
        for name, shape in (("q", here.q), ("k", here.k), ("v", here.v)):
            more[name] = torch.zeros(tokens, *shape, dtype=self._dtype, device=self.device)
        return more | {"v": None} if here.is_mla else more

    def explain(self) -> str:
        """What was chosen for each distinct spec, and why not the others."""
        parts = [selection.explain() for selection in self.selections]
        for spec, expansion in self.expansions.items():
            names = " and ".join(dict.fromkeys(expansion.names))
            parts.append(f"[{spec}] with up-projections: long prompts have keys and values expanded, for {names}")
        return "\n\n".join(parts)

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int) or not 0 <= layer < len(self.layer_specs):
            raise ContractError(f"layer must be 0 to {len(self.layer_specs) - 1}, not {layer}.")

    def _check_plan(self, layer: int, plan: Plan) -> None:
        self._check_layer(layer)
        if not isinstance(plan, Plan):
            raise ContractError(f"plan must be what runtime.plan(batch) returned, not {type(plan).__name__}.")
        if plan.runtime is not self:
            raise ContractError("the plan is another runtime's: plan the batch with this one.")
        if plan.num_frees != self.table.num_frees:
            self.table.require_whole(plan.batch.host if plan.graph is None else plan.graph.host)

    def _check_inputs(
        self, here: _Layer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, tokens: int
    ) -> None:
        spec = here.spec
        _check_tensor("q", q, (tokens, *here.q), self._dtype, self.device)
        if spec.is_mla:
            rope = (tokens, spec.head_dim - spec.vo_head_dim)
            if v is not None and (not isinstance(v, torch.Tensor) or v.shape != rope):
                raise ContractError(
                    f"v must be None for MLA, as the values are the latent part of k, or k's rope part {list(rope)}."
                )
            _check_tensor("k", k, (tokens, spec.head_dim if v is None else spec.vo_head_dim), self._dtype, self.device)
            if v is not None:
                _check_tensor("v", v, rope, self._dtype, self.device)
        else:
            _check_tensor("k", k, (tokens, *here.k), self._dtype, self.device)
            _check_tensor("v", v, (tokens, *here.v), self._dtype, self.device)
        if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or (v is not None and v.requires_grad)):
            raise ContractError("anyattn computes no gradients: call run under torch.no_grad().")


def _check_tensor(
    name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        kind = f"{tensor.layout} tensor" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ContractError(f"{name} must be a dense tensor {list(shape)}, not a {kind}.")
    if tensor.shape != shape:
        raise ContractError(f"{name} must be {list(shape)}, not {list(tensor.shape)}.")
    if tensor.dtype != dtype:
        raise ContractError(f"{name} must be {dtype_name(dtype)}, not {dtype_name(tensor.dtype)}.")
    if tensor.device != device:
        raise ContractError(f"{name} must be on {device}, not on {tensor.device}.")


def _check_indices(indices: torch.Tensor | None, spec: AttentionSpec, tokens: int, device: torch.device) -> None:
    if spec.topk is None:
        raise ContractError("indices were passed to run, and the spec has no topk.")
    if indices is None:
        raise ContractError(f"the spec has topk={spec.topk}: pass the positions that each token sees to run, indices=.")
    _check_tensor("indices", indices, (tokens, spec.topk), torch.int32, device)


def _per_head(
    name: str, values: torch.Tensor | None, wanted: bool, spec: AttentionSpec, device: torch.device
) -> torch.Tensor | None:
    """sinks or ALiBi slopes as backends take them: float32, and sinks as bfloat16 where that is what they are."""
    if values is None and not wanted:
        return None
    if values is None:
        raise ContractError(f"the spec asks for {name}: pass one number for each of {spec.num_qo_heads} heads to run.")
    if not wanted:
        raise ContractError(f"{name} were passed to run, and the spec does not ask for them.")
    if not isinstance(values, torch.Tensor) or values.shape != (spec.num_qo_heads,) or not values.is_floating_point():
        raise ContractError(f"{name} must be a tensor of [{spec.num_qo_heads}] numbers.")
    if values.device != device:
        raise ContractError(f"{name} must be on {device}, not on {values.device}.")
    as_given = values.dtype == torch.float32 or (name == "sinks" and values.dtype == torch.bfloat16)
    return values.detach() if as_given else values.detach().float()

"""Many prompts through one runtime: continuous batching with greedy decoding."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from anyattn.attention.runtime import AttentionRuntime
from anyattn.errors import ContractError
from anyattn.integrations.transformers.attention import PAGED_NAME, STEP_KEYWORD, plain_tensors
from anyattn.integrations.transformers.decode_graphs import DecodeGraphs
from anyattn.integrations.transformers.packed_step import PackedStep
from anyattn.integrations.transformers.probe import attention_implementation, probe_layout
from anyattn.integrations.transformers.scheduler import Request, Scheduler, requests_for
from anyattn.mem_cache.spec import CacheGroup, pages_for_memory, window_pages
from anyattn.types import GraphLevel
from anyattn.wiring import create_runtime

FinishReason = Literal["stop", "length"]

_ACCELERATOR_SHARE = 0.8  # of the free memory of an accelerator: the rest is for activations
_CPU_SHARE = 0.25  # of the free memory of a CPU: the rest is for everything else on the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEvent:
    """A token as it was generated. request: which prompt. finish_reason: set with the request's last token."""

    request: int
    token: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What one prompt gave.

    token_ids: the tokens after the prompt, the one that stopped it included.
    finish_reason: "stop" at one of eos_token_ids, "length" at max_new_tokens.
    """

    token_ids: tuple[int, ...]
    finish_reason: FinishReason


class PagedGenerator:
    """Greedy generation for many prompts over one runtime. Prompts join when pages suffice and leave when they end;
    long ones are computed in chunks beside the others' next tokens.

    runtime: from `create_runtime`, one spec for each attention layer; `runtime.explain()` says what was selected.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_pages: int | None = None,
        page_size: int | None = None,
        backend: str | None = None,
        max_batch_tokens: int = 512,
        max_num_seqs: int = 32,
        max_seq_len: int | None = None,
        decode_graphs: bool = False,
    ) -> None:
        """num_pages: by default what `max_num_seqs` sequences of `max_seq_len` tokens take, and at most 80 % of an
            accelerator's free memory or 25 % of a CPU's.
        page_size, backend: as for `create_runtime`.
        max_batch_tokens: tokens in a step. max_num_seqs: prompts under way at a time, and in a step.
        max_seq_len: tokens of the longest sequence that will be asked for; by default the model's longest.
        decode_graphs: steps in which every prompt has one token run as CUDA graphs, with backends that serve those.

        Raises ContractError when the model cannot be driven so (see `probe_layout`), and what `create_runtime` does.
        """
        sizes = {"max_batch_tokens": max_batch_tokens, "max_num_seqs": max_num_seqs, "max_seq_len": max_seq_len}
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ContractError(f"{name} must be at least 1, not {value}.")
        self._model = model
        self._layout = probe_layout(model, cached=False)
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            raise ContractError(f"{type(model).__name__} takes no position_ids, which packed steps need.")
        self._keeps_logits = "logits_to_keep" in parameters
        self._max_batch_tokens = max_batch_tokens
        self._max_num_seqs = min(max_num_seqs, max_batch_tokens)  # so that a step has room for every decode
        self._max_seq_len = min(max_seq_len or self._layout.max_positions, self._layout.max_positions)
        self._streaming = False
        level = GraphLevel.DECODE if decode_graphs else GraphLevel.NEVER
        specs = tuple(spec.replace(graph=level) for spec in self._layout.specs)

        def runtime_of(pages: int, pages_of_windows: int) -> AttentionRuntime:
            with plain_tensors():
                return create_runtime(
                    specs,
                    num_pages=pages,
                    num_window_pages=pages_of_windows if any(s.sliding_window for s in specs) else None,
                    page_size=page_size,
                    backend=backend,
                    device=str(model.device),
                )

        # The size of a page is known only when backends are selected, so one page is asked for first.
        self.runtime = runtime_of(1, 1)
        wanted = self._num_pages(self.runtime, num_pages)
        del self.runtime
        self.runtime = runtime_of(*wanted)
        self._graphs = None
        if decode_graphs:
            self._graphs = DecodeGraphs(
                model,
                self._layout,
                self.runtime,
                step_keyword=STEP_KEYWORD,
                max_num_seqs=self._max_num_seqs,
                max_kv_len=self._max_seq_len,
            )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[GenerationResult]:
        """The most likely continuation of each prompt, token by token; results in the order of the prompts.

        prompts: token ids. max_new_tokens: at most, for each.
        eos_token_ids: tokens that end a prompt; by default those of the model's generation config.
        on_token: called with a prompt's index and its next token, as soon as that is known.

        Raises as `stream` does; pages are free again however it ends.
        """
        tokens: list[list[int]] = [[] for _ in prompts]
        reasons: list[FinishReason] = ["length" for _ in prompts]
        for event in self.stream(prompts, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids):
            tokens[event.request].append(event.token)
            reasons[event.request] = event.finish_reason or "length"
            if on_token is not None:
                on_token(event.request, event.token)
        return [
            GenerationResult(token_ids=tuple(ids), finish_reason=reason)
            for ids, reason in zip(tokens, reasons, strict=True)
        ]

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Collection[int] | None = None,
    ) -> Iterator[TokenEvent]:
        """Tokens as they are generated. Until the iterator ends or is closed, the model serves nothing else.

        Raises ContractError before anything starts for prompts that are empty, hold unknown tokens or can never fit.
        """
        requests = requests_for([_token_ids(index, prompt) for index, prompt in enumerate(prompts)], max_new_tokens)
        self._check(requests)
        eos = frozenset(self._default_eos() if eos_token_ids is None else eos_token_ids)
        return self._stream(requests if max_new_tokens else [], eos)

    def _stream(self, requests: list[Request], eos: frozenset[int]) -> Iterator[TokenEvent]:
        scheduler = Scheduler(
            page_size=self.runtime.table.page_size,
            max_batch_tokens=self._max_batch_tokens,
            max_num_seqs=self._max_num_seqs,
        )
        scheduler.waiting.extend(requests)
        if self._streaming:
            raise ContractError("this generator is at work: finish or close its other stream first.")
        self._streaming = True
        try:
            with attention_implementation(self._model, PAGED_NAME):
                while scheduler.waiting or scheduler.running:
                    yield from self._step(scheduler, eos)
        finally:
            self._streaming = False
            self.runtime.free([request.seq for request in requests if request.seq is not None])

    def _step(self, scheduler: Scheduler, eos: frozenset[int]) -> list[TokenEvent]:
        chosen = scheduler.next_step(self.runtime.table.allocator.num_free_pages)
        self._free(chosen.preempted)
        if not chosen.counts:
            raise ContractError("no pages are left: somebody else holds sequences in this generator's runtime.")
        for request in chosen.counts:
            if request.seq is None:
                (request.seq,) = self.runtime.new_sequences(1)
        ready, logits = self._forward(chosen.counts)
        events = []
        for request, token in zip(ready, self._choose(ready, logits), strict=True):
            request.tokens.append(token)
            reason: FinishReason | None = None
            if token in eos:
                reason = "stop"
            elif len(request.tokens) == request.num_prompt_tokens + request.max_new_tokens:
                reason = "length"
            events.append(TokenEvent(request=request.index, token=token, finish_reason=reason))
            if reason is not None:
                scheduler.finish(request)
                self._free([request])
        return events

    def _choose(self, requests: Sequence[Request], logits: torch.Tensor) -> list[int]:
        """The next token of each request. logits: [num_requests, vocabulary]."""
        tokens: list[int] = logits.float().argmax(dim=-1).tolist()
        return tokens

    def _forward(self, counts: dict[Request, int]) -> tuple[list[Request], torch.Tensor]:
        """Runs one step; the requests whose tokens are all computed then, and the logits of their next tokens."""
        seqs = [request.seq for request in counts if request.seq is not None]
        batch = self.runtime.extend(seqs, list(counts.values()))
        if self._graphs is not None and self._graphs.serves(batch) and all(each.num_waiting == 1 for each in counts):
            newest = [request.tokens[request.num_computed] for request in counts]
            for request in counts:
                request.num_computed += 1
            return list(counts), self._graphs.logits(newest, batch)
        step = PackedStep(self.runtime, self._layout, self.runtime.plan(batch))
        ids: list[int] = []
        last_rows: dict[Request, int] = {}
        for request, count in counts.items():
            ids += request.tokens[request.num_computed : request.num_computed + count]
            request.num_computed += count
            if request.num_waiting == 0:
                last_rows[request] = len(ids) - 1
        device = self.runtime.device
        rows = torch.tensor(list(last_rows.values()) or [0], device=device)  # some kernels mind a product of no rows
        keywords: dict[str, Any] = {STEP_KEYWORD: step}
        if self._keeps_logits:
            keywords["logits_to_keep"] = rows
        with torch.no_grad():
            logits = self._model(
                input_ids=torch.tensor([ids], device=device),
                position_ids=batch.positions.unsqueeze(0),
                use_cache=False,
                **keywords,
            ).logits[0]
        step.require_attended()
        if not self._keeps_logits:
            logits = logits[rows]
        return list(last_rows), logits[: len(last_rows)]

    def _free(self, requests: Sequence[Request]) -> None:
        self.runtime.free([request.seq for request in requests if request.seq is not None])
        for request in requests:
            request.seq = None

    def _check(self, requests: Sequence[Request]) -> None:
        embeddings: Any = self._model.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        table = self.runtime.table
        capacity = table.allocator.num_pages * table.page_size
        for request in requests:
            name = f"prompt {request.index}"
            if request.max_new_tokens < 0:
                raise ContractError(f"max_new_tokens must not be negative: {request.max_new_tokens} given.")
            if not request.tokens:
                raise ContractError(f"{name} is empty: it needs at least one token.")
            if not all(0 <= token < vocabulary for token in request.tokens):
                raise ContractError(f"{name} holds what is no token id: they are from 0 to {vocabulary - 1}.")
            if request.most_stored_tokens > capacity:
                raise ContractError(
                    f"{name} can never fit: it is {request.num_prompt_tokens} tokens and asks for "
                    f"{request.max_new_tokens}, and all {table.allocator.num_pages} pages of {table.page_size} hold "
                    f"{capacity}. Make the generator with a larger num_pages."
                )
            if request.most_stored_tokens > self._layout.max_positions:
                raise ContractError(
                    f"{name} can never fit: {request.num_prompt_tokens} tokens and {request.max_new_tokens} new ones "
                    f"are more than the {self._layout.max_positions} positions of {type(self._model).__name__}."
                )

    def _default_eos(self) -> list[int]:
        eos = getattr(self._model.generation_config, "eos_token_id", None)
        if eos is None:
            return []
        return [eos] if isinstance(eos, int) else list(eos)

    def _num_pages(self, runtime: AttentionRuntime, wanted: int | None) -> tuple[int, int]:
        """Pages for full layers, those asked for or by default; and for the layers of each window."""
        windows, page_size = [window.window for window in runtime.table.windows], runtime.table.page_size
        # A prompt that waits for its next chunk still has the last one's pages, so two steps' tokens are counted.
        num_seqs, max_new_tokens = self._max_num_seqs, 2 * self._max_batch_tokens
        if wanted is None:
            platform = runtime.selection.platform
            if platform.memory_free_bytes is None:
                raise ContractError(f"how much memory {platform} has free is not known: give num_pages.")
            share = _CPU_SHARE if platform.kind == "cpu" else _ACCELERATOR_SHARE
            pools = zip(runtime.pools, [None, *windows], strict=True)
            affordable = pages_for_memory(
                [CacheGroup(cache=pool.cache, window=window) for pool, window in pools],
                int(share * platform.memory_free_bytes),
                num_seqs=num_seqs,
                max_new_tokens=max_new_tokens,
            )
            wanted = max(min(affordable[0], num_seqs * -(-self._max_seq_len // page_size)), 1)
        most = [window_pages(window, page_size, num_seqs, max_new_tokens) for window in windows]
        return wanted, min(wanted, max(most, default=1))


def _token_ids(index: int, prompt: Sequence[Any]) -> list[int]:
    """A prompt's tokens as integers, be they of Python, numpy or torch."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise ContractError(f"prompt {index} must be a list of token ids, which are integers: {error}.") from error

"""Which requests go into the next step, with how many tokens: continuous batching as bookkeeping, without torch.

Decodes come first, then prompts that are under way, then requests that wait, oldest first in each; a step holds at most
`max_batch_tokens`, so a long prompt is computed in chunks beside other requests' decodes. When pages are short, the
request that joined last gives its pages back and waits to be computed anew; the oldest is never stopped, so all end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Request:
    """One prompt on its way.

    index: among the prompts given. tokens: the prompt, then what was generated. num_computed: tokens whose keys and
    values are in pages. seq: the runtime's handle while it runs. num_preemptions: how often its pages were taken.
    """

    index: int
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    num_computed: int = 0
    seq: int | None = None
    num_preemptions: int = 0

    @property
    def num_waiting(self) -> int:
        """Tokens that are still to be computed before the next one is known."""
        return len(self.tokens) - self.num_computed

    @property
    def most_stored_tokens(self) -> int:
        """Tokens in pages at the end: the last one generated needs no place."""
        return self.num_prompt_tokens + self.max_new_tokens - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """counts: the requests of the step, and how many tokens of each. preempted: those whose pages are to be freed."""

    counts: dict[Request, int]
    preempted: list[Request]


@dataclass(kw_only=True)
class Scheduler:
    """Requests that wait and requests that run. Pages are counted here, and owned by the runtime."""

    page_size: int
    max_batch_tokens: int
    max_num_seqs: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    """In the order in which they joined."""

    def pages(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.page_size)

    def finish(self, request: Request) -> None:
        """The request is done; its pages are the caller's to free."""
        self.running.remove(request)

    def next_step(self, num_free_pages: int) -> StepPlan:
        """Chooses a step; at least one token of the oldest request is in it, when nobody else uses the pages."""
        step = _Step(self, num_free_pages)
        decodes = [request for request in self.running if request.num_waiting == 1]
        prompts = [request for request in self.running if request.num_waiting > 1]
        for request in [*decodes, *prompts]:
            step.add(request)
        if not step.preempted:  # a request that joined now would be the next to be stopped
            while self.waiting and len(self.running) < self.max_num_seqs and step.fits(self.waiting[0]):
                self.running.append(self.waiting.popleft())
                step.add(self.running[-1])
        self.waiting.extendleft(step.preempted)  # the youngest was stopped first, so the oldest comes out first
        return StepPlan(counts=step.counts, preempted=step.preempted)


class _Step:
    """A step while it is put together. free: pages left when all that is chosen has its own."""

    def __init__(self, scheduler: Scheduler, free: int) -> None:
        self.scheduler = scheduler
        self.free = free
        self.budget = scheduler.max_batch_tokens
        self.counts: dict[Request, int] = {}
        self.preempted: list[Request] = []

    def add(self, request: Request) -> None:
        """As many of the request's tokens as budget and pages allow; younger requests make room for it."""
        count = min(request.num_waiting, self.budget)
        if request in self.preempted or count == 0:
            return
        pages = self.scheduler.pages
        needed = pages(request.num_computed + count) - pages(request.num_computed)
        while needed > self.free and self.scheduler.running[-1] is not request:
            self._preempt(self.scheduler.running[-1])
        if needed > self.free:
            room = (pages(request.num_computed) + self.free) * self.scheduler.page_size - request.num_computed
            count = min(count, room)
            needed = min(needed, self.free)
        if count > 0:
            self.counts[request] = count
            self.budget -= count
            self.free -= needed

    def fits(self, request: Request) -> bool:
        """Whether a waiting request's tokens, and the next, find pages that no running prompt still counts on."""
        if self.budget == 0:
            return False
        pages = self.scheduler.pages
        promised = sum(
            pages(len(running.tokens)) - pages(running.num_computed + self.counts.get(running, 0))
            for running in self.scheduler.running
        )
        needed = pages(min(len(request.tokens) + 1, request.most_stored_tokens))
        return needed <= self.free - promised

    def _preempt(self, victim: Request) -> None:
        self.scheduler.running.remove(victim)
        count = self.counts.pop(victim, 0)
        self.budget += count
        self.free += self.scheduler.pages(victim.num_computed + count)
        victim.num_computed = 0
        victim.num_preemptions += 1
        self.preempted.append(victim)


def requests_for(prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Request]:
    """One request for each prompt, in order."""
    return [
        Request(index=index, tokens=list(prompt), num_prompt_tokens=len(prompt), max_new_tokens=max_new_tokens)
        for index, prompt in enumerate(prompts)
    ]

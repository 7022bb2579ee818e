"""Continuous batching keeps its promises for any requests: budgets hold, the oldest goes on, and everybody ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from anyattn.integrations.transformers.scheduler import Request, Scheduler, requests_for


def run(scheduler, num_pages, requests):
    """Drives the scheduler with tokens that come from nowhere; yields each step before it is computed."""
    scheduler.waiting.extend(requests)
    owned = dict.fromkeys(requests, 0)
    while scheduler.waiting or scheduler.running:
        step = scheduler.next_step(num_pages - sum(owned.values()))
        for request in step.preempted:
            owned[request] = 0
        for request, count in step.counts.items():
            owned[request] = scheduler.pages(request.num_computed + count)
        yield step, sum(owned.values())
        for request, count in step.counts.items():
            request.num_computed += count
            if request.num_waiting == 0:
                request.tokens.append(0)
                if len(request.tokens) == request.num_prompt_tokens + request.max_new_tokens:
                    scheduler.finish(request)
                    owned[request] = 0


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    new_tokens=st.integers(1, 12),
    page_size=st.sampled_from([1, 4, 16]),
    extra_pages=st.integers(0, 12),
    max_batch_tokens=st.integers(1, 40),
    max_num_seqs=st.integers(1, 8),
)
def test_every_request_ends_within_budget_and_pages(
    lengths, new_tokens, page_size, extra_pages, max_batch_tokens, max_num_seqs
):
    requests = requests_for([[0] * length for length in lengths], new_tokens)
    max_num_seqs = min(max_num_seqs, max_batch_tokens)
    scheduler = Scheduler(page_size=page_size, max_batch_tokens=max_batch_tokens, max_num_seqs=max_num_seqs)
    num_pages = max(scheduler.pages(request.most_stored_tokens) for request in requests) + extra_pages
    oldest = requests[0]
    for step, owned in run(scheduler, num_pages, requests):
        assert 0 < sum(step.counts.values()) <= max_batch_tokens
        assert all(count > 0 for count in step.counts.values())
        assert len(scheduler.running) <= max_num_seqs
        assert owned <= num_pages
        assert set(step.counts).isdisjoint(step.preempted)
        if oldest in scheduler.running:
            assert oldest in step.counts
    assert oldest.num_preemptions == 0
    assert [len(request.tokens) for request in requests] == [length + new_tokens for length in lengths]


def test_decodes_come_before_prompts_and_prompts_fill_what_is_left():
    requests = requests_for([[0] * 2, [0] * 50], 4)
    scheduler = Scheduler(page_size=4, max_batch_tokens=8, max_num_seqs=4)
    counts = [list(step.counts.values()) for step, _ in run(scheduler, 100, requests)]
    assert counts[:4] == [[2, 6], [1, 7], [1, 7], [1, 7]]
    assert counts[4] == [8]  # the first is done


def test_a_request_waits_until_pages_for_its_whole_prompt_are_free():
    requests = requests_for([[0] * 8, [0] * 8], 4)
    scheduler = Scheduler(page_size=4, max_batch_tokens=100, max_num_seqs=4)
    steps = [set(step.counts) for step, _ in run(scheduler, 4, requests)]
    assert steps == [{requests[0]}] * 4 + [{requests[1]}] * 4
    assert all(request.num_preemptions == 0 for request in requests)


def test_the_youngest_gives_way_when_pages_run_out_and_is_the_first_to_come_back():
    requests = requests_for([[0] * 4, [0] * 4, [0] * 4, [0] * 4], 9)
    scheduler = Scheduler(page_size=4, max_batch_tokens=100, max_num_seqs=3)
    preempted = [request for step, _ in run(scheduler, 6, requests) for request in step.preempted]
    assert preempted[0] is requests[2]
    assert requests[3].num_preemptions == 0


def test_requests_are_compared_by_identity():
    one, other = (Request(index=0, tokens=[1], num_prompt_tokens=1, max_new_tokens=1) for _ in range(2))
    assert one != other

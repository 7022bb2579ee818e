"""Whether graphs keep to themselves: padding, addresses, other graphs, plans without graph, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from anyattn.errors import ContractError
from anyattn.testing.check import CheckFailedError, Measured
from anyattn.testing.graphs.setting import NUM_SEQS, UNIFORM, Setting
from anyattn.testing.graphs.tensors import addresses, changed_slots, kv_bytes
from anyattn.types import GraphLevel


def _padding(setting: Setting) -> Measured:
    engine = setting.engine()
    rt = engine.rt
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    graph.step("a full replay", engine.extend(seqs, setting.counts(NUM_SEQS)))
    for kv in (kv for pool in rt.pools for kv in pool.layers):
        for part in kv.stored:
            part[0].zero_()
    work = engine.extend(seqs[:2], setting.counts(2, 1))
    before = kv_bytes(rt)
    graph.step("a replay that is half padding", work)
    stored_in = len(rt.pools) - 1
    for number, (old, new) in enumerate(zip(before, kv_bytes(rt), strict=True)):
        slots = set(work.batch.of_pool(number).out_slots.tolist()) if number == stored_in else set()
        if others := changed_slots(old, new) - slots:
            page = min(others) // setting.case.page_size
            raise CheckFailedError(
                f"a replay changed the KV data in slot {min(others)}, in page {page}, which is none of the step's new "
                f"tokens: {'the null page must stay zero' if page == 0 else 'nothing may be stored for padding'}"
            )
    return engine.verdict()


def _addresses(setting: Setting) -> None:
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    before = addresses(graph.plan)
    for number, size in enumerate((4, 1, 3)):
        graph.load(engine.extend(seqs[:size], setting.counts(size, number)))
        after = addresses(graph.plan)
        for path, address in before.items():
            if after.get(path) != address:
                raise CheckFailedError(
                    f"{path} is another tensor after refresh_graph: the graph goes on reading the one that was there "
                    "when it was captured. Write into that one (copy_) instead."
                )


def _side_by_side(setting: Setting) -> Measured:
    engine = setting.engine()
    large, small = setting.graph(engine), setting.graph(engine, 2)
    seqs, others = engine.new(setting.prompts()), engine.new(setting.prompts()[1:3])
    for number in range(2):
        of_large = engine.extend(seqs, setting.counts(4, number))
        large.load(of_large)
        of_small = engine.extend(others, setting.counts(2, number))
        small.load(of_small)
        large.again(f"replay {number} of the graph for 4 after another was refreshed", of_large)
        small.again(f"replay {number} of the graph for 2 after another was replayed", of_small)
        large.again(f"one more replay {number} of the graph for 4", of_large)
    third = setting.graph(engine, 1)
    small.again("a replay of the graph for 2 after a third was captured", of_small)
    third.step("a replay of the graph for 1", engine.extend(seqs[2:3], setting.counts(1, 1)))
    large.step("a step of the graph for 4 after that", engine.extend(seqs, setting.counts(4, 2)))
    return engine.verdict()


def _beside_eager(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, seqs, others = setting.graph(engine), engine.new(setting.prompts()), engine.new(setting.prompts()[:2])
    for counts in ([1, 1], [4, 2]):
        waiting = engine.extend(others, counts)
        plan = engine.rt.plan(waiting.batch)
        work = engine.extend(seqs, setting.counts(NUM_SEQS))
        graph.step("a replay while a plan without graph waits", work)
        engine.judge("a step that was planned before a replay", waiting, engine.run(waiting, plan))
        graph.again("a replay after a step without graph", work)
    last = engine.extend(others, [2, 1])
    engine.judge("a step without graph", last, engine.run(last))
    graph.again("a replay after another step without graph", work)
    return engine.verdict()


def _captured_with(setting: Setting) -> Measured:
    engine = setting.engine()
    seqs = engine.new(setting.prompts())
    for number, size in enumerate((1, NUM_SEQS)):
        held = engine.extend(seqs[:size], setting.counts(size))
        graph = setting.graph(engine, captured_with=held)
        name = f"after a capture with {size} sequence{'s' * (size > 1)} in the plan"
        graph.again(f"the first replay {name}", held)
        other = NUM_SEQS + 1 - size
        graph.step(f"a replay with {other} {name}", engine.extend(seqs[:other], setting.counts(other, number + 1)))
    return engine.verdict()


def _waits(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    graph.step("the first replay", engine.extend(seqs, setting.counts(NUM_SEQS)))  # what it compiles may wait
    work = engine.extend(seqs[:3], setting.counts(3, 1))
    graph.copy_inputs(work)
    try:
        with _syncs_refused(engine.rt.device):
            graph.refresh(work)
            graph.replay()
    except RuntimeError as error:
        raise CheckFailedError(
            f"refresh_graph or the replay waits for the device: batch.host has all lengths and pointers ({error})"
        ) from error
    engine.judge("a replay", work, graph.results(work))
    return engine.verdict()


@contextlib.contextmanager
def _syncs_refused(device: torch.device) -> Iterator[None]:
    """Where torch can tell, what waits for the device raises RuntimeError."""
    module = torch.get_device_module(device)
    if not hasattr(module, "set_sync_debug_mode"):
        yield
        return
    before = module.get_sync_debug_mode()
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


def _refusals(setting: Setting) -> Measured:
    engine, stranger = setting.engine(), setting.engine(1)
    rt, size = engine.rt, NUM_SEQS
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    work = engine.extend(seqs, setting.counts(size))
    graph.step("a replay", work)

    def refused(what: str, batch: object) -> None:
        try:
            rt.refresh_graph(graph.plan, batch)  # type: ignore[arg-type]
        except ContractError:
            graph.again(f"a replay after {what} was refused", work)
            return
        raise CheckFailedError(f"refresh_graph took {what}, which the graph does not serve: it raises ContractError")

    many = rt.new_sequences(size + 1)
    refused(f"a batch of {size + 1} sequences", rt.extend(many, [setting.counts(1)[0]] * (size + 1)))
    (long,) = engine.new([setting.max_kv_len])
    refused("a sequence longer than max_kv_len", rt.extend([long], setting.counts(1, 1)))
    if setting.level == GraphLevel.ALWAYS:
        refused("more tokens than the graph has", rt.extend(many[:2], [UNIFORM * size, 1]))
    else:
        refused("another number of new tokens", rt.extend(many[:2], [2, 2]))
    stale = rt.extend(many[:2], setting.counts(2, 1))
    rt.extend(many[2:3], [1])
    refused("a step that is not the last", stale)
    freed = rt.extend(many[:1], setting.counts(1, 1))
    rt.free(many)
    refused("a step of a freed sequence", freed)
    refused("another runtime's batch", stranger.rt.extend(stranger.rt.new_sequences(1), setting.counts(1, 1)))
    return engine.verdict()


CHECKS: dict[str, Callable[[Setting], Measured | None]] = {
    "padding reaches no result and stores nothing": _padding,
    "the tensors of a plan stay where they are": _addresses,
    "graphs of several sizes do not disturb one another": _side_by_side,
    "graphs and plans without graph do not disturb one another": _beside_eager,
    "what the plan held at the capture is not in the graph for good": _captured_with,
    "nothing waits for the device": _waits,
    "what a graph does not serve is refused, and changes nothing": _refusals,
}
"""By name, for attention without features."""

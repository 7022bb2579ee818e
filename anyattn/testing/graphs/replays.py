"""Whether replays are right: with other lengths, pages and numbers of sequences than at the capture."""

from __future__ import annotations

from collections.abc import Callable

from anyattn.testing.check import Measured
from anyattn.testing.graphs.captured import Graph
from anyattn.testing.graphs.engine import Engine
from anyattn.testing.graphs.setting import NUM_SEQS, UNIFORM, Setting
from anyattn.types import GraphLevel


def _lengths(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    _steps(setting, engine, graph, seqs, 4)
    return engine.verdict()


def _steps(setting: Setting, engine: Engine, graph: Graph, seqs: list[int], count: int) -> None:
    for number in range(count):
        graph.step(f"replay {number}", engine.extend(seqs, setting.counts(len(seqs), number)))


def _pages(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, first = setting.graph(engine), engine.new(setting.prompts())
    graph.step("the first replay", engine.extend(first, setting.counts(NUM_SEQS)))
    engine.rt.free(first[1:])
    others = engine.new(setting.prompts()[::-1])
    seqs = [others[2], first[0], others[0], others[1]]
    graph.step("a replay with other sequences", engine.extend(seqs, setting.counts(NUM_SEQS)))
    graph.step("a replay with the same in another order", engine.extend(seqs[::-1], setting.counts(NUM_SEQS, 1)))
    shared = [seqs[0], engine.fork(seqs[0])]
    graph.step("a replay with a sequence and its fork", engine.extend(shared, setting.counts(2, 1)))
    return engine.verdict()


def _fewer(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    for number, size in enumerate((4, 3, 1, 2, 4)):
        work = engine.extend(seqs[:size], setting.counts(size, number))
        graph.step(f"replay {number}, with {size} of {NUM_SEQS} sequences", work)
    return engine.verdict()


def _one(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, seqs = setting.graph(engine, 1), engine.new(setting.prompts())
    for number, seq in enumerate(seqs):
        graph.step(f"replay {number}, with another sequence", engine.extend([seq], setting.counts(1, number)))
    return engine.verdict()


def _longest(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, counts = setting.graph(engine), setting.counts(NUM_SEQS)
    long, short = engine.new([setting.max_kv_len - count for count in counts]), engine.new([1, 2, 0, 3])
    graph.step("a replay with sequences of max_kv_len tokens", engine.extend(long, counts))
    graph.step("a replay with short sequences after long ones", engine.extend(short, counts))
    mixed = [short[0], engine.new([setting.max_kv_len - counts[1]])[0], short[2]]
    graph.step("a replay with one long sequence among short ones", engine.extend(mixed, counts[:3]))
    graph.step("a replay with one short sequence after that", engine.extend(short[1:2], setting.counts(1, 1)))
    return engine.verdict()


def _several(setting: Setting) -> Measured:
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    for size in (4, 2):
        work = engine.extend(seqs[:size], setting.counts(size))
        graph.step("the first replay of a step", work)
        graph.again("the second replay of a step", work)
        graph.again("the third replay of a step", work)
    return engine.verdict()


def _many(setting: Setting) -> Measured:
    """More sequences, and a longer one, than kernels take without dividing their work otherwise."""
    num_seqs, longest = 33, 320
    engine = setting.engine(max_kv_len=longest)
    graph = setting.graph(engine, num_seqs, max_kv_len=longest)
    seqs = engine.new([300 if i == 5 else 7 * i % 40 for i in range(num_seqs)])
    for number, size in enumerate((num_seqs, 20, num_seqs)):
        counts = setting.counts(size, number)
        if setting.level == GraphLevel.ALWAYS:
            counts = [(i + number) % (2 * UNIFORM) for i in range(size)]
        graph.step(f"replay {number}, with {size} of {num_seqs} sequences", engine.extend(seqs[:size], counts))
    return engine.verdict()


def features(setting: Setting) -> Measured:
    """All that plain attention is checked for, shortly."""
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    _steps(setting, engine, graph, seqs, 3)
    graph.step("a replay with one sequence", engine.extend(seqs[1:2], setting.counts(1, 1)))
    counts = setting.counts(NUM_SEQS)
    long = engine.new([setting.max_kv_len - count for count in counts])
    graph.step("a replay with sequences of max_kv_len tokens", engine.extend(long, counts))
    graph.step("a replay with short sequences after long ones", engine.extend(seqs[:2], setting.counts(2, 2)))
    return engine.verdict()


def trees(setting: Setting) -> Measured:
    """Masks among the new tokens, other ones in each step, and none."""
    engine = setting.engine()
    graph, seqs = setting.graph(engine), engine.new(setting.prompts())
    for number, size in enumerate((4, 2, 1, 4)):
        work = engine.extend(seqs[:size], setting.counts(size), trees=True)
        graph.step(f"replay {number}, with {size} tree masks", work)
    graph.step("a replay without tree masks", engine.extend(seqs, setting.counts(NUM_SEQS)))
    graph.step("a replay with tree masks again", engine.extend(seqs[:3], setting.counts(3), trees=True))
    return engine.verdict()


CHECKS: dict[str, Callable[[Setting], Measured | None]] = {
    "replays with other lengths, across the ends of pages": _lengths,
    "replays with other sequences on other pages": _pages,
    "replays with fewer sequences than were captured": _fewer,
    "a graph for one sequence serves any": _one,
    "replays with 33 sequences, one of 300 tokens": _many,
    "replays with max_kv_len tokens, and nothing of them is left after": _longest,
    "replays of the same step give the same": _several,
}
"""By name, for attention without features."""

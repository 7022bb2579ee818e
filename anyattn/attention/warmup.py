"""What `AttentionRuntime.warmup` runs, as far as free pages allow, and what it tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from anyattn.types import GraphLevel

_PROMPT, _CHUNK, _SEVERAL = 100, 33, (2, 8)
"""New tokens of a sequence: of a prompt, of a chunk of one beside a decode, and of a verified draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """One backend's part in a warm-up.

    layer: number of the layer that ran; all others with its spec, and with up-projections or without as it is, run the
        same kernels. steps: of which kinds (`WarmupStep.kind`), and "expanded" for prompts of MLA whose keys and values
        are expanded.
    """

    layer: int
    backend: str
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmup:
    """What `AttentionRuntime.warmup` did. seconds: that it took, the device's work included."""

    seconds: float
    warmed: tuple[Warmed, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupStep:
    """One step.

    kind: "prefill", "decode", "mixed", "several" (new tokens of each sequence), "verify" (likewise with tree masks),
        or "decode graph" and "several graph", planned as for a device graph.
    counts: new tokens of each sequence. keep: tokens that each is shortened to afterwards.
    """

    kind: str
    counts: tuple[int, ...]
    keep: int

    @property
    def has_trees(self) -> bool:
        return self.kind == "verify"

    @property
    def is_graph(self) -> bool:
        return self.kind.endswith("graph")

    @property
    def has_prompt(self) -> bool:
        """Whether a sequence has so many new tokens that it may be a prompt or a part of one."""
        return self.kind in ("prefill", "mixed")


def warmup_pages(page_size: int) -> int:
    """Free pages with which a warm-up leaves nothing out."""
    return 2 * -(-(_PROMPT + _CHUNK) // page_size)


def warmup_steps(num_pages: int, page_size: int, *, graph: GraphLevel, trees: bool) -> list[WarmupStep]:
    """The steps that fit into so many pages, one at least, in their order; all have the same sequences: two, or one.

    All but the first come behind `keep` tokens of each. What pages are short for is made smaller, and left out where it
    would be another kind of step then.

    num_pages: 1 or more. graph: up to which device graphs are asked for. trees: whether batches may bring tree masks.
    """
    num_seqs = min(num_pages, 2)
    most = num_pages // num_seqs * page_size
    keep = min(_PROMPT, max(most - _CHUNK, most // 2))
    room = most - keep
    several = [(n,) * num_seqs for n in dict.fromkeys(min(n, room) for n in _SEVERAL) if n > 1]
    ones = (1,) * num_seqs
    found: list[tuple[str, tuple[int, ...]]] = []
    if most > 1:
        found.append(("prefill", (min(_PROMPT, most),) * num_seqs))
    found.append(("decode", ones))
    if num_seqs > 1 and keep and room > 1:
        found.append(("mixed", (1, min(_CHUNK, room))))
    found += [("several", counts) for counts in several]
    if trees:
        found += [("verify", counts) for counts in several]
    if graph >= GraphLevel.DECODE:
        found.append(("decode graph", ones))
    if graph == GraphLevel.UNIFORM or (graph == GraphLevel.ALWAYS and not trees):  # see `GraphSizes`
        found += [("several graph", counts) for counts in several]
    return [WarmupStep(kind=kind, counts=counts, keep=keep) for kind, counts in found]

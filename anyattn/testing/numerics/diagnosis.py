"""What well-known mistakes would have given: a wrong result that equals one of these says what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anyattn.testing.numerics.attending import Attended, Rows, visible_keys
from anyattn.testing.numerics.expectation import Expected, Results, expect, judge

_Scales = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """text: what is wrong, so that "it is what {text} gives" is a sentence.

    rows: of one sequence, what the mistake attends instead; None where it cannot be made. after: what it makes of a
    step's exact output and LSE.
    """

    text: str
    rows: Callable[[Rows], Rows | None] = lambda rows: rows
    after: Callable[[Rows, Attended], Attended] = lambda rows, exact: exact


def diagnose(got: Sequence[Results], expected: Sequence[Expected]) -> str:
    """A clause for the message, empty where no mistake explains all steps that are wrong."""
    plain_error = [max(each.plain_error[part] for each in expected) for part in (0, 1)]
    pairs = list(zip(got, expected, strict=True))
    wrong = [(results, each) for results, each in pairs if not _fits(results, each, plain_error)]
    if any(results[0].shape != each.exact[0].shape for results, each in wrong):
        return ""
    wrong.sort(key=lambda pair: sum(rows.seen.numel() for rows in pair[1].sequences))  # most mistakes end at the first
    found = [
        mistake.text
        for mistake in _MISTAKES
        if all(
            (mistaken := _with_mistake(each, mistake)) is not None and _fits(results, mistaken, plain_error)
            for results, each in wrong
        )
    ]
    phases = {each.phase for _, each in wrong}
    text = f"; it is what {' or '.join(found)} gives" if found else ""
    if len(phases) == 1 and phases < {each.phase for _, each in pairs}:
        text += f"; only steps of phase {min(phases)} are off"
    return text


def _fits(results: Results, expected: Expected, plain_error: list[float]) -> bool:
    """Whether these are the expected results; plain_error: of all steps together."""
    errors = (max(expected.plain_error[0], plain_error[0]), max(expected.plain_error[1], plain_error[1]))
    return not judge([results], [replace(expected, plain_error=errors)]).failure


def _with_mistake(expected: Expected, mistake: Mistake) -> Expected | None:
    changed = [mistake.rows(rows) for rows in expected.sequences]
    sequences = [rows for rows in changed if rows is not None]
    if len(sequences) < len(changed) or not sequences:
        return None
    mistaken = expect(expected.name, expected.phase, expected.rows, sequences)
    return replace(mistaken, exact=mistake.after(sequences[0], mistaken.exact))


def _spec_with(rows: Rows, **fields: Any) -> Rows:
    spec = rows.spec.replace(**fields)
    num_new, num_tokens = rows.seen.shape
    return replace(rows, spec=spec, seen=visible_keys(spec, num_new, num_tokens, rows.tree_mask))


def _window(more: int) -> Callable[[Rows], Rows | None]:
    def changed(rows: Rows) -> Rows | None:
        window = rows.spec.sliding_window
        if window is None:
            return None
        if window + more < 1:
            return replace(rows, seen=torch.zeros_like(rows.seen))
        return _spec_with(rows, sliding_window=window + more)

    return changed


def _no_window(rows: Rows) -> Rows | None:
    return None if rows.spec.sliding_window is None else _spec_with(rows, sliding_window=None)


def _not_causal(rows: Rows) -> Rows | None:
    if not rows.spec.causal or rows.tree_mask is not None:
        return None
    return _spec_with(rows, causal=False, sliding_window=None)


def _causal(rows: Rows) -> Rows | None:
    return None if rows.spec.causal else _spec_with(rows, causal=True)


def _top_left(rows: Rows) -> Rows | None:
    """The i-th new token sees the first i + 1 tokens."""
    num_new, num_tokens = rows.seen.shape
    if not rows.spec.causal or rows.tree_mask is not None:
        return None
    seen = visible_keys(rows.spec, num_tokens, num_tokens)[:num_new]
    return replace(rows, seen=seen)


def _without_itself(rows: Rows) -> Rows | None:
    seen = rows.seen.clone()
    seen.diagonal(rows.num_before).fill_(False)
    return replace(rows, seen=seen)


def _without_prefix(rows: Rows) -> Rows:
    seen = rows.seen.clone()
    seen[:, : rows.num_before] = False
    return replace(rows, seen=seen)


def _no_tree(rows: Rows) -> Rows | None:
    return _spec_with(replace(rows, tree_mask=None)) if rows.spec.tree_mask else None


def _last_page_unseen(rows: Rows) -> Rows | None:
    if rows.page_size is None:
        return None
    seen = rows.seen.clone()
    seen[:, rows.k.shape[0] // rows.page_size * rows.page_size :] = False
    return replace(rows, seen=seen)


def _last_page_cut_off(rows: Rows) -> Rows | None:
    """The sequence ends with its last full page, and the new tokens are taken for its last ones."""
    num_new, num_tokens = rows.seen.shape
    if rows.page_size is None or rows.tree_mask is not None:
        return None
    length = max(num_tokens // rows.page_size * rows.page_size, num_new)
    return replace(rows, k=rows.k[:length], v=rows.v[:length], seen=visible_keys(rows.spec, num_new, length))


def _scales(change: Callable[[torch.Tensor, torch.Tensor], _Scales]) -> Callable[[Rows], Rows | None]:
    """change: from k's and v's scale to those that the mistake takes."""

    def changed(rows: Rows) -> Rows | None:
        if not (isinstance(rows.k_scale, torch.Tensor) and isinstance(rows.v_scale, torch.Tensor)):
            return None
        k_scale, v_scale = change(rows.k_scale, rows.v_scale)
        return replace(rows, k=rows.k / rows.k_scale * k_scale, v=rows.v / rows.v_scale * v_scale)

    return changed


def _no_sinks(rows: Rows) -> Rows | None:
    return None if rows.sinks is None else replace(rows, sinks=None)


def _slopes(factor: float) -> Callable[[Rows], Rows | None]:
    def changed(rows: Rows) -> Rows | None:
        return None if rows.alibi_slopes is None else replace(rows, alibi_slopes=rows.alibi_slopes * factor)

    return changed


def _no_soft_cap(rows: Rows) -> Rows | None:
    return None if rows.spec.logits_soft_cap is None else _spec_with(rows, logits_soft_cap=None)


def _scaled_with(scale: Callable[[Rows], float]) -> Callable[[Rows], Rows | None]:
    return lambda rows: None if scale(rows) == rows.spec.scale else _spec_with(rows, sm_scale=scale(rows))


def _interleaved(rows: Rows) -> Rows | None:
    heads, group = rows.spec.num_kv_heads, rows.spec.group_size
    if heads == 1 or group == 1:
        return None
    order = torch.arange(heads * group).view(group, heads).T.flatten()  # head h comes to stand with KV head h % heads
    per_head = {
        name: None if values is None else values[order]
        for name, values in (("sinks", rows.sinks), ("alibi_slopes", rows.alibi_slopes))
    }
    return replace(rows, q=rows.q[:, order], rounded_q=rows.rounded_q[:, order], **per_head)  # type: ignore[arg-type]


def _back_from_interleaved(rows: Rows, exact: Attended) -> Attended:
    heads, group = rows.spec.num_kv_heads, rows.spec.group_size
    order = torch.arange(heads * group).view(heads, group).T.flatten()
    return Attended(exact.out[:, order], exact.lse[:, order])


def _lse(change: Callable[[Rows, torch.Tensor], torch.Tensor]) -> Callable[[Rows, Attended], Attended]:
    return lambda rows, exact: Attended(exact.out, change(rows, exact.lse))


def _with_sink(rows: Rows, lse: torch.Tensor) -> torch.Tensor:
    return lse if rows.sinks is None else torch.logaddexp(lse, rows.sinks.double())


def _mistakes() -> Iterator[Mistake]:
    yield Mistake(text="a window one token longer", rows=_window(1))
    yield Mistake(text="a window one token shorter", rows=_window(-1))
    yield Mistake(text="no window at all", rows=_no_window)
    yield Mistake(text="a causal mask aligned top-left rather than bottom-right", rows=_top_left)
    yield Mistake(text="no causal mask", rows=_not_causal)
    yield Mistake(text="a causal mask", rows=_causal)
    yield Mistake(text="a token that does not see itself", rows=_without_itself)
    yield Mistake(text="leaving out all tokens before the new ones", rows=_without_prefix)
    yield Mistake(text="leaving out the last page unless it is full", rows=_last_page_unseen)
    yield Mistake(text="cutting a sequence off behind its last full page", rows=_last_page_cut_off)
    yield Mistake(text="ignoring the tree mask", rows=_no_tree)
    yield Mistake(text="ignoring k_scale", rows=_scales(lambda k, v: (torch.ones_like(k), v)))
    yield Mistake(text="ignoring v_scale", rows=_scales(lambda k, v: (k, torch.ones_like(v))))
    yield Mistake(text="ignoring both scales", rows=_scales(lambda k, v: (torch.ones_like(k), torch.ones_like(v))))
    yield Mistake(text="taking k_scale for v_scale and v_scale for k_scale", rows=_scales(lambda k, v: (v, k)))
    yield Mistake(text="taking the first head's scales for all heads", rows=_scales(lambda k, v: (k[:1], v[:1])))
    yield Mistake(text="ignoring the sinks", rows=_no_sinks)
    yield Mistake(text="ignoring the soft cap", rows=_no_soft_cap)
    yield Mistake(text="ALiBi with the other sign", rows=_slopes(-1.0))
    yield Mistake(text="ignoring ALiBi", rows=_slopes(0.0))
    yield Mistake(text="interleaving the heads, query head h with KV head h % num_kv_heads,", rows=_interleaved,
                  after=_back_from_interleaved)  # fmt: skip
    yield Mistake(text="ignoring sm_scale, with 1 in its place,", rows=_scaled_with(lambda rows: 1.0))
    yield Mistake(text="1/sqrt(head_dim) in the place of sm_scale",
                  rows=_scaled_with(lambda rows: rows.spec.head_dim**-0.5))  # fmt: skip
    yield Mistake(text="applying sm_scale twice", rows=_scaled_with(lambda rows: rows.spec.scale**2))
    yield Mistake(text="an LSE in base 2", after=_lse(lambda rows, lse: lse / math.log(2)))
    yield Mistake(text="counting the sink in the LSE", after=_lse(_with_sink))
    yield Mistake(text="an LSE with heads before tokens", after=_lse(lambda rows, lse: lse.T.reshape(lse.shape)))


_MISTAKES = tuple(_mistakes())

"""Masks are proven entry by entry, and padded rows become sequences in which every query sees what it should."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers")

from transformers import masking_utils  # noqa: E402

from anyattn.errors import ContractError, SpecError  # noqa: E402
from anyattn.integrations.transformers import masks, patterns  # noqa: E402
from anyattn.integrations.transformers.packing import has_holes, pack_bidirectional, pack_causal  # noqa: E402


def window(size):
    return masking_utils.sliding_window_causal_mask_function(size)


def wanted(function, queries, keys):
    """What transformers' sdpa would be given: [num_queries, num_keys], bool."""
    return masking_utils.sdpa_mask(
        batch_size=1,
        q_length=len(queries),
        kv_length=len(keys),
        q_offset=queries.start,
        kv_offset=keys.start,
        mask_function=function,
        allow_is_causal_skip=False,
    )[0, 0]


@given(
    q_length=st.integers(1, 9),
    cached=st.integers(0, 9),
    dropped=st.integers(0, 9),
    beyond=st.integers(0, 3),
    size=st.integers(1, 12) | st.none(),
    small_chunks=st.booleans(),
)
def test_the_pattern_found_hides_exactly_what_the_function_hides(q_length, cached, dropped, beyond, size, small_chunks):
    """dropped: tokens that a window's cache has thrown away. beyond: room that a static cache has not filled."""
    queries = range(dropped + cached, dropped + cached + q_length)
    keys = range(dropped, queries.stop + beyond)
    function = masking_utils.causal_mask_function if size is None else window(size)
    with pytest.MonkeyPatch.context() as patch:
        if small_chunks:
            patch.setattr(patterns, "_MASK_ELEMENTS", 1)
        mask = masks.step_mask(
            2, q_length, len(keys), q_offset=queries.start, kv_offset=keys.start, mask_function=function
        )
    query = torch.arange(queries.start, queries.stop)[:, None]
    key = torch.arange(keys.start, keys.stop)
    found = key <= query
    if mask.sliding_window is not None:
        found &= key > query - mask.sliding_window
    assert mask.causal
    assert torch.equal(found, wanted(function, queries, keys))
    assert mask.agrees_with(causal=True, sliding_window=size)
    assert not mask.agrees_with(causal=False, sliding_window=None)
    if mask.sliding_window is not None:
        assert not mask.agrees_with(causal=True, sliding_window=None)
        assert not mask.agrees_with(causal=True, sliding_window=mask.sliding_window + 1)


def test_a_mask_that_hides_nothing_is_bidirectional_even_when_a_window_made_it():
    within = masking_utils.sliding_window_bidirectional_mask_function(8)
    for function in (masking_utils.bidirectional_mask_function, within):
        mask = masks.step_mask(2, 5, 7, mask_function=function)
        assert (mask.causal, mask.sliding_window) == (False, None)


REFUSED = {
    "chunked attention": masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.long)),
    "packed sequences": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.packed_sequence_mask_function(torch.tensor([[0] * 10, [0] * 6 + [1] * 4])),
    ),
    "bidirectional images": masking_utils.or_masks(
        masking_utils.causal_mask_function,
        lambda batch, head, q, kv: (q >= 2) & (q < 5) & (kv >= 2) & (kv < 5),
    ),
    "a bidirectional window": masking_utils.sliding_window_bidirectional_mask_function(3),
    "one entry less": masking_utils.and_masks(
        masking_utils.causal_mask_function, lambda batch, head, q, kv: (q != 5) | (kv != 2)
    ),
    "nothing visible": lambda batch, head, q, kv: q < 0,
    "a function that fails": lambda batch, head, q, kv: torch.ones(3)[kv] > q,
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_masks_are_refused_with_what_is_served(name):
    with pytest.raises(SpecError, match="Served are causal masks"):
        masks.step_mask(2, 10, 10, mask_function=REFUSED[name])


@pytest.mark.parametrize("size", [1, 5, 64, 511, 512, 600])
def test_the_pattern_at_every_length_is_found_from_two_tokens(size):
    mask = masks.step_mask(1, 2, 2, mask_function=window(size))
    assert mask.pattern_up_to(512) == (True, size if size < 512 else None)


def test_the_pattern_at_every_length_refuses_what_two_tokens_cannot_show():
    chunked = masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = masks.step_mask(1, 2, 2, mask_function=chunked)
    assert mask.causal
    with pytest.raises(SpecError, match="Served are"):
        mask.pattern_up_to(512)


def test_padding_is_cut_to_the_keys_and_what_is_beyond_the_mask_is_padding():
    attention_mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]])
    mask = masks.step_mask(2, 1, 4, q_offset=4, kv_offset=2, attention_mask=attention_mask)
    assert mask.padding.tolist() == [[True, True, True, False]] * 2
    assert masks.step_mask(2, 1, 3, q_offset=4, kv_offset=2, attention_mask=attention_mask).padding is None


@pytest.mark.parametrize("shape", [(1, 5), (2, 1, 5, 5)])
def test_a_mask_that_is_not_padding_of_these_rows_is_refused(shape):
    with pytest.raises(ContractError, match=r"attention_mask must be \[2, number of tokens\]"):
        masks.step_mask(2, 5, 5, attention_mask=torch.ones(shape))


def test_computing_with_the_mask_is_our_error():
    mask = masks.step_mask(1, 3, 3)
    for use in (
        lambda: mask[:, :, :, :2],
        lambda: torch.zeros(3, 3) + mask,
        lambda: mask + torch.zeros(3, 3),
        lambda: torch.where(mask, 0.0, 1.0),
        lambda: mask.to(torch.float32),
    ):
        with pytest.raises(ContractError, match="computes with its attention mask itself"):
            use()
    assert not hasattr(mask, "dtype")
    assert mask.ndim == len(mask.shape) == 4


def seen_by_queries(packing, batch_size, q_length, num_keys, *, causal):
    """Which keys each query of the packed sequences sees, back in padded places: [batch_size, q_length, num_keys]."""
    place = torch.arange(batch_size * num_keys).view(batch_size, 1, num_keys, 1)
    prefix, new = (tokens.take(place).flatten().tolist() for tokens in (packing.prefix, packing.new))
    query_place = torch.arange(batch_size * q_length).view(batch_size, 1, q_length, 1)
    queries = packing.queries.take(query_place).flatten().tolist()
    seen = np.zeros((batch_size * q_length, batch_size * num_keys), dtype=bool)
    for before, count in zip(packing.prefix_lens, packing.new_lens, strict=True):
        keys = [prefix.pop(0) for _ in range(before)] + [new.pop(0) for _ in range(count)]
        for index in range(count):
            seen[queries.pop(0), keys[: before + index + 1] if causal else keys] = True
    assert prefix == new == queries == []
    rows = np.arange(batch_size)
    return seen.reshape(batch_size, q_length, batch_size, num_keys)[rows, :, rows]


PADDINGS = st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=2, max_size=2).map(np.array)


@given(padding=PADDINGS | st.none(), q_length=st.integers(1, 9), num_keys=st.integers(1, 9))
def test_packed_causal_rows_see_their_real_tokens_up_to_themselves(padding, q_length, num_keys):
    q_length = min(q_length, num_keys)
    packing = pack_causal(2, q_length, num_keys, padding, has_window=False)
    real = np.ones((2, num_keys), dtype=bool) if padding is None else padding[:, :num_keys]
    positions = np.arange(num_keys)
    seen = (positions <= positions[num_keys - q_length :, None]) & real[:, None]
    seen &= real[:, num_keys - q_length :, None]  # queries that are padding are left out
    np.testing.assert_array_equal(seen_by_queries(packing, 2, q_length, num_keys, causal=True), seen)


@given(padding=PADDINGS | st.none(), q_length=st.integers(1, 20))
def test_packed_bidirectional_rows_see_all_their_real_keys(padding, q_length):
    packing = pack_bidirectional(2, q_length, 9, padding)
    real = np.ones((2, 9), dtype=bool) if padding is None else padding
    seen = np.broadcast_to(real[:, None], (2, q_length, 9))
    np.testing.assert_array_equal(seen_by_queries(packing, 2, q_length, 9, causal=False), seen)
    assert sum(packing.prefix_lens) + sum(packing.new_lens) < 2 * (q_length + 9)


@pytest.mark.parametrize(
    ("rows", "expected"), [([[1, 1, 0], [0, 1, 0]], False), ([[0, 0, 0]], False), ([[1, 1, 1], [1, 0, 1]], True)]
)
def test_holes_are_padding_between_tokens(rows, expected):
    assert has_holes(np.array(rows, dtype=bool)) is expected


def test_holes_are_refused_where_a_window_counts_positions():
    padding = np.array([[True, False, True, True]])
    pack_causal(1, 1, 4, padding, has_window=False)
    with pytest.raises(SpecError, match="pad on one side only"):
        pack_causal(1, 1, 4, padding, has_window=True)


@given(padding=PADDINGS)
def test_tokens_come_back_to_their_places(padding):
    packing = pack_causal(2, 9, 9, padding, has_window=False)
    values = torch.randn(2, 3, 9, 2)  # [batch, heads, length, dim]
    back = packing.queries.put(packing.queries.take(values), 2, 9)
    expected = values.transpose(1, 2) * torch.from_numpy(padding)[..., None, None]
    assert torch.equal(back, expected)

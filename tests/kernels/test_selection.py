"""Votes, ties and ranges of the reference selection."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from tsdoc.engine.forward import chunk_bounds
from tsdoc.kernels.selection import (
    SIFT_STEP,
    SelectionConfig,
    allowed_mask,
    chunk_range,
    top_indices,
    votes,
)

CONFIG = SelectionConfig(n_init=4, n_local=12, top_k=3, chunk_size=8)


@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=40), st.integers(1, 45)
)
def test_among_equals_the_lower_index_wins(scores: list[float], k: int) -> None:
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert top_indices(torch.tensor(scores), k).tolist() == sorted(order[:k])


def make_scores(kind: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    if kind == "random":
        return torch.rand(count, generator=generator) ** 8
    if kind == "few values":
        return torch.randint(0, 5, (count,), generator=generator).float()
    if kind == "rising":
        return torch.arange(count).float()
    if kind == "seen ones low":  # those that tell where to draw the line
        return (torch.arange(count) % SIFT_STEP != 0).float() * torch.rand(count)
    if kind == "seen ones high":
        return (torch.arange(count) % SIFT_STEP == 0).float()
    scores = torch.full((count,), -torch.inf)
    scores[5::7] = 1.0
    return scores


@pytest.mark.parametrize(
    "kind",
    ["random", "few values", "rising", "seen ones low", "seen ones high", "mostly not allowed"],
)
@pytest.mark.parametrize("count", [63, 1000, 5003, 40_000])
@pytest.mark.parametrize("k", [1, 62, 500, 2048])
def test_the_largest_are_found_whatever_every_nth_value_says(kind: str, count: int, k: int) -> None:
    scores = make_scores(kind, count)
    order = torch.argsort(scores, descending=True, stable=True)[:k]
    assert torch.equal(top_indices(scores, k), order.sort().values)


@pytest.mark.parametrize("num_heads", [2, 7, 9, 14, 28])
@pytest.mark.parametrize("count", [33, 100, 4119])
def test_equal_scores_get_equal_votes_wherever_they_are(count: int, num_heads: int) -> None:
    scores = torch.randn(num_heads, 1, generator=torch.Generator().manual_seed(2))
    (found,) = votes(scores.repeat(1, count), CONFIG, num_selected=3, num_kv_heads=1)
    assert (found == found[0]).all()


@given(st.integers(0, 200), st.integers(0, 60), st.integers(1, 40), st.integers(0, 30))
def test_chunks_cover_the_range_and_meet_at_multiples(
    start: int, length: int, size: int, origin: int
) -> None:
    start += origin
    bounds = chunk_bounds(start, start + length, size, origin)
    assert [t for first, last in bounds for t in range(first, last)] == list(
        range(start, start + length)
    )
    assert all((last - origin) % size == 0 for _, last in bounds[:-1])
    assert all(last - first <= size for first, last in bounds)


@given(st.integers(0, 300))
def test_init_candidates_and_local_cover_everything_before_a_chunk(start: int) -> None:
    r = chunk_range(start, start + 8, CONFIG)
    assert 0 <= r.init_end <= r.local_start <= start
    assert r.init_end == min(4, start)
    assert start - r.local_start <= 12
    assert r.num_candidates == max(0, start - 16)


def test_soft_vote_is_the_sum_of_each_heads_softmax() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, 0.0, 0.0]])
    expected = torch.softmax(logits[0], 0) + torch.softmax(logits[1], 0)
    actual = votes(logits, CONFIG, num_selected=1, num_kv_heads=1)
    torch.testing.assert_close(actual, expected[None])


def test_soft_vote_is_not_ruled_by_the_head_with_the_largest_logits() -> None:
    # Head 0 shouts about token 0, heads 1 and 2 agree on token 1.
    logits = torch.tensor([[90.0, 80.0, 0.0], [0.0, 3.0, 0.0], [0.0, 3.0, 0.0]])
    soft = votes(logits, CONFIG, num_selected=1, num_kv_heads=1)
    summed = votes(logits, SelectionConfig(function="topk"), num_selected=1, num_kv_heads=1)
    assert top_indices(soft[0], 1).tolist() == [1]
    assert top_indices(summed[0], 1).tolist() == [0]


def test_head_vote_counts_heads_and_breaks_ties_by_soft_vote() -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0, 0.0], [0.0, 0.0, 9.0, 1.0]])
    config = SelectionConfig(function="head_vote")
    ballots = votes(logits, config, num_selected=1, num_kv_heads=1)[0]
    assert ballots.dtype == torch.float64
    assert torch.argsort(ballots, descending=True).tolist()[:2] == [2, 0]
    assert ballots[0] > 1 > ballots[1]


def test_one_set_per_kv_head_sums_the_heads_of_its_group_alone() -> None:
    logits = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    config = SelectionConfig(sets="per_kv_head")
    actual = votes(logits, config, num_selected=3, num_kv_heads=2)
    expected = torch.stack([torch.softmax(logits[h : h + 3], -1).sum(0) for h in (0, 3)])
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("function", ["head_soft_vote", "head_vote", "topk"])
@pytest.mark.parametrize("smoothing", [1, 3])
def test_forbidden_candidates_never_win(function: str, smoothing: int) -> None:
    logits = torch.full((2, 9), -4.0)
    logits[:, [2, 3, 6]] = -torch.inf
    config = SelectionConfig(function=function, smoothing=smoothing)  # type: ignore[arg-type]
    ballots = votes(logits, config, num_selected=6, num_kv_heads=1)[0]
    assert top_indices(ballots, 6).tolist() == [0, 1, 4, 5, 7, 8]


def test_smoothing_spreads_a_vote_evenly_to_both_sides() -> None:
    logits = torch.zeros(1, 9)
    logits[0, 4] = 9.0
    config = SelectionConfig(smoothing=3)
    ballots = votes(logits, config, num_selected=3, num_kv_heads=1)[0]
    assert top_indices(ballots, 3).tolist() == [3, 4, 5]


def test_allowed_ranges_are_clipped_to_the_candidates() -> None:
    mask = allowed_mask(10, 20, [(0, 12), (18, 40), (50, 60)])
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == [0, 1, 8, 9]
    assert allowed_mask(10, 20, None) is None

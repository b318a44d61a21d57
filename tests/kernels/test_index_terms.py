"""Softmax terms by the key index, made without exponentials."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_index import DIM, GROUP, KV_HEADS, make_keys
from tsdoc.kernels.index import approximate_scores, query_weights
from tsdoc.kernels.index_terms import IndexTerms, Room
from tsdoc.kernels.torch_index import make_layer_index
from tsdoc.kernels.workers import Workers

COUNT = 3000


def softmax_terms(
    index: object, queries: torch.Tensor, first: int, last: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of approximate scores by KV head, and the log2 of their terms' sums."""
    axes, centre = torch.from_numpy(index.axes), torch.from_numpy(index.centre)  # type: ignore[attr-defined]
    weights, offsets = query_weights(queries, axes, centre)
    codes = torch.from_numpy(index.codes)  # type: ignore[attr-defined]
    scores = torch.stack(
        [approximate_scores(w, o, codes) for w, o in zip(weights, offsets, strict=True)]
    )[..., first:last]
    rows = scores.unflatten(1, (KV_HEADS, GROUP)).transpose(0, 1).flatten(0, 2)
    return rows, torch.logsumexp(rows, dim=-1) / torch.log(torch.tensor(2.0))


@pytest.mark.parametrize("num_queries", [1, 5, 40])
@pytest.mark.parametrize(("first", "last"), [(0, COUNT), (130, 2999), (257, 300), (2815, 2817)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_terms_are_a_softmax_of_approximate_scores(
    num_queries: int, first: int, last: int, num_threads: int
) -> None:
    index = make_layer_index(make_keys(COUNT))
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(num_queries, KV_HEADS * GROUP, DIM, generator=generator) * 0.4
    room = Room(Workers(num_threads))
    room.take(7)  # another piece's
    terms = IndexTerms(index, queries, first, last, None, room)
    rows, lse = softmax_terms(index, queries, first, last)
    torch.testing.assert_close(terms.lse, lse, atol=0.09, rtol=0)  # 6 % of one term alone
    ones = torch.ones(len(lse))
    votes = terms.votes(ones, terms.lse)
    expected = torch.softmax(rows, dim=-1).sum(dim=0)
    assert votes.shape == (last - first,)
    torch.testing.assert_close(votes, expected, atol=1e-6, rtol=0.13)
    assert float(votes.sum()) == pytest.approx(len(lse), rel=1e-4)
    at = torch.arange(0, last - first, 2)
    mass = terms.mass(at, terms.lse)
    torch.testing.assert_close(mass, torch.softmax(rows, -1)[:, at].sum(-1), atol=1e-6, rtol=0.13)


def test_what_is_not_allowed_has_no_term() -> None:
    index = make_layer_index(make_keys(COUNT))
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(3))
    allowed = torch.zeros(2800, dtype=torch.bool)
    allowed[300:420] = allowed[2000:2001] = True
    terms = IndexTerms(index, queries, 100, 2900, allowed, Room())
    votes = terms.votes(torch.ones(len(terms.lse)), terms.lse)
    assert torch.equal(votes > 0, allowed)
    nothing = IndexTerms(index, queries, 100, 2900, torch.zeros_like(allowed), Room())
    assert torch.isneginf(nothing.lse).all()


@pytest.mark.parametrize("scale", [0.0, 1e3, 1e4])
def test_terms_of_any_scores_are_finite(scale: float) -> None:
    index = make_layer_index(make_keys(COUNT))
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=generator) * scale
    terms = IndexTerms(index, queries, 0, COUNT, None, Room())
    votes = terms.votes(torch.ones(len(terms.lse)), terms.lse)
    assert torch.isfinite(votes).all()
    # Scores of 1e4 are rounded.
    assert float(votes.sum()) == pytest.approx(len(terms.lse), rel=0.02)

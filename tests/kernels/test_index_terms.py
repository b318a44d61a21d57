"""Softmax terms by the key index, made without exponentials."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_index import DIM, GROUP, KV_HEADS, make_keys
from tsdoc.kernels.index import MIDDLE, unpack
from tsdoc.kernels.index_products import ByteProducts, FloatProducts
from tsdoc.kernels.index_terms import LOG2_E, IndexTerms, Room
from tsdoc.kernels.kv import LayerIndex
from tsdoc.kernels.torch_index import make_layer_index
from tsdoc.kernels.workers import Workers

COUNT = 3000


PRODUCTS: dict[bool, type[ByteProducts] | type[FloatProducts]] = {
    False: FloatProducts,
    True: ByteProducts,
}


def softmax_terms(
    index: LayerIndex, queries: torch.Tensor, first: int, last: int, *, by_bytes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of approximate scores by KV head, and the log2 of their terms' sums.

    Weights are rounded as they are multiplied.
    """
    axes, centre = torch.from_numpy(index.axes), torch.from_numpy(index.centre)
    rows = queries.unflatten(1, (KV_HEADS, GROUP)).transpose(0, 1).flatten(1, 2)
    weights = PRODUCTS[by_bytes](rows @ axes * LOG2_E).weights / LOG2_E
    offsets = rows @ centre.unsqueeze(-1) - weights.sum(-1, keepdim=True) * MIDDLE
    scores = weights @ unpack(torch.from_numpy(index.codes)).float().mT + offsets
    scores = scores.flatten(0, 1)[:, first:last]
    return scores, torch.logsumexp(scores, dim=-1) * LOG2_E


@pytest.mark.parametrize("by_bytes", [False, True])
@pytest.mark.parametrize("num_queries", [1, 5, 40])
@pytest.mark.parametrize(("first", "last"), [(0, COUNT), (130, 2999), (257, 300), (2815, 2817)])
@pytest.mark.parametrize("num_threads", [1, 2])
def test_terms_are_a_softmax_of_approximate_scores(
    num_queries: int, first: int, last: int, num_threads: int, by_bytes: bool
) -> None:
    index = make_layer_index(make_keys(COUNT))
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(num_queries, KV_HEADS * GROUP, DIM, generator=generator) * 0.4
    room = Room(Workers(num_threads), by_bytes=by_bytes)
    room.take(7)  # another piece's
    terms = IndexTerms(index, queries, first, last, None, room)
    rows, lse = softmax_terms(index, queries, first, last, by_bytes=by_bytes)
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


@pytest.mark.parametrize("by_bytes", [False, True])
def test_what_is_not_allowed_has_no_term(by_bytes: bool) -> None:
    index = make_layer_index(make_keys(COUNT))
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(3))
    allowed = torch.zeros(2800, dtype=torch.bool)
    allowed[300:420] = allowed[2000:2001] = True
    terms = IndexTerms(index, queries, 100, 2900, allowed, Room(by_bytes=by_bytes))
    votes = terms.votes(torch.ones(len(terms.lse)), terms.lse)
    assert torch.equal(votes > 0, allowed)
    nothing = IndexTerms(
        index, queries, 100, 2900, torch.zeros_like(allowed), Room(by_bytes=by_bytes)
    )
    assert torch.isneginf(nothing.lse).all()


@pytest.mark.parametrize("scale", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("by_bytes", [False, True])
def test_terms_of_any_scores_are_finite(scale: float, by_bytes: bool) -> None:
    index = make_layer_index(make_keys(COUNT))
    generator = torch.Generator().manual_seed(3)
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=generator) * scale
    terms = IndexTerms(index, queries, 0, COUNT, None, Room(by_bytes=by_bytes))
    votes = terms.votes(torch.ones(len(terms.lse)), terms.lse)
    assert torch.isfinite(votes).all()
    # Scores of 1e4 are rounded.
    assert float(votes.sum()) == pytest.approx(len(terms.lse), rel=0.02)


def test_terms_do_not_depend_on_the_number_of_threads() -> None:
    index = make_layer_index(make_keys(COUNT))
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(3))
    one, two = (
        IndexTerms(index, queries, 130, 2999, None, Room(Workers(n), by_bytes=True)) for n in (1, 2)
    )
    ones = torch.ones(len(one.lse))
    torch.testing.assert_close(one.votes(ones, one.lse), two.votes(ones, two.lse))


def test_another_index_is_not_taken_for_one_that_is_gone() -> None:
    room = Room()
    queries = torch.randn(1, KV_HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(3))
    found = []
    for seed in range(3):  # each may get the memory of the last
        index = make_layer_index(make_keys(COUNT, seed))
        room.clear()
        found.append(IndexTerms(index, queries, 0, COUNT, None, room).lse)
        expected = IndexTerms(index, queries, 0, COUNT, None, Room()).lse
        assert torch.equal(found[-1], expected)
        del index
    assert not torch.equal(found[0], found[1])

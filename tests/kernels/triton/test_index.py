"""The key index's kernels against plain arithmetic on the same codes."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.cases import assert_close, make_pool
from tsdoc.kernels.index import RANK, IndexBasis, build, find_basis, query_weights, unpack
from tsdoc.kernels.selection import top_indices
from tsdoc.kernels.triton.index_rescore import select_candidates
from tsdoc.kernels.triton.index_scan import IndexTuning, Projected, index_votes
from tsdoc.kernels.triton.tiles import LOG2_E
from tsdoc.kernels.triton.topk import make_space, tiles_holding

Place = tuple[torch.device, torch.dtype]
SHAPES = [(1, 1, 64), (2, 7, 128), (3, 3, 64), (1, 8, 16)]


def _project(keys: torch.Tensor, axes: torch.Tensor) -> torch.Tensor:
    """Keys [num_keys, num_kv, head_dim] mixed from their first 24 numbers."""
    rank = min(24, keys.shape[2])
    return torch.einsum("nkr,krd->nkd", keys[..., :rank].float(), axes[:, :rank])


class Case:
    """A pool, its index and a query, peaked so that votes are no ties."""

    def __init__(self, place: Place, shape: tuple[int, int, int], length: int, top_k: int) -> None:
        self.device, self.dtype = place
        num_kv, group, head_dim = shape
        self.top_k = top_k
        self.pool = make_pool(length, num_kv, head_dim, self.device, self.dtype)
        narrow = torch.randn(num_kv, 24, head_dim, generator=torch.Generator().manual_seed(3))
        narrow = (narrow / 4).to(self.device)
        for tensor in (self.pool.k, self.pool.keys):  # near a subspace, as real keys are
            tensor.copy_(_project(tensor, narrow) + 0.05 * tensor.float())
        basis = find_basis(self.pool.k)
        self.basis = basis
        self.codes = torch.zeros(
            num_kv, self.pool.page_table.shape[0] * 128, RANK, dtype=torch.uint8, device=self.device
        )
        build(lambda a, b: self.pool.k[a:b], basis, self.codes, 0, length, step=512)
        generator = torch.Generator().manual_seed(length)
        heads = num_kv * group
        query = torch.randn(heads, head_dim, generator=generator) * 3
        self.query = (query * LOG2_E / head_dim**0.5).to(self.device, self.dtype)
        self.skip = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.tickets = torch.zeros(num_kv, dtype=torch.int32, device=self.device)

    def run(
        self, low: int, high: int, tiles: int, room: int, allowed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Projected, torch.Tensor]:
        meta = torch.tensor([[low, high, self.count(low, high, allowed), 0]], dtype=torch.int32)
        meta = meta.to(self.device)
        space = make_space(1, 2 * self.codes.shape[1], tiles, self.device, tile=8)
        self.space = space
        prefix = None
        if allowed is not None:
            prefix = torch.zeros(2 * self.codes.shape[1] + 1, dtype=torch.int32)
            prefix[1 : allowed.shape[0] + 1] = allowed.int()
            prefix = prefix.cumsum(0).int().to(self.device)
        votes, projected = index_votes(
            self.query, self.basis.axes, self.basis.centre, self.codes, meta, self.skip, space,
            self.tickets,
            floor_tiles=tiles, allowed=prefix, num_sms=2, tuning=IndexTuning(programs=2),
        )  # fmt: skip
        chosen = select_candidates(
            self.query, votes, projected, self.pool.keys, self.pool.page_table, self.codes, meta,
            self.skip, space, self.tickets, room=room, top_k=self.top_k,
        )  # fmt: skip
        return votes, projected, chosen[0, 0, : int(meta[0, 2])]

    def count(self, low: int, high: int, allowed: torch.Tensor | None) -> int:
        number = high - low if allowed is None else int(allowed[low:high].sum())
        return min(self.top_k, number)

    def scores(self) -> torch.Tensor:
        """Exact scores [num_heads, length], float64."""
        k = self.pool.k.double()
        q = self.query.double().view(k.shape[1], -1, k.shape[2])
        return torch.einsum("kgd,nkd->kgn", q, k).flatten(0, 1)

    def approximate(self, projected: Projected) -> torch.Tensor:
        """Scores [num_heads, length] from codes and 8-bit weights, float64."""
        length, num_kv = self.pool.k.shape[:2]
        group = self.query.shape[0] // num_kv
        codes = unpack(self.codes)[:, :length].double()
        weights = projected.weights[:, :group].double()
        scale, offset = projected.factors[:, :group].double().unbind(-1)
        products = torch.einsum("kgr,knr->kgn", weights, codes)
        return (products * scale[..., None] + offset[..., None]).flatten(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("length", "low", "high"), [(1000, 4, 1000), (700, 300, 513), (257, 4, 5)])
def test_votes_of_the_index_are_those_of_its_codes(
    place: Place, shape: tuple[int, int, int], length: int, low: int, high: int
) -> None:
    case = Case(place, shape, length, top_k=20)
    votes, projected, _ = case.run(low, high, 40, 100)
    scores = case.approximate(projected)[:, low:high] * 0.6931471805599453
    expected = torch.softmax(scores, -1).sum(0)
    assert_close(votes[0, 0, low:high], expected, "votes", torch.float32)
    assert not case.tickets.any()


def test_the_projected_query_scores_as_the_reference_does(place: Place) -> None:
    case = Case(place, (2, 7, 128), 600, top_k=20)
    _, projected, _ = case.run(4, 600, 40, 100)
    weights, offsets = query_weights(case.query.float()[None], case.basis.axes, case.basis.centre)
    actual = projected.weights[:, :7].float() * projected.factors[:, :7, :1]
    largest = weights.abs().amax(-1).view(2, 7, 1)
    error = (actual - weights.view(2, 7, RANK)).abs() / largest
    assert float(error.max()) <= 0.51 / 127
    shift = projected.factors[:, :7, 1].flatten() + 7.5 * actual.sum(-1).flatten()
    torch.testing.assert_close(shift, offsets[0] + 7.5 * weights[0].sum(-1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [300, 1000])
@pytest.mark.parametrize("restricted", [False, True])
def test_the_best_candidates_win_by_exact_votes(
    place: Place, shape: tuple[int, int, int], length: int, restricted: bool
) -> None:
    case = Case(place, shape, length, top_k=20)
    low, high = 4, length - 12
    allowed = None
    if restricted:
        allowed = torch.zeros(length, dtype=torch.bool)
        allowed[50:90] = allowed[200:280] = True
    _, _, chosen = case.run(low, high, 60, 160, allowed)
    chosen = chosen.long().cpu()
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    scores = case.scores()[:, low:high].cpu() * 0.6931471805599453
    forbidden = torch.zeros(high - low, dtype=torch.bool)
    if allowed is not None:
        forbidden = ~allowed[low:high]
        scores[:, forbidden] = -torch.inf
    exact = torch.softmax(scores, -1).sum(0)
    assert not forbidden[chosen - low].any()
    best = exact[top_indices(exact, len(chosen))].sum()
    assert float(exact[chosen - low].sum() / best) > 0.95


def test_with_room_for_all_the_result_is_the_exact_selection(place: Place) -> None:
    case = Case(place, (2, 3, 64), 900, top_k=30)
    _, _, chosen = case.run(4, 880, 876, 876)
    exact = torch.softmax(case.scores()[:, 4:880] * 0.6931471805599453, -1).sum(0)
    assert chosen.tolist() == (top_indices(exact, 30) + 4).tolist()


def test_candidates_beyond_the_room_are_left_out_by_their_votes(place: Place) -> None:
    case = Case(place, (1, 2, 64), 900, top_k=30)
    votes, _, chosen = case.run(4, 880, 30, 30)
    best = top_indices(votes[0, 0, 4:880], 30) + 4
    assert chosen.tolist() == best.tolist()


@pytest.mark.parametrize("wanted", [60, 250])
def test_about_as_many_candidates_are_found_as_are_wanted(place: Place, wanted: int) -> None:
    """Keys that follow each other have nothing to do with each other here."""
    length = 4000
    case = Case(place, (1, 2, 64), length, top_k=30)
    votes, _, chosen = case.run(4, length, tiles_holding(wanted, length, 8), 2 * wanted)
    keys = votes[0, 0, 4:length].view(torch.int32).long() + (1 << 31)  # of votes above 0
    number = int((keys >= int(case.space.floors[0]) % (1 << 32)).sum())
    assert 0.85 * wanted <= number <= 1.3 * wanted  # an eighth more tiles may reach the floor
    assert len(set(chosen.tolist())) == 30


def test_nothing_is_computed_on_a_hit(place: Place) -> None:
    case = Case(place, (1, 2, 64), 300, top_k=30)
    case.skip.fill_(1)
    case.run(4, 280, 60, 90)
    assert not case.tickets.any()


def test_bases_are_those_of_the_epoch() -> None:
    keys = torch.randn(500, 2, 24, generator=torch.Generator().manual_seed(0))
    basis = find_basis(keys)
    assert isinstance(basis, IndexBasis)
    assert basis.axes.shape == (2, 24, RANK)
    product = basis.axes[..., :24].transpose(1, 2) @ basis.duals[..., :24]
    torch.testing.assert_close(product, torch.eye(24).expand(2, 24, 24), atol=1e-5, rtol=0)

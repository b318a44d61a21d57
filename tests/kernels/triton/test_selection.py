"""Votes and top-k of the Triton backend against the plain reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.kernels.triton.cases import (
    Poison,
    assert_close,
    make_meta,
    make_pool,
    make_rope,
    only_on_gpu,
)
from tsdoc.kernels.selection import (
    ChunkRange,
    SelectionConfig,
    chunk_range,
    selection_query,
    top_indices,
    votes,
)
from tsdoc.kernels.triton.decode_scores import decode_votes
from tsdoc.kernels.triton.query import selection_queries
from tsdoc.kernels.triton.scores import ScoreTuning, block_votes
from tsdoc.kernels.triton.tiles import LOG2_E
from tsdoc.kernels.triton.topk import make_space, select_top

CONFIG = SelectionConfig(n_init=4, n_local=12, top_k=20, chunk_size=16)
SHAPES = [(1, 1, 64), (2, 3, 80), (2, 7, 128), (1, 8, 96), (4, 1, 256)]
Place = tuple[torch.device, torch.dtype]


def reference_votes(
    q: torch.Tensor, k: torch.Tensor, r: ChunkRange, config: SelectionConfig,
    forbidden: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """[num_sets, num_candidates], in float64 from the same operands."""
    num_kv = k.shape[1]
    keys = k[r.init_end : r.local_start].double().repeat_interleave(q.shape[0] // num_kv, dim=1)
    logits = torch.einsum("nhd,hd->hn", keys, q.double()) / q.shape[1] ** 0.5
    if forbidden is not None:
        logits[:, forbidden[r.init_end : r.local_start].to(logits.device)] = -torch.inf
    return votes(logits, config, num_selected=config.top_k, num_kv_heads=num_kv)


def rounded(q: torch.Tensor, *, soft: bool = True) -> torch.Tensor:
    """What the products see of `q`: scaled, and then rounded to its type."""
    scale = q.shape[-1] ** -0.5 * (LOG2_E if soft else 1)
    return (q.float() * scale).to(q.dtype).double() / scale


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("sizes", [[1], [63, 100, 16]])
def test_selection_queries_equal_the_reference(
    place: Place, head_dim: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, dtype = place
    rope = make_rope(head_dim, device, 256)
    fused = torch.randn(sum(sizes), 5, head_dim, generator=torch.Generator().manual_seed(1))
    q = fused.to(device, dtype)[:, :3]  # as a slice of a joint projection
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    bounds = torch.tensor(list(zip(starts, sizes, strict=True)), dtype=torch.int32, device=device)
    places = [7 + 30 * i for i in range(len(sizes))]
    meta = torch.tensor([(0, 0, 0, p) for p in places], dtype=torch.int32, device=device)
    rotated = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    Poison(monkeypatch)
    actual = selection_queries(q, bounds, rope, n_local=12, meta=meta, rotated=rotated)
    for s, n, p in zip(starts, sizes, places, strict=True):
        heads = rope.rotate(q[s : s + n].float().transpose(0, 1), slice(p, p + n))
        assert_close(rotated[s : s + n].transpose(0, 1), heads, "rows", dtype)
    expected = torch.stack(
        [selection_query(q[s : s + n], rope, 12) for s, n in zip(starts, sizes, strict=True)]
    )
    assert_close(actual, expected, "rows", torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "starts", [[79], [100, 116, 280], [255 + 12], [256 + 12], [257 + 12], [1000]]
)
@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
def test_votes_of_a_block_equal_the_reference(
    place: Place, shape: tuple[int, int, int], starts: list[int], sets: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    device, dtype = place
    only_on_gpu(device, shape != SHAPES[1] and (sets != "one" or len(starts) == 1))
    num_kv, group, head_dim = shape
    config = dataclasses.replace(CONFIG, sets=sets)  # type: ignore[arg-type]
    pool = make_pool(starts[-1], num_kv, head_dim, device, dtype)
    ranges = [chunk_range(s, s + 16, config) for s in starts]
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(len(starts), num_kv * group, head_dim, generator=generator).to(device, dtype)
    Poison(monkeypatch)
    actual = block_votes(
        q, pool.keys, pool.page_table, make_meta(ranges, [20] * len(starts), device),
        low=ranges[-1].init_end, common_high=min(r.local_start for r in ranges),
        high=max(r.local_start for r in ranges), per_kv_head=sets == "per_kv_head", num_sms=2,
        tuning=ScoreTuning(votes_tiles=2),
    )  # fmt: skip
    given = rounded(q)
    for number, r in enumerate(ranges):
        expected = reference_votes(given[number], pool.k, r, config)
        found = actual[:, number, r.init_end : r.local_start]
        assert_close(found, expected, "votes", dtype)


def test_many_chunks_of_a_block_are_scored_in_batches(place: Place) -> None:
    device, dtype = place
    pool = make_pool(700, 2, 64, device, dtype)
    ranges = [chunk_range(s, s + 16, CONFIG) for s in range(0, 640, 16)]
    q = torch.randn(40, 10, 64, generator=torch.Generator().manual_seed(3)).to(device, dtype)
    actual = block_votes(
        q, pool.keys, pool.page_table, make_meta(ranges, [0] * 40, device),
        low=4, common_high=0, high=ranges[-1].local_start, per_kv_head=False, num_sms=3,
    )  # fmt: skip
    given = rounded(q)
    for number in (2, 3, 20, 39):
        r = ranges[number]
        expected = reference_votes(given[number], pool.k, r, CONFIG)
        found = actual[0, number, r.init_end : r.local_start]
        assert_close(found, expected[0], "votes", dtype)


@pytest.mark.parametrize("soft", [True, False])
def test_forbidden_candidates_get_no_vote(place: Place, soft: bool) -> None:
    device, dtype = place
    pool = make_pool(300, 2, 64, device, dtype)
    ranges = [chunk_range(s, s + 16, CONFIG) for s in (250, 266)]
    q = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(4)).to(device, dtype)
    free = torch.zeros(513, dtype=torch.bool)
    free[[7, 50, 51, 200, 236, 237]] = True
    prefix = torch.cat((torch.zeros(1), free.cumsum(0))).int().to(device)
    config = dataclasses.replace(CONFIG, function="head_soft_vote" if soft else "topk")
    actual = block_votes(
        q, pool.keys, pool.page_table, make_meta(ranges, [5, 6], device),
        low=4, common_high=238, high=254, per_kv_head=False, soft=soft, allowed=prefix,
    )  # fmt: skip
    given = rounded(q, soft=soft)
    for number, r in enumerate(ranges):
        expected = reference_votes(given[number], pool.k, r, config, ~free)[0]
        found = actual[0, number, r.init_end : r.local_start]
        assert_close(found.clamp_min(-1e9), expected.clamp_min(-1e9), "rows", torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [63, 100, 267, 268, 269, 1000])
@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
def test_votes_of_a_decode_query_equal_the_reference(
    place: Place, shape: tuple[int, int, int], position: int, sets: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    device, dtype = place
    only_on_gpu(device, shape != SHAPES[1] and (sets != "one" or position != 100))
    num_kv, group, head_dim = shape
    config = dataclasses.replace(CONFIG, sets=sets)  # type: ignore[arg-type]
    pool = make_pool(position, num_kv, head_dim, device, dtype)
    r = chunk_range(position, position + 1, config)
    q = torch.randn(num_kv * group, head_dim, generator=torch.Generator().manual_seed(5)) * 0.2
    q = q.to(device, dtype)
    skip = torch.zeros(1, dtype=torch.int32, device=device)
    Poison(monkeypatch)
    space = make_space(num_kv if sets == "per_kv_head" else 1, 1280, 20, device)
    actual = decode_votes(
        q, pool.keys, pool.page_table, make_meta([r], [20], device), skip, space,
        torch.zeros(num_kv, dtype=torch.int32, device=device),
        length=1280, per_kv_head=sets == "per_kv_head", num_sms=3,
    )  # fmt: skip
    given = q.float() / LOG2_E * head_dim**0.5
    expected = reference_votes(given, pool.k, r, config)
    assert_close(actual[:, 0, r.init_end : r.local_start], expected, "votes", dtype)


VALUES = {
    "random": lambda n, g: torch.rand(n, generator=g),
    "ties": lambda n, g: torch.randint(0, 3, (n,), generator=g).float(),
    "equal": lambda n, g: torch.zeros(n),
    "signed": lambda n, g: torch.randint(-4, 4, (n,), generator=g) * 0.5,
    "runs": lambda n, g: (torch.arange(n) // 50 % 3 == 1) * torch.rand(n, generator=g),
}


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("length", [30, 63, 100, 1000, 2047, 2048, 2049])
@pytest.mark.parametrize("top_k", [1, 20])
def test_top_k_is_exact_and_ascending_with_ties_to_the_lower_index(
    device: torch.device, name: str, length: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_on_gpu(device, length in (100, 2047, 2048) or (top_k == 1 and name != "ties"))
    generator = torch.Generator().manual_seed(length)
    rows = [(4, length), (4, length - 3), (9, 20)]
    given_votes = torch.full((1, 3, -(-length // 256) * 256), torch.nan)
    for number, (low, high) in enumerate(rows):
        given_votes[0, number, low:high] = VALUES[name](high - low, generator)
    counts = [min(top_k, high - low) for low, high in rows]
    meta = torch.tensor(
        [(low, high, count, 0) for (low, high), count in zip(rows, counts, strict=True)],
        dtype=torch.int32, device=device,
    )  # fmt: skip
    Poison(monkeypatch)
    actual = select_top(given_votes.to(device), meta, top_k=top_k)
    for number, (low, high) in enumerate(rows):
        expected = top_indices(given_votes[0, number, low:high], counts[number]) + low
        assert actual[number, 0, : counts[number]].tolist() == expected.tolist()


@pytest.mark.parametrize("smoothing", [1, 3, 5])
def test_sets_are_selected_apart_and_votes_are_smoothed(
    device: torch.device, smoothing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(smoothing)
    given_votes = torch.rand(2, 2, 512, generator=generator)
    given_votes[:, :, 100:140] = -torch.inf
    rows = [(4, 470), (4, 500)]
    meta = torch.tensor([(low, high, 20, 0) for low, high in rows], dtype=torch.int32)
    Poison(monkeypatch)
    actual = select_top(given_votes.to(device), meta.to(device), top_k=20, smoothing=smoothing)
    for number, (low, high) in enumerate(rows):
        own = given_votes[:, number, low:high]
        pooled = torch.nn.functional.max_pool1d(own[None], smoothing, 1, smoothing // 2)[0]
        pooled[own == -torch.inf] = -torch.inf
        expected = torch.stack([top_indices(row, 20) for row in pooled]) + low
        assert actual[number].tolist() == expected.tolist()


@pytest.mark.parametrize("num_candidates", [25, 4000])
def test_chunks_that_select_nothing_stay_unwritten(
    device: torch.device, num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all candidates are forbidden, as behind an `allowed` that ends before them."""
    given_votes = torch.full((1, 2, 4096), -torch.inf)
    given_votes[0, 1, 10:40] = 1.0
    rows = [(4, 4 + num_candidates, 0, 0), (4, 4 + num_candidates, 15, 0)]
    meta = torch.tensor(rows, dtype=torch.int32, device=device)
    Poison(monkeypatch)
    out = select_top(given_votes.to(device), meta, top_k=20)
    assert (out[0] == -1).all()
    assert out[1, 0].tolist() == [*range(10, 25)] + [-1] * 5


@pytest.mark.parametrize("tile", [8, 32, 128])
@pytest.mark.parametrize("num_winners", [15, 20, 300])
def test_winners_that_stand_together_are_told_apart(
    device: torch.device, tile: int, num_winners: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tiles than top_k hold them, or more of them than top_k are in one."""
    generator = torch.Generator().manual_seed(num_winners)
    row = torch.rand(5120, generator=generator)
    row[2050 : 2050 + num_winners] += 1
    meta = torch.tensor([[4, 5000, 20, 0]], dtype=torch.int32, device=device)
    Poison(monkeypatch)
    monkeypatch.setattr("tsdoc.kernels.triton.topk.TILES", (tile,))
    out = select_top(row.view(1, 1, -1).to(device), meta, top_k=20)
    assert out[0, 0].tolist() == (top_indices(row[4:5000], 20) + 4).tolist()


def test_nothing_is_computed_on_a_hit(device: torch.device) -> None:
    given_votes = torch.rand(1, 1, 256).to(device)
    meta = torch.tensor([[4, 200, 20, 0]], dtype=torch.int32, device=device)
    skip = torch.ones(1, dtype=torch.int32, device=device)
    with pytest.MonkeyPatch.context() as patch:
        Poison(patch)
        out = select_top(given_votes, meta, top_k=20, skip=skip)
    assert (out == -1).all()

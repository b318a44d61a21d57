"""The CPU cache: pieces of odd sizes, tiles, batches, and only written rows are read."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
import pytest
import torch

from tsdoc.kernels import torch_scores, torch_selection, torch_window
from tsdoc.kernels.attention import reference_attention
from tsdoc.kernels.kv import MemoryPiece
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.selection import (
    SelectionConfig,
    allowed_mask,
    chunk_range,
    top_indices,
    votes,
)
from tsdoc.kernels.torch_cache import TorchCache
from tsdoc.models.config import RopeConfig

KV_HEADS, GROUP, DIM = 2, 3, 16
ROPE = make_rope_table(RopeConfig(rope_type="default", theta=1e4), DIM, 1500)
CONFIG = SelectionConfig(n_init=4, n_local=12, top_k=20, chunk_size=8)


def make_cache(
    sizes: list[int],
    config: SelectionConfig = CONFIG,
    kv_dtype: str = "float32",
    dtype: torch.dtype = torch.float32,
) -> tuple[TorchCache, torch.Tensor, torch.Tensor]:
    """A cache over pieces of `sizes`, poisoned with NaN and then written, and its K and V."""
    pieces, start = [], 0
    for size in sizes:
        piece = MemoryPiece(
            start=start,
            capacity=size,
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            kv_dtype=kv_dtype,
        )
        poison = np.float32(np.nan) if kv_dtype == "float32" else np.uint16(0x7FC0)
        piece.keys(0)[:] = poison
        piece.values(0)[:] = poison
        pieces.append(piece)
        start += size
    cache = TorchCache(pieces, ROPE, config, num_kv_heads=KV_HEADS, dtype=dtype)
    generator = torch.Generator().manual_seed(start)
    k, v = (torch.randn(start, KV_HEADS, DIM, generator=generator) for _ in range(2))
    if kv_dtype == "bfloat16":
        k, v = k.bfloat16().float(), v.bfloat16().float()
    return cache, k, v


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [[33], [237], [100, 29, 1], [5000, 77]])
@pytest.mark.parametrize("num_queries", [1, 2, 5])
def test_equal_keys_get_equal_scores_wherever_they_are(
    sizes: list[int], num_queries: int, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_scores, "TILE_BYTES", 1000 * 4 * KV_HEADS * DIM)
    cache, k, _ = make_cache(sizes, kv_dtype=kv_dtype)
    cache.write(0, 0, k[:1].repeat(len(k), 1, 1), k)
    queries = torch.randn(num_queries, KV_HEADS * GROUP, DIM)
    scores = cache._scores.score(0, queries, 0, len(k))
    assert (scores == scores[..., :1]).all()


def expected_selection(
    k: torch.Tensor, query: torch.Tensor, start: int, config: SelectionConfig
) -> torch.Tensor:
    r = chunk_range(start, start + 8, config)
    keys = k[r.init_end : r.local_start].repeat_interleave(GROUP, dim=1)
    logits = torch.einsum("nhd,hd->hn", keys, query) / DIM**0.5
    ballots = votes(logits, config, num_selected=config.top_k, num_kv_heads=KV_HEADS)
    return torch.stack([top_indices(b, config.top_k) for b in ballots]) + r.init_end


@pytest.mark.parametrize("sizes", [[300], [100, 200], [63, 1, 111, 125], [256, 44], [255, 45]])
@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_selects_for_several_chunks_at_once(
    sizes: list[int], sets: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_scores, "TILE_BYTES", 4 * KV_HEADS * DIM * 37)
    monkeypatch.setattr(torch_selection, "SCORE_BYTES", 4 * 6 * 250 * 2)
    config = SelectionConfig(n_init=4, n_local=12, top_k=20, chunk_size=8, sets=sets)  # type: ignore[arg-type]
    cache, k, v = make_cache(sizes, config, kv_dtype)
    cache.write(0, 0, k[:290], v[:290])
    starts = [0, 16, 64, 200, 280]
    queries = torch.randn(len(starts), 6, DIM, generator=torch.Generator().manual_seed(5))
    ranges = [chunk_range(s, s + 8, config) for s in starts]
    actual = cache.select(0, queries, ranges)
    assert [a.shape[-1] for a in actual] == [0, 0, 20, 20, 20]
    for at in (2, 3, 4):
        assert torch.equal(actual[at], expected_selection(k, queries[at], starts[at], config))


@pytest.mark.parametrize("sizes", [[300], [63, 1, 111, 125]])
@pytest.mark.parametrize("num_sets", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 8])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=["float32", "half"]
)
def test_attends_at_compact_positions(
    sizes: list[int], num_sets: int, num_tokens: int, dtype: torch.dtype, tolerance: float
) -> None:
    cache, k, v = make_cache(sizes, dtype=dtype)
    end = 250 + num_tokens
    cache.write(0, 0, k[:end], v[:end])
    around = chunk_range(250, end, CONFIG)
    generator = torch.Generator().manual_seed(1)
    selected = torch.stack(
        [torch.randperm(230, generator=generator)[:20].sort().values + 5 for _ in range(num_sets)]
    )
    q = torch.randn(num_tokens, 6, DIM, generator=generator)
    actual = cache.attend(0, q, selected, around)
    assert actual.dtype == dtype
    for head in range(KV_HEADS):
        row = selected[head % num_sets]
        index = torch.cat((torch.arange(4), row, torch.arange(around.local_start, end)))
        before = len(index) - num_tokens
        keys = ROPE.rotate(k[index, head][None], slice(0, len(index)))
        heads = slice(head * GROUP, (head + 1) * GROUP)
        queries = ROPE.rotate(q[:, heads].transpose(0, 1), slice(before, len(index)))
        expected = reference_attention(queries, keys, v[index, head][None], num_before=before)
        found = actual[:, heads].transpose(0, 1).float()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_a_window_grows_and_equals_attention_from_its_first_local_token() -> None:
    cache, k, v = make_cache([200, 100, 100])
    cache.write(0, 0, k, v)
    generator = torch.Generator().manual_seed(2)
    around = chunk_range(250, 251, CONFIG)
    selected = torch.randperm(230, generator=generator)[:20].sort().values[None] + 5
    window = cache.open_window(0, selected, around)
    for position in range(250, 250 + torch_window.ROOM + 5):
        q = torch.randn(1, 6, DIM, generator=generator)
        grown = dataclasses.replace(around, start=position, end=position + 1)
        expected = cache.attend(0, q, selected, grown)
        torch.testing.assert_close(window.attend(q, position), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
@pytest.mark.parametrize(
    "allowed", [[(30, 90)], [(100, 110), (40, 45)], [(0, 8), (190, 300)], [(210, 220)], []]
)
def test_restricted_candidates_are_selected_as_if_the_others_were_forbidden(
    sets: Literal["one", "per_kv_head"], allowed: list[tuple[int, int]]
) -> None:
    config = dataclasses.replace(CONFIG, sets=sets)
    cache, k, v = make_cache([100, 120], config)
    cache.write(0, 0, k, v)
    queries = torch.randn(2, KV_HEADS * GROUP, DIM)
    ranges = [chunk_range(start, start + 8, config) for start in (120, 200)]
    for query, around, chosen in zip(
        queries, ranges, cache.select(0, queries, ranges, allowed), strict=True
    ):
        mask = allowed_mask(around.init_end, around.local_start, allowed)
        assert mask is not None
        count = min(config.top_k, int(mask.sum()))
        if count == 0:
            assert chosen.shape[1] == 0
            continue
        keys = k[around.init_end : around.local_start].repeat_interleave(GROUP, dim=1)
        logits = torch.einsum("nhd,hd->hn", keys, query) / DIM**0.5
        ballots = votes(
            logits.masked_fill(~mask, -torch.inf),
            config,
            num_selected=count,
            num_kv_heads=KV_HEADS,
        )
        expected = torch.stack([top_indices(row, count) for row in ballots]) + around.init_end
        assert chosen.tolist() == expected.tolist()


@pytest.mark.parametrize("sizes", [[300], [63, 1, 111, 125]])
@pytest.mark.parametrize("bounds", [(0, 1), (5, 105), (60, 290)])
def test_every_head_of_every_token_votes_among_all_keys_of_a_range(
    sizes: list[int], bounds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_scores, "VOTE_TILE_BYTES", 4 * 3 * 6 * 37)
    monkeypatch.setattr(torch_scores, "VOTES_BYTES", 4 * 3 * 6 * (bounds[1] - bounds[0]))
    cache, k, v = make_cache(sizes)
    cache.write(0, 0, k[:290], v[:290])
    q = torch.randn(7, 6, DIM, generator=torch.Generator().manual_seed(6)) * 3
    start, end = bounds
    heads = ROPE.rotate(q.transpose(0, 1), slice(CONFIG.n_local, CONFIG.n_local + 1))
    keys = k[start:end].repeat_interleave(GROUP, dim=1).transpose(0, 1)
    expected = torch.softmax(heads @ keys.transpose(1, 2) / DIM**0.5, dim=-1).mean(dim=(0, 1))
    actual = cache.soft_votes(0, q, start, end)
    torch.testing.assert_close(actual, expected, atol=1e-7, rtol=1e-5)
    assert float(actual.sum()) == pytest.approx(1)


@pytest.mark.parametrize("num_sets", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 8])
def test_attention_mass_is_what_attention_weighs_each_position_with(
    num_sets: int, num_tokens: int
) -> None:
    cache, k, v = make_cache([63, 1, 111, 125])
    end = 250 + num_tokens
    around = chunk_range(250, end, CONFIG)
    generator = torch.Generator().manual_seed(7)
    selected = torch.stack(
        [torch.randperm(230, generator=generator)[:20].sort().values + 5 for _ in range(num_sets)]
    )
    q = torch.randn(num_tokens, 6, DIM, generator=generator)
    # V that is 1 at one position and 0 elsewhere makes attention give back its weight.
    for position in (0, int(selected[0, 3]), 249, 100):
        mark = torch.zeros_like(v)
        mark[position] = 1
        cache.write(0, 0, k[:end], mark[:end])
        weight = cache.attend(0, q, selected, around).mean()
        mass = cache.attention_mass(0, q, selected, around)
        assert mass.shape == (250,)
        torch.testing.assert_close(mass[position], weight, atol=1e-6, rtol=1e-5)
    attended = {0, 1, 2, 3, *selected.flatten().tolist(), *range(around.local_start, 250)}
    assert set(torch.nonzero(mass).flatten().tolist()) == attended
    assert float(mass.sum()) <= 1

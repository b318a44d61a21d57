"""Hits, refreshes and the growing local window of the Selection Cache."""

from __future__ import annotations

import torch

from tests.engine.test_small_budget import SMALL
from tests.tiny_models import make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.selection_cache import MAX_HITS, SelectionCache

CHOSEN = torch.tensor([[5, 9]])


def test_a_close_query_reuses_the_selection_and_its_local_start() -> None:
    cache = SelectionCache(0.9)
    query = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert cache.look_up(0, query) is None
    cache.remember(0, query, CHOSEN, 40)
    hit = cache.look_up(0, query * 3)
    assert hit is not None
    assert hit[0] is CHOSEN
    assert hit[1] == 40
    assert cache.look_up(0, -query) is None
    assert cache.look_up(1, query) is None
    assert (cache.num_lookups, cache.num_hits) == (4, 1)


def test_heads_count_together() -> None:
    cache = SelectionCache(0.9)
    strong, weak = torch.tensor([10.0, 0.0]), torch.tensor([0.1, 0.0])
    cache.remember(0, torch.stack((strong, weak)), CHOSEN, 0)
    assert cache.look_up(0, torch.stack((strong, -weak))) is not None


def test_theta_none_switches_the_cache_off() -> None:
    cache = SelectionCache(None)
    cache.remember(0, torch.ones(1, 4), CHOSEN, 0)
    assert cache.look_up(0, torch.ones(1, 4)) is None


def test_a_refresh_is_forced_after_the_largest_number_of_hits() -> None:
    cache = SelectionCache(-1.0)
    cache.remember(0, torch.ones(1, 4), CHOSEN, 0)
    hits = [cache.look_up(0, torch.ones(1, 4)) is not None for _ in range(MAX_HITS + 1)]
    assert hits == [True] * MAX_HITS + [False]


def test_with_theta_below_every_cosine_decode_keeps_the_first_selection() -> None:
    oracle = make_oracle("qwen2", seed=12)
    engine = make_engine(oracle, SMALL)
    ids = token_ids(140, seed=13)
    piece = memory_piece(engine, 240)
    engine.prefill([piece], ids[:128], 0, prefill_block=64, on_block=lambda end: None)
    config = GenerationConfig(
        max_new_tokens=MAX_HITS + 4, stop_ids=frozenset(), question_chunk_size=16, theta=-1.0
    )
    generation = engine.generate([piece], ids[128:].tolist(), 128, config)
    assert len(list(generation)) == MAX_HITS + 4
    steps = MAX_HITS + 3
    assert generation.reuse.num_lookups == 3 * steps
    assert generation.reuse.num_hits == 3 * (steps - 2)
    assert generation.finish_reason == "length"

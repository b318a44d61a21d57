"""Hits, refreshes and the growing local window of the Selection Cache."""

from __future__ import annotations

import torch

from tests.engine.test_small_budget import SMALL
from tests.tiny_models import make_engine, make_oracle, memory_piece, token_ids
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.selection_cache import MAX_HITS, SelectionCache


class Rows:
    def attend(self, q: torch.Tensor, position: int) -> torch.Tensor:
        return q


WINDOW = Rows()


def test_a_close_query_reuses_the_window() -> None:
    cache = SelectionCache(0.9)
    query = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    assert cache.look_up(0, query, whole=False) is None
    cache.remember(0, query, WINDOW, whole=False)
    assert cache.look_up(0, query * 3, whole=False) is WINDOW
    assert cache.look_up(0, -query, whole=False) is None
    assert cache.look_up(1, query, whole=False) is None
    assert (cache.num_lookups, cache.num_hits) == (4, 1)


def test_heads_count_together() -> None:
    cache = SelectionCache(0.9)
    strong, weak = torch.tensor([10.0, 0.0]), torch.tensor([0.1, 0.0])
    cache.remember(0, torch.stack((strong, weak)), WINDOW, whole=False)
    assert cache.look_up(0, torch.stack((strong, -weak)), whole=False) is not None


def test_theta_none_switches_the_cache_off() -> None:
    cache = SelectionCache(None)
    cache.remember(0, torch.ones(1, 4), WINDOW, whole=False)
    assert cache.look_up(0, torch.ones(1, 4), whole=False) is None


def test_a_whole_window_serves_as_long_as_everything_fits() -> None:
    cache = SelectionCache(None)
    cache.remember(0, torch.ones(1, 4), WINDOW, whole=True)
    assert cache.look_up(0, -torch.ones(1, 4), whole=True) is WINDOW
    assert cache.num_lookups == 0
    assert cache.look_up(0, torch.ones(1, 4), whole=False) is None


def test_a_refresh_is_forced_after_the_largest_number_of_hits() -> None:
    cache = SelectionCache(-1.0)
    cache.remember(0, torch.ones(1, 4), WINDOW, whole=False)
    hits = [
        cache.look_up(0, torch.ones(1, 4), whole=False) is not None for _ in range(MAX_HITS + 1)
    ]
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

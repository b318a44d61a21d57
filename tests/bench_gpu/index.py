"""The key index: beside plain arithmetic at real sizes, and its time in a decode step."""

from __future__ import annotations

import dataclasses
import functools
import time

import numpy as np
import torch

from tests.bench_gpu.common import DEVICE, PAPER, QWEN2_7B, Row, fill, graph_ms, make_backend
from tests.bench_gpu.decode import timed_answer
from tsdoc.engine.engine import Engine
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.generate import GenerationConfig
from tsdoc.kernels.index import approximate_scores, query_weights
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.kernels.kv import DevicePiece
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.triton.decode_scores import decode_votes
from tsdoc.kernels.triton.index_rescore import select_candidates
from tsdoc.kernels.triton.index_scan import IndexTuning, Projected, index_votes
from tsdoc.kernels.triton.tiles import LOG2_E
from tsdoc.kernels.triton.topk import TopSpace, make_space, select_top, tile_size, tiles_holding
from tsdoc.kernels.triton_index import DeviceIndex

BUILT_IN = IndexConfig().candidates * PAPER.top_k


def fill_like_keys(pool: PagePool) -> None:
    """Keys near a subspace, with a centre, as real ones are."""
    generator = torch.Generator(DEVICE).manual_seed(5)
    for keys in pool.keys:
        num_slots, num_kv, head_dim = keys.shape
        decay = 0.9 ** torch.arange(head_dim, device=DEVICE)
        axes = torch.randn(num_kv, head_dim, head_dim, device=DEVICE, generator=generator)
        axes = torch.linalg.qr(axes)[0] * decay[:, None] * 6
        centre = torch.randn(num_kv, head_dim, device=DEVICE, generator=generator)
        for first in range(0, num_slots, 65_536):
            part = keys[first : first + 65_536]
            noise = torch.randn(num_kv, len(part), head_dim, device=DEVICE, generator=generator)
            part.copy_((noise @ axes + centre[:, None]).transpose(0, 1))


class Layer:
    """What one layer's selection in a decode step reads."""

    def __init__(self, num_tokens: int) -> None:
        backend = make_backend(dataclasses.replace(QWEN2_7B, num_layers=1))
        rope = make_rope_table(QWEN2_7B.rope, 128, 4096, DEVICE)
        backend.cache([DevicePiece(start=0, capacity=num_tokens)], rope, PAPER)
        self.pool, self.sms = backend.pool, backend._parts.num_sms
        fill_like_keys(self.pool)
        self.pool.resident = num_tokens
        self.index = DeviceIndex(self.pool)
        begun = time.perf_counter()
        self.index.cover(num_tokens)
        torch.cuda.synchronize()
        self.first_build_s = time.perf_counter() - begun
        self.meta = torch.tensor(
            [[128, num_tokens - 512, 2048, 2688]], dtype=torch.int32, device=DEVICE
        )
        self.num_tokens = num_tokens
        self.skip = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        self.tickets = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        query = torch.randn(28, 128, device=DEVICE) * 1.5
        self.query = (query * LOG2_E / 128**0.5).to(torch.bfloat16)

    def space(self, candidates: int, tile: int | None = None) -> TopSpace:
        tile = tile or tile_size(4 * self.num_tokens, candidates)
        return make_space(1, self.pool.capacity, candidates, DEVICE, tile=tile)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        space = make_space(1, self.pool.capacity, 2048, DEVICE)
        votes = decode_votes(
            self.query, self.pool.keys[0], self.pool.page_table, self.meta, self.skip, space,
            self.tickets, length=self.pool.capacity, per_kv_head=False, num_sms=self.sms,
        )  # fmt: skip
        return votes, select_top(votes, self.meta, top_k=2048, space=space, skip=self.skip)

    def votes(
        self, space: TopSpace, candidates: int, tuning: IndexTuning | None = None
    ) -> tuple[torch.Tensor, Projected]:
        return index_votes(
            self.query, self.index.axes[0], self.index.centres[0], self.index.codes[0], self.meta,
            self.skip, space, self.tickets, num_sms=self.sms, tuning=tuning,
            floor_tiles=tiles_holding(candidates, self.num_tokens, space.tile),
        )  # fmt: skip

    def choose(
        self, space: TopSpace, votes: torch.Tensor, projected: Projected, room: int
    ) -> torch.Tensor:
        return select_candidates(
            self.query, votes, projected, self.pool.keys[0], self.pool.page_table,
            self.index.codes[0], self.meta, self.skip, space, self.tickets, room=room, top_k=2048,
        )  # fmt: skip

    def select(self, space: TopSpace, candidates: int) -> torch.Tensor:
        return self.choose(space, *self.votes(space, candidates), 2 * candidates)


def check(num_tokens: int, candidates: int) -> Row:
    """The share of exact votes that is caught, and the index's votes beside plain arithmetic."""
    layer = Layer(num_tokens)
    votes, best = layer.exact()
    space = layer.space(candidates)
    guessed, projected = layer.votes(space, candidates)
    floor = int(space.floors[0]) % (1 << 32)
    chosen = layer.choose(space, guessed, projected, 2 * candidates)
    low, high = (int(n) for n in layer.meta[0, :2])
    axes, centre = layer.index.axes[0], layer.index.centres[0]
    weights, offsets = (part[0] for part in query_weights(layer.query.float()[None], axes, centre))
    scores = approximate_scores(weights, offsets, layer.index.codes[0])[:, low:high]
    reference = torch.softmax(scores / LOG2_E, -1).sum(0)
    error = (guessed[0, 0, low:high] - reference).abs().max() / reference.max()
    reached = guessed[0, 0, low:high].view(torch.int32).long() + (1 << 31) >= floor
    row = votes[0, 0]
    caught = row[chosen[0, 0].long()].sum() / row[best[0, 0].long()].sum()
    again = layer.choose(space, *layer.votes(space, candidates), 2 * candidates)
    return {
        "what": "index beside exact selection", "tokens": num_tokens, "candidates": candidates,
        "reach_the_floor": int(reached.sum()), "caught": float(caught),
        "same_again": bool(torch.equal(chosen, again)),
        "largest_error_of_votes": float(error), "unique": int(chosen.unique().numel()),
        "share_of_best": float(row[best[0, 0].long()].sum() / 28),
    }  # fmt: skip


def times(num_tokens: int) -> list[Row]:
    """Milliseconds of one layer's selection, exact and by the index, and its parts."""
    layer = Layer(num_tokens)
    rows: list[Row] = [
        {"what": "selection of a decode step, exact", "ms": graph_ms(layer.exact)},
        {"what": "index of one layer, with compilation", "s": layer.first_build_s},
    ]
    for candidates in (4096, BUILT_IN):
        space = layer.space(candidates)
        votes, projected = layer.votes(space, candidates)
        guess = functools.partial(layer.votes, space, candidates)
        choose = functools.partial(layer.choose, space, votes, projected, 2 * candidates)
        rows.append(
            {
                "what": f"selection by the index, {candidates} candidates", "tile": space.tile,
                "ms": graph_ms(functools.partial(layer.select, space, candidates)),
                "votes_ms": graph_ms(guess), "choose_ms": graph_ms(choose),
            }
        )  # fmt: skip
    space = layer.space(BUILT_IN)
    for tuning in (
        IndexTuning(stages=2), IndexTuning(stages=6), IndexTuning(warps=2, programs=16),
        IndexTuning(warps=8, programs=4), IndexTuning(programs=4), IndexTuning(programs=12),
        IndexTuning(votes_warps=2), IndexTuning(votes_warps=8),
    ):  # fmt: skip
        guess = functools.partial(layer.votes, space, BUILT_IN, tuning)
        rows.append({"what": str(tuning), "votes_ms": graph_ms(guess)})
    for tile in (8, 32, 128):
        guess = functools.partial(layer.votes, layer.space(BUILT_IN, tile), BUILT_IN)
        rows.append({"what": f"tile {tile}", "votes_ms": graph_ms(guess)})
    return rows


def profile(num_tokens: int) -> list[Row]:
    """Microseconds of each kernel of one layer's selection by the index."""
    layer = Layer(num_tokens)
    space = layer.space(BUILT_IN)

    layer.select(space, BUILT_IN)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            layer.select(space, BUILT_IN)
        torch.cuda.synchronize()
    return [
        {"what": event.key, "us": event.device_time_total / event.count}
        for event in trace.key_averages()
        if event.count >= 10
    ]


def decode(decoder: FusedDecoder, num_tokens: int, count: int = 24) -> list[Row]:
    """Milliseconds per token when every layer selects by the index."""
    rows: list[Row] = []
    backend = make_backend(decoder.config)
    piece = DevicePiece(start=0, capacity=num_tokens + 256)
    for candidates in (2, 3):
        engine = Engine(
            decoder, PAPER, max_tokens=num_tokens + 4096, question_chunk_size=512,
            backend=backend, index=IndexConfig(candidates=candidates, floor=0.0),
        )  # fmt: skip
        engine.cache([piece])
        if not rows:
            fill(backend.pool)
        backend.pool.resident = num_tokens
        config = GenerationConfig(
            max_new_tokens=count, stop_ids=frozenset(), question_chunk_size=512, theta=None
        )
        first, _ = timed_answer(engine, piece, num_tokens, config)
        times, reuse = timed_answer(engine, piece, num_tokens, config)
        rows.append(
            {
                "what": f"decode, every layer selects by the index, {candidates} times top_k",
                "tokens": num_tokens, "p50_ms": float(np.median(times[4:])),
                "p95_ms": float(np.quantile(times[4:], 0.95)),
                "hits": reuse.num_hits, "lookups": reuse.num_lookups,
                "first_answer_ms": [round(t, 1) for t in first[:4]],
                "next_answer_ms": [round(t, 1) for t in times[:4]],
                "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
            }
        )  # fmt: skip
    return rows


def index(num_tokens: int) -> list[Row]:
    """All but whole decode steps."""
    rows = [check(n, c) for n in (131_072, num_tokens) for c in (4096, BUILT_IN)]
    return [*rows, *times(num_tokens), *profile(num_tokens)]

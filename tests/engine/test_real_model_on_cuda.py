"""The packaged model at 16k tokens in float32: CUDA equals the CPU as the design defines equal.

Both read the same made text. CUDA is given the CPU's K, V and selections layer by layer, after its
own have been compared with them, so that no difference adds up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_models import memory_piece
from tsdoc.engine.decoder import Decoder, DecoderPart
from tsdoc.engine.engine import Engine
from tsdoc.engine.forward import chunk_bounds
from tsdoc.engine.generate import GenerationConfig
from tsdoc.kernels.interface import DeviceCache
from tsdoc.kernels.selection import ChunkRange, SelectionConfig, votes
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.prompt.tokenizer import TextTokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(1800)]

CONFIG = SelectionConfig()
NUM_TOKENS, QUESTION, BLOCK = 16_384, 64, 4096
NEAR = 1e-5  # of the k-th vote: closer ones may be selected either way
CLOSE: dict[str, Any] = {"atol": 1e-3, "rtol": 1e-3}
NAMES = ("Ada", "Boris", "Clara", "Dmitri", "Elena", "Farid", "Grace", "Hugo", "Ines", "Jonas")
TOWNS = ("Bergen", "Cadiz", "Dover", "Essen", "Florence", "Ghent", "Haifa", "Izmir")
GOODS = ("barley", "copper", "linen", "salt", "timber", "wool")


@dataclass
class Log:
    """What one engine computed, by layer and first position."""

    rows: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    selections: dict[tuple[int, int], tuple[torch.Tensor, list[torch.Tensor]]] = field(
        default_factory=dict
    )


class Watched:
    """A cache whose methods are those of `inner` unless a subclass has its own."""

    def __init__(self, inner: DeviceCache, log: Log) -> None:
        self.inner, self.log = inner, log

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Recording(Watched):
    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.log.rows[layer, start] = (k.clone(), v.clone())
        self.inner.write(layer, start, k, v)

    def select(
        self, layer: int, queries: torch.Tensor, ranges: Sequence[ChunkRange], allowed: None
    ) -> list[torch.Tensor]:
        selected = list(self.inner.select(layer, queries, ranges, allowed))
        self.log.selections[layer, ranges[0].start] = (queries.clone(), selected)
        return selected


class Forced(Watched):
    """Compares with the log and goes on with what is there.

    Attributes:
        num_near: Selected positions that differ, all of them next to the k-th vote.
    """

    def __init__(self, inner: DeviceCache, log: Log, device: torch.device) -> None:
        super().__init__(inner, log)
        self.device = device
        self.num_near = 0

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        rows = self.log.rows[layer, start]
        for own, expected in zip((k, v), rows, strict=True):
            torch.testing.assert_close(own.cpu(), expected, **CLOSE)
        self.inner.write(layer, start, *(t.to(self.device) for t in rows))

    def select(
        self, layer: int, queries: torch.Tensor, ranges: Sequence[ChunkRange], allowed: None
    ) -> list[torch.Tensor]:
        expected_queries, selected = self.log.selections[layer, ranges[0].start]
        torch.testing.assert_close(queries.cpu(), expected_queries, **CLOSE)
        given = expected_queries.to(self.device)
        own = self.inner.select(layer, given, ranges, allowed)
        for query, r, mine, theirs in zip(expected_queries, ranges, own, selected, strict=True):
            self._compare(layer, query, r, set(mine[0].tolist()), set(theirs[0].tolist()))
        return [positions.to(self.device) for positions in selected]

    def _compare(
        self, layer: int, query: torch.Tensor, r: ChunkRange, mine: set[int], theirs: set[int]
    ) -> None:
        assert len(mine) == len(theirs)
        differ = sorted(mine ^ theirs)
        if not differ:
            return
        keys = torch.cat([k for (at, _), (k, _) in sorted(self.log.rows.items()) if at == layer])
        keys = keys[r.init_end : r.local_start].double()
        group = query.shape[0] // keys.shape[1]
        keys = keys.repeat_interleave(group, dim=1)
        logits = torch.einsum("hd,nhd->hn", query.double(), keys) / query.shape[1] ** 0.5
        row = votes(logits, CONFIG, num_selected=len(mine), num_kv_heads=1)[0]
        last = row.sort(descending=True).values[len(mine) - 1]
        found = row[torch.tensor(differ) - r.init_end]
        torch.testing.assert_close(found, last.expand_as(found), atol=0, rtol=NEAR)
        self.num_near += len(differ)


def make_engines(model: LocatedModel) -> tuple[Engine, Engine]:
    from tsdoc.engine.fused_decoder import FusedDecoder
    from tsdoc.kernels.triton_backend import TritonBackend

    weights, cuda = open_weights(model.directory), torch.device("cuda")
    backend = TritonBackend(
        model.config, kv_dtype="float32", compute_dtype=torch.float32, device=cuda
    )
    decoders: tuple[DecoderPart, DecoderPart] = (
        Decoder(model.config, weights, torch.float32),
        FusedDecoder(model.config, weights, torch.float32, cuda),
    )
    cpu, gpu = (
        Engine(d, CONFIG, max_tokens=NUM_TOKENS + 512, question_chunk_size=512, backend=b)
        for d, b in zip(decoders, (None, backend), strict=True)
    )
    return cpu, gpu


def read_ids(model: LocatedModel) -> np.ndarray:
    """A text whose continuation has no close call: the least lead of a token's logit is 0.08."""
    rng = random.Random(0)
    lines = [
        f"In the year {1500 + n}, {rng.choice(NAMES)} of {rng.choice(TOWNS)} sold "
        f"{rng.randint(2, 99)} barrels of {rng.choice(GOODS)} to {rng.choice(NAMES)} of "
        f"{rng.choice(TOWNS)}.\n"
        for n in range(1200)
    ]
    ids, _ = TextTokenizer(model.directory).encode("".join(lines))
    assert len(ids) > NUM_TOKENS + QUESTION
    return np.asarray(ids[: NUM_TOKENS + QUESTION], dtype=np.int32)


def run(engine: Engine, cache: DeviceCache, ids: np.ndarray) -> torch.Tensor:
    """Logits of the last token; prompt and question as a prefill and an answer compute them."""
    for first, last in chunk_bounds(0, NUM_TOKENS, BLOCK):
        part = torch.from_numpy(ids[first:last].astype(np.int64))
        chunks = chunk_bounds(first, last, CONFIG.chunk_size)
        engine.runner.run_chunks(cache, part, first, chunks, need_logits=False)
    question = torch.from_numpy(ids[NUM_TOKENS:].astype(np.int64))
    bounds = [(NUM_TOKENS, len(ids))]
    logits = engine.runner.run_chunks(cache, question, NUM_TOKENS, bounds, need_logits=True)
    assert logits is not None
    return logits.cpu()


def answer(engine: Engine, ids: np.ndarray) -> list[int]:
    """Greedy tokens with nothing forced."""
    piece = memory_piece(engine, len(ids) + 32)
    prompt, question = ids[:NUM_TOKENS], ids[NUM_TOKENS:].tolist()
    engine.prefill([piece], prompt, 0, prefill_block=BLOCK, on_block=lambda end: None)
    config = GenerationConfig(
        max_new_tokens=24, stop_ids=frozenset(), question_chunk_size=512, theta=0.9
    )
    return list(engine.generate([piece], question, NUM_TOKENS, config))


def test_cuda_equals_the_cpu_at_16k(packaged_model: Callable[[str], LocatedModel]) -> None:
    model = packaged_model("tiny")
    cpu, gpu = make_engines(model)
    ids, log = read_ids(model), Log()
    recorded = Recording(cpu.cache([memory_piece(cpu, len(ids))]), log)
    expected = run(cpu, recorded, ids)  # type: ignore[arg-type]  # a cache by its methods
    forced = Forced(gpu.cache([memory_piece(gpu, len(ids))]), log, torch.device("cuda"))
    torch.testing.assert_close(run(gpu, forced, ids), expected, **CLOSE)  # type: ignore[arg-type]  # as well
    assert answer(gpu, ids) == answer(cpu, ids)

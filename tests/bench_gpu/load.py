"""K and V of a kept prompt from the page cache to the device, beside each part of the way alone."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from tests.bench_gpu.common import (
    DEVICE,
    KEY,
    PAPER,
    QWEN2_7B,
    SHAPE,
    Row,
    make_backend,
    random_ids,
)
from tsdoc.kernels import transfer
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.rope import make_rope_table
from tsdoc.kernels.staging import STAGING_BYTES
from tsdoc.store import Store

BLOCK = 8192


def keep(store: Store, ids: np.ndarray) -> None:
    """Keeps random bytes as K and V."""
    rows = np.random.default_rng(3).integers(
        0, 1 << 16, (BLOCK, 2, SHAPE.num_kv_heads, SHAPE.head_dim), dtype=np.uint16
    )
    with (
        store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="bench") as writer,
        ThreadPoolExecutor(transfer.NUM_WORKERS) as workers,
    ):
        for start in range(0, len(ids), BLOCK):
            jobs = [
                workers.submit(writer.pieces[-1].write, layer, start, rows)
                for layer in range(SHAPE.num_layers)
            ]
            for job in jobs:
                job.result()
            writer.commit(start + BLOCK)
        writer.finish()


def load(num_tokens: int) -> list[Row]:
    """Seconds of `Transfer.load`, of reading with checksums alone, and of the device's copies."""
    ids = random_ids(num_tokens)
    size = SHAPE.token_bytes * num_tokens
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        store = Store(Path(name) / "store", max_bytes=2 * size)
        keep(store, ids)
        for what, run in (("load", _load), ("read and check", _read)):
            for _ in range(3):
                entry = store.open(KEY, ids)
                assert entry is not None
                with entry:
                    seconds = run(entry.pieces, num_tokens)
                rows.append(
                    {"what": what, "tokens": num_tokens, "s": seconds,
                     "GB_per_s": size / seconds / 1e9}
                )  # fmt: skip
    return rows


def _load(pieces: list[KVPiece], num_tokens: int) -> float:
    backend = make_backend(QWEN2_7B)
    rope = make_rope_table(QWEN2_7B.rope, QWEN2_7B.head_dim, 4096, DEVICE)
    cache = backend.cache(pieces, rope, PAPER)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    cache.load(num_tokens)
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def _read(pieces: list[KVPiece], num_tokens: int) -> float:
    step = STAGING_BYTES // SHAPE.row_bytes

    def task(layer: int) -> Callable[[], None]:
        def run() -> None:
            buffer = np.empty((step, 2, SHAPE.num_kv_heads, SHAPE.head_dim), np.uint16)
            for start in range(0, num_tokens, step):
                pieces[0].read(layer, start, buffer[: num_tokens - start])

        return run

    begun = time.perf_counter()
    with ThreadPoolExecutor(transfer.NUM_WORKERS) as workers:
        jobs = [workers.submit(task(layer)) for layer in range(SHAPE.num_layers)]
        for job in jobs:
            job.result()
    return time.perf_counter() - begun

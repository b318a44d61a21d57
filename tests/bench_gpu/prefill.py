"""Prefill: on the device alone, copied to host memory, into the store; chunks and blocks."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import time
from pathlib import Path

import torch

from tests.bench_gpu.common import (
    DEVICE,
    KEY,
    PAPER,
    SHAPE,
    Row,
    fill,
    make_engine,
    median_ms,
    pool_of,
    random_ids,
)
from tsdoc.engine.engine import Engine
from tsdoc.engine.forward import chunk_bounds
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.kernels.kv import DevicePiece, MemoryPiece
from tsdoc.profile.disk import write_rate
from tsdoc.store import Store


def prefill(decoder: FusedDecoder, num_tokens: int, block: int, chunk: int) -> list[Row]:
    torch.cuda.reset_peak_memory_stats()
    engine = make_engine(decoder, dataclasses.replace(PAPER, chunk_size=chunk), num_tokens)
    ids = random_ids(num_tokens)
    pieces = [DevicePiece(start=0, capacity=num_tokens)]
    warm_up = ids[: min(num_tokens, 3 * block)]
    engine.prefill(pieces, warm_up, 0, prefill_block=block, on_block=lambda end: None)
    torch.cuda.synchronize()
    begun, marks = time.perf_counter(), []

    def on_block(end: int) -> None:
        marks.append((end, time.perf_counter() - begun))

    engine.prefill(pieces, ids, 0, prefill_block=block, on_block=on_block)
    torch.cuda.synchronize()
    total = time.perf_counter() - begun
    row: Row = {
        "what": f"prefill, block {block}, chunk {chunk}",
        "tokens": num_tokens,
        "total_s": total,
        "tokens_per_s": num_tokens / total,
        "peak_GB": torch.cuda.max_memory_allocated() / 1e9,
        "finite": bool(pool_of(engine).keys[-1][num_tokens - 4096 : num_tokens].isfinite().all()),
    }
    row |= {f"at_{end // 1024}k_s": t for end, t in marks if end in (131_072, 524_288, 1_048_576)}
    return [row]


def transfer(decoder: FusedDecoder, num_tokens: int) -> list[Row]:
    """Prefill with K and V copied to host memory behind it, and the way back."""
    ids = random_ids(num_tokens)
    config = decoder.config
    memory = MemoryPiece(
        start=0, capacity=num_tokens, num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, kv_dtype="bfloat16",
    )  # fmt: skip
    size = config.num_layers * memory.rows(0).nbytes
    rows: list[Row] = []
    for piece in (DevicePiece(start=0, capacity=num_tokens), memory):
        engine = make_engine(decoder, PAPER, num_tokens)
        for _ in range(2):  # the first touches the host's pages
            begun = time.perf_counter()
            engine.prefill([piece], ids, 0, prefill_block=8192, on_block=lambda end: None)
            torch.cuda.synchronize()
            total = time.perf_counter() - begun
        what = f"prefill, {'copied to' if piece.on_host else 'not in'} host memory"
        rows.append({"what": what, "tokens": num_tokens, "total_s": total, "GB": size / 1e9})
    pool_of(engine).resident = 0
    begun = time.perf_counter()
    engine.cache([memory]).load(num_tokens)
    total = time.perf_counter() - begun
    return [
        *rows,
        {"what": "load from host memory", "total_s": total, "GB_per_s": size / total / 1e9},
    ]


def store(decoder: FusedDecoder, num_tokens: int, block: int) -> list[Row]:
    """Prefill into a store, beside the rate at which the disk takes one large file."""
    ids = random_ids(num_tokens)
    size = SHAPE.token_bytes * num_tokens
    engine = make_engine(decoder, PAPER, num_tokens)
    warm_up = [DevicePiece(start=0, capacity=num_tokens)]
    engine.prefill(warm_up, ids[: 3 * block], 0, prefill_block=block, on_block=lambda end: None)
    with tempfile.TemporaryDirectory() as name:
        rates = [write_rate(Path(name), size)]
        kept = Store(Path(name) / "store", max_bytes=2 * size)
        begun = time.perf_counter()
        with kept.begin(KEY, SHAPE, ids, prefill_block=block, name="bench") as writer:
            engine.prefill(writer.pieces, ids, 0, prefill_block=block, on_block=writer.commit)
            committed = time.perf_counter() - begun
            writer.finish()
        total = time.perf_counter() - begun
        rates.append(write_rate(Path(name), size))
    disk = sum(rates) / 2
    return [
        {
            "what": "prefill into the store", "tokens": num_tokens, "GB": size / 1e9,
            "last_block_s": committed, "total_s": total, "GB_per_s": size / total / 1e9,
            "disk_GB_per_s": [round(rate / 1e9, 3) for rate in rates],
            "of_the_disk": size / total / disk,
        }
    ]  # fmt: skip


def trade(decoder: FusedDecoder, num_tokens: int) -> list[Row]:
    """One block, and one question of 512 tokens, behind `num_tokens`: sizes of chunk and block."""
    engine = make_engine(decoder, PAPER, num_tokens + 16_384)
    piece = DevicePiece(start=0, capacity=num_tokens + 16_384)
    engine.cache([piece])
    fill(pool_of(engine))
    rows: list[Row] = []
    for block, chunk in itertools.product((4096, 8192, 16_384), (256, 512, 1024)):
        config = dataclasses.replace(PAPER, chunk_size=chunk)
        part = Engine(
            decoder, config, max_tokens=num_tokens + 16_384, question_chunk_size=512,
            backend=engine.backend,
        )  # fmt: skip
        total = _block_ms(part, piece, num_tokens, block, chunk)
        rows.append(
            {
                "what": f"block {block}, chunk {chunk}", "tokens": num_tokens,
                "block_ms": total, "tokens_per_s": block / total * 1e3,
            }
        )  # fmt: skip
    for chunk in (64, 128, 256, 512):
        total = sum(
            _block_ms(engine, piece, first, last - first, chunk, logits=last == num_tokens + 512)
            for first, last in chunk_bounds(num_tokens, num_tokens + 512, chunk)
        )
        rows.append({"what": f"question of 512 in chunks of {chunk}", "first_token_ms": total})
    return rows


def _block_ms(
    engine: Engine, piece: DevicePiece, start: int, count: int, chunk: int, *, logits: bool = False
) -> float:
    """Milliseconds of [start, start + count) through all layers."""
    ids = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    chunks = chunk_bounds(start, start + count, chunk)
    cache = engine.cache([piece])

    def run() -> object:
        return engine.runner.run_chunks(cache, ids, start, chunks, need_logits=logits)

    return median_ms(run, 3)

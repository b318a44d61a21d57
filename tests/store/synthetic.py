"""A stand-in for the engine: K and V that depend on all tokens up to their own, and no others.

Run as a program it prefills one prompt and exits: the process that crash tests kill.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tsdoc.errors import CorruptPageError
from tsdoc.kernels.kv import KVArray, KVPiece
from tsdoc.store import KVShape, ModelKey, Store
from tsdoc.store.entry import Entry
from tsdoc.store.key import Ids
from tsdoc.store.writer import Writer

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=4, kv_dtype="bfloat16")
BLOCK = 512


def make_key(**changes: Any) -> ModelKey:
    fields: dict[str, Any] = {
        "model": "m",
        "rope": {"rope_type": "default", "theta": 10_000},
        "kv_dtype": "bfloat16",
        "compute_dtype": "float32",
        "n_init": 128,
        "n_local": 512,
        "top_k": 2048,
        "chunk_size": 128,
        "function": "head_soft_vote",
        "sets": "one",
        "smoothing": 1,
    }
    return ModelKey(**{**fields, **changes})


KEY = make_key()


def make_ids(num_tokens: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens).astype(np.int32)


def expected(ids: Ids, shape: KVShape = SHAPE) -> KVArray:
    """K and V of every token, [num_layers, num_tokens, 2, num_kv_heads, head_dim]."""
    running = np.cumsum(ids.astype(np.int64) * 2654435761 + 1)
    salt = np.arange(2 * shape.num_layers * shape.num_kv_heads * shape.head_dim)
    salt = salt.reshape(shape.num_layers, 1, 2, shape.num_kv_heads, shape.head_dim)
    mixed = (running.reshape(1, -1, 1, 1, 1) * 31 + salt * 7919) % 65_521
    if shape.kv_dtype == "float32":
        return (mixed / 7).astype(np.float32)
    return mixed.astype(np.uint16)


def write(pieces: Sequence[KVPiece], data: KVArray, start: int, end: int) -> None:
    for piece in pieces:
        first, last = max(start, piece.start), min(end, piece.start + piece.capacity)
        if first >= last:
            continue
        for layer in range(len(data)):
            inside = slice(first - piece.start, last - piece.start)
            piece.rows(layer)[inside] = data[layer, first:last]


def prefill(
    writer: Writer,
    ids: Ids,
    shape: KVShape = SHAPE,
    block: int = BLOCK,
    stop: int | None = None,
    on_block: Callable[[int], object] | None = None,
) -> None:
    """Writes and commits everything from `num_committed` on, or up to `stop`."""
    data = expected(ids, shape)
    end = len(ids) if stop is None else stop
    while writer.num_committed < end:
        start = writer.num_committed
        last = min(len(ids), (start // block + 1) * block)
        write(writer.pieces, data, start, last)
        writer.commit(last)
        if on_block is not None:
            on_block(last)


def build(
    store: Store,
    ids: Ids,
    key: ModelKey = KEY,
    shape: KVShape = SHAPE,
    block: int = BLOCK,
    name: str = "doc",
    meta: Mapping[str, Any] | None = None,
) -> tuple[Entry, int]:
    """Prefills and finishes; returns (entry, tokens reused)."""
    with store.begin(key, shape, ids, prefill_block=block, name=name, meta=meta) as writer:
        reused = writer.num_committed
        prefill(writer, ids, shape, block)
        return writer.finish(), reused


def reopen(store: Store, ids: Ids) -> Entry:
    """Opens what must be there."""
    entry = store.open(KEY, ids)
    assert entry is not None
    return entry


def read(holder: Entry | Writer, shape: KVShape = SHAPE) -> KVArray:
    """Everything an entry holds, checked as the engine would."""
    end = holder.parts[-1].end
    out = np.zeros((shape.num_layers, end, 2, shape.num_kv_heads, shape.head_dim), shape.dtype)
    for piece in holder.pieces:
        here = slice(piece.start, piece.start + piece.capacity)
        for layer in range(shape.num_layers):
            piece.check_range(layer, 0, end)
            out[layer, here, 0] = piece.keys(layer)
            out[layer, here, 1] = piece.values(layer)
    return out


def heal(
    store: Store, holder: Entry | Writer, shape: KVShape = SHAPE, block: int = BLOCK
) -> list[tuple[int, int]]:
    """Reads everything and repairs what is damaged; returns the ranges that were computed again."""
    repaired: list[tuple[int, int]] = []
    while True:
        try:
            read(holder, shape)
            return repaired
        except CorruptPageError as error:
            with store.repair(holder, error.start, error.end) as repair:
                data = expected(repair.ids, shape)
                while repair.num_committed < repair.end:
                    start = repair.num_committed
                    end = min(repair.end, (start // block + 1) * block)
                    write(repair.pieces, data, start, end)
                    repair.commit(end)
                    repaired.append((start, end))


def say(**event: object) -> None:
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def main() -> None:
    root, num_tokens, seed, delay_s = sys.argv[1:]
    ids = make_ids(int(num_tokens), int(seed))
    store = Store(Path(root))

    def on_block(end: int) -> None:
        say(committed=end)
        time.sleep(float(delay_s))

    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
        say(start=writer.num_committed)
        prefill(writer, ids, on_block=on_block)
        writer.finish().close()
    say(done=True)


if __name__ == "__main__":
    main()

"""Run as a program: makes the derived files of an entry, slowly; the process that tests kill."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.store.synthetic import make_ids, reopen
from tsdoc.kernels.kv import KVArray, LayerIndex
from tsdoc.store import KVShape, Store
from tsdoc.store.derive import derive

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, kv_dtype="bfloat16")
IDS = make_ids(1900, seed=3)


def plain_layer(layer: int, keys: KVArray) -> LayerIndex:
    """An index of the right shape that depends on the keys, without torch."""
    num_tokens, num_kv, head_dim = keys.shape
    codes = np.zeros((num_kv, -(-num_tokens // 256) * 128, 32), np.uint8)
    codes[:] = np.arange(32, dtype=np.uint8) + np.uint8(int(keys.astype(np.int64).sum()) % 251)
    return LayerIndex(
        centre=np.zeros((num_kv, head_dim), np.float32),
        axes=np.zeros((num_kv, head_dim, 32), np.float32),
        codes=codes,
    )


def slowly(delay_s: float) -> Callable[[int, KVArray], LayerIndex]:
    """`plain_layer`, so late that another process comes in between."""

    def make(layer: int, keys: KVArray) -> LayerIndex:
        time.sleep(delay_s)
        return plain_layer(layer, keys)

    return make


def main() -> None:
    root, delay_s = sys.argv[1:]
    with reopen(Store(Path(root)), IDS) as entry:
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        derive(entry.segments[0], slowly(float(delay_s)))


if __name__ == "__main__":
    main()

"""Rows copied out of and into a segment without its mapping, as a GPU's host does it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.store.synthetic import BLOCK, KEY, SHAPE, build, expected, make_ids, reopen
from tsdoc.errors import CorruptPageError, DamagedStoreError
from tsdoc.store import Store

IDS = make_ids(1900)
DATA = expected(IDS)
ROW = 2 * SHAPE.num_kv_heads * SHAPE.head_dim * 2
REGION = 61_440  # 1900 tokens of 32 bytes, padded


def room(num_tokens: int) -> npt.NDArray[np.uint16]:
    return np.full((num_tokens, 2, SHAPE.num_kv_heads, SHAPE.head_dim), 0xFFFF, np.uint16)


@pytest.fixture
def kv_file(store: Store, root: Path) -> Path:
    build(store, IDS)[0].close()
    return next(root.rglob("kv.bin"))


@pytest.mark.parametrize(("start", "end"), [(0, 1900), (0, 1), (255, 257), (256, 512), (700, 1899)])
def test_any_range_is_copied_as_it_was_written(
    store: Store, kv_file: Path, start: int, end: int
) -> None:
    with reopen(store, IDS) as entry:
        out = room(end - start)
        entry.pieces[0].read(1, start, out)
    assert np.array_equal(out, DATA[1, start:end])


@pytest.mark.parametrize(("start", "end"), [(512, 1024), (600, 700), (767, 769)])
def test_a_damaged_page_is_named_whether_it_is_copied_whole_or_in_part(
    store: Store, kv_file: Path, start: int, end: int
) -> None:
    with kv_file.open("r+b") as file:
        file.seek(REGION + 600 * ROW + 16)  # V of layer 1, token 600: page 2
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    with reopen(store, IDS) as entry:
        piece = entry.pieces[0]
        with pytest.raises(CorruptPageError, match="page 2 of layer 1 does") as caught:
            piece.read(1, start, room(end - start))
        assert (caught.value.start, caught.value.end) == (512, 1024)
        piece.read(1, 768, room(256))
        piece.read(0, start, room(end - start))


def test_a_file_cut_while_it_is_open_is_a_typed_error(store: Store, kv_file: Path) -> None:
    with reopen(store, IDS) as entry:
        with kv_file.open("r+b") as file:
            file.truncate(REGION + 100)
        with pytest.raises(DamagedStoreError, match="was cut"):
            entry.pieces[0].read(1, 0, room(1900))


def test_rows_written_without_the_mapping_are_committed_and_read_back_through_it(
    store: Store, root: Path
) -> None:
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        (piece,) = writer.pieces
        while writer.num_committed < len(IDS):
            start = writer.num_committed
            end = min(start + BLOCK, len(IDS))
            for layer in range(SHAPE.num_layers):
                piece.write(layer, start, DATA[layer, start:end])
            writer.commit(end)
        writer.finish().close()
    with reopen(store, IDS) as entry:
        (piece,) = entry.pieces
        for layer in range(SHAPE.num_layers):
            piece.check_range(layer, 0, len(IDS))
            piece.check_rows(layer, np.arange(len(IDS)))
            assert np.array_equal(piece.keys(layer), DATA[layer, :, 0])
            assert np.array_equal(piece.values(layer), DATA[layer, :, 1])


def test_a_page_that_is_rewritten_in_part_is_committed_as_it_is_then(
    store: Store, root: Path
) -> None:
    """As when a block was given up after it was written, and its rows come in other parts."""
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        (piece,) = writer.pieces
        for layer in range(SHAPE.num_layers):
            piece.write(layer, 0, np.zeros_like(DATA[layer, :BLOCK]))
            for start, end in [(0, 200), (200, 300), (300, BLOCK)]:
                piece.write(layer, start, DATA[layer, start:end])
        writer.commit(BLOCK)
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        assert writer.num_committed == BLOCK
        out = room(BLOCK)
        writer.pieces[0].read(1, 0, out)
    assert np.array_equal(out, DATA[1, :BLOCK])

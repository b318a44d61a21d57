"""Damage to KV pages, cut files and a failing disk: named before use, and only that repaired."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import Warnings
from tests.store.damage import IDS, ask, failing_at, find, flip
from tests.store.synthetic import (
    BLOCK,
    KEY,
    SHAPE,
    build,
    expected,
    heal,
    make_ids,
    prefill,
    read,
    reopen,
)
from tsdoc.errors import CorruptPageError, DamagedStoreError
from tsdoc.store import Store
from tsdoc.store.writer import Writer

WriteAt = Callable[[int, bytes, int], int]

ROW = SHAPE.row_bytes
REGION = 61_440  # 1900 tokens of 32 bytes, padded


def test_a_flipped_bit_in_kv_is_named_and_only_its_block_computed_again(
    store: Store, built: Path, warnings: Warnings
) -> None:
    path = find(built, "kv.bin")
    flip(path, REGION + 700 * ROW + 16)  # V of layer 1, token 700
    with reopen(store, IDS) as entry:
        entry.pieces[0].check_rows(1, np.array([0, 255, 256, 511, 768, 1899]))
        with pytest.raises(CorruptPageError, match="page 2 of layer 1") as caught:
            entry.pieces[0].check_rows(1, np.array([700]))
    assert (caught.value.start, caught.value.end) == (512, 1024)
    assert str(path) in str(caught.value)
    assert ask(store) == [(512, 1024)]
    assert ask(Store(built)) == []
    assert not warnings


def test_a_page_is_checked_once_per_open_entry(
    store: Store, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reopen(store, IDS) as entry:
        read(entry)
        monkeypatch.setattr("tsdoc.store.pages.Segment.read_page", None)
        read(entry)


def test_what_this_run_wrote_is_not_read_again_to_check_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, _ = build(store, IDS)
    monkeypatch.setattr("tsdoc.store.pages.Segment.read_page", None)
    read(entry)


def test_a_committed_block_that_rots_before_a_resumed_run_is_repaired_through_the_writer(
    store: Store, root: Path
) -> None:
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=1024)
    flip(find(root, "kv.bin"), 600 * ROW)
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        piece = writer.pieces[0]
        piece.check_range(0, 0, 512)
        piece.check_range(0, 1024, 1900)  # not written yet: nothing to check
        with pytest.raises(CorruptPageError) as caught:
            piece.check_range(0, 0, 1024)
        assert (caught.value.start, caught.value.end) == (512, 1024)
        with store.repair(writer, 512, 1024) as repair:
            assert repair.num_committed == 512
            data = expected(repair.ids)
            repair.pieces[-1].rows(0)[512:1024] = data[0, 512:1024]
            repair.commit(1024)
        piece.check_range(0, 0, 1024)
        prefill(writer, IDS)
        entry = writer.finish()
    assert np.array_equal(read(entry), expected(IDS))


def test_a_damaged_block_of_a_parent_is_repaired_with_the_parents_own_tokens(
    store: Store, root: Path
) -> None:
    """The child shares only a part of the block; the rest must stay right for the parent."""
    child = np.concatenate([IDS[:640], make_ids(500, seed=4)])
    build(store, IDS)[0].close()
    path = find(root, "kv.bin")
    build(store, child)[0].close()
    flip(path, 600 * ROW)
    assert ask(store, child) == [(512, 1024)]
    assert ask(store, IDS) == []


def test_a_block_that_another_process_repaired_is_not_computed_again(
    store: Store, built: Path
) -> None:
    flip(find(built, "kv.bin"), 0)
    with reopen(store, IDS) as first, reopen(store, IDS) as second:
        assert heal(store, first) == [(0, 512)]
        assert heal(store, second) == []
        assert np.array_equal(read(second), expected(IDS))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_repair_that_meets_an_earlier_bad_block_repairs_that_first(
    store: Store, root: Path, resumed: bool
) -> None:
    """As the session does it: inside the repair of a block, the repair of an earlier one."""
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=1536)
        if not resumed:
            prefill(writer, IDS)
            writer.finish().close()
    flip(find(root, "kv.bin"), 100 * ROW)
    flip(find(root, "kv.bin"), 1100 * ROW)
    holder = (
        store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc")
        if resumed
        else reopen(store, IDS)
    )
    data = expected(IDS)
    with holder:
        with store.repair(holder, 1024, 1536) as later:
            with pytest.raises(CorruptPageError) as caught:
                later.pieces[-1].check_range(0, 0, 1024)
            with store.repair(holder, caught.value.start, caught.value.end) as earlier:
                earlier.pieces[-1].rows(0)[0:512] = data[0, 0:512]
                earlier.commit(512)
            later.pieces[-1].check_range(0, 0, 1536)
            later.pieces[-1].rows(0)[1024:1536] = data[0, 1024:1536]
            later.commit(1536)
        for piece in holder.pieces:
            piece.check_range(0, 0, 1536)
        if isinstance(holder, Writer):
            prefill(holder, IDS)
            holder.finish().close()
    assert ask(store) == []


def test_verify_names_every_damaged_block_once(store: Store, built: Path) -> None:
    for token in (0, 1, 600, 1899):
        flip(find(built, "kv.bin"), token * ROW)
    done = []
    with store.load(store.list()[0].entry_id) as entry:
        errors = store.verify(entry, lambda *progress: done.append(progress))
        assert sorted((e.start, e.end) for e in errors) == [(0, 512), (512, 1024), (1536, 1900)]
        assert done[-1] == (16, 16)
        for error in errors:
            with store.repair(entry, error.start, error.end) as repair:
                data = expected(repair.ids)
                for layer in range(2):
                    rows = slice(error.start, error.end)
                    repair.pieces[0].rows(layer)[rows] = data[layer, rows]
                repair.commit(error.end)
        assert store.verify(entry) == []


def test_a_journal_record_that_rots_costs_its_block_alone(store: Store, built: Path) -> None:
    path = find(built, "journal.bin")
    record = (path.stat().st_size - 48) // 4
    flip(path, 48 + record + 60)
    assert ask(store) == [(512, 1024)]


def test_a_page_that_the_disk_cannot_read_is_named_and_computed_again(
    store: Store, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read, real_write = os.pread, os.pwrite
    bad = set(range(REGION + 600 * ROW, REGION + 900 * ROW))  # layer 1
    monkeypatch.setattr(os, "pread", failing_at(bad, real_read))
    monkeypatch.setattr(os, "pwrite", writing_mends(bad, real_write))
    with reopen(store, IDS) as entry:
        entry.pieces[0].check_range(0, 0, 1900)
        with pytest.raises(CorruptPageError, match="layer 1 cannot be read") as caught:
            entry.pieces[0].check_range(1, 0, 1900)
    assert (caught.value.start, caught.value.end) == (512, 1024)
    assert ask(store) == [(512, 1024)]
    assert not bad
    assert ask(Store(built)) == []


def writing_mends(bad: set[int], real: WriteAt) -> WriteAt:
    def pwrite(fd: int, data: bytes, offset: int) -> int:
        written = real(fd, data, offset)
        bad.difference_update(range(offset, offset + written))
        return written

    return pwrite


@pytest.mark.parametrize("size", [0, 4096, REGION * 2 - 1])
def test_a_file_that_is_cut_while_it_is_open_is_an_error_before_each_use(
    store: Store, built: Path, size: int
) -> None:
    path = find(built, "kv.bin")
    with reopen(store, IDS) as entry:
        read(entry)
        os.truncate(path, size)
        for check in (
            lambda: entry.pieces[0].check_range(0, 0, 10),
            lambda: entry.pieces[0].check_rows(1, np.array([1, 1899])),
        ):
            with pytest.raises(DamagedStoreError, match="was cut to"):
                check()
    assert ask(store) == []  # computed as a new segment


def test_a_file_that_is_cut_while_it_is_written_is_not_committed(store: Store, root: Path) -> None:
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=512)
        os.truncate(find(root, "kv.bin"), 40_000)
        with pytest.raises(DamagedStoreError, match="was cut to"):
            writer.commit(1024)
    ask(store)
    assert len(list(root.rglob("kv.bin"))) == 1


def test_pages_are_checked_ahead_and_what_is_damaged_is_left_to_its_user(
    store: Store, built: Path
) -> None:
    flip(find(built, "kv.bin"), REGION + 600 * ROW)  # layer 1
    with reopen(store, IDS) as entry:
        entry.check_ahead()
        entry.check_ahead()
        assert entry._checking is not None
        entry._checking.join()
        verified = entry.segments[0].verified
        assert verified[0].all()
        assert np.flatnonzero(~verified[1]).tolist() == [2]
        with pytest.raises(CorruptPageError, match="page 2 of layer 1 does"):
            entry.pieces[0].check_range(1, 0, 1900)
        assert heal(store, entry) == [(512, 1024)]


def test_an_entry_can_be_closed_while_it_is_checked_ahead(store: Store) -> None:
    build(store, make_ids(60_000))[0].close()
    for _ in range(5):
        entry = reopen(store, make_ids(60_000))
        entry.check_ahead()
        entry.close()
        assert entry._checking is not None
        assert not entry._checking.is_alive()

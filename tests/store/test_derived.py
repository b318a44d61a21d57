"""index.bin and units.bin: made from K and V, trusted only where they fit, and never needed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.store.damage import failing_at, flip
from tests.store.synthetic import KEY, build, expected, make_ids, read, reopen
from tsdoc.errors import CorruptPageError, DamagedStoreError, StoreError
from tsdoc.kernels.kv import KVArray, LayerIndex
from tsdoc.kernels.piece_rows import as_tensor
from tsdoc.kernels.torch_index import make_layer_index
from tsdoc.store import KVShape, Store
from tsdoc.store.derive import derive, derived_bytes, has_index, is_derivable
from tsdoc.store.entry import Entry
from tsdoc.store.pages import Segment
from tsdoc.store.segment import DERIVED_FILES
from tsdoc.store.units import units_header

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=64, kv_dtype="bfloat16")
IDS = make_ids(1900, seed=3)
ROW = SHAPE.row_bytes  # 512: a unit is 8 tokens
REGION = -(-1900 * ROW // 4096) * 4096


def make_layer(layer: int, keys: KVArray) -> LayerIndex:
    return make_layer_index(as_tensor(keys).clone())


@pytest.fixture
def entry(store: Store) -> Iterator[Entry]:
    """An entry with both files, opened anew."""
    built, _ = build(store, IDS, shape=SHAPE)
    with built:
        derive(built.segments[0], make_layer)
    with reopen(store, IDS) as opened:
        yield opened


def path_of(entry: Entry, name: str) -> Path:
    return entry.segments[0].directory / name


def test_they_are_found_by_the_next_process(entry: Entry) -> None:
    segment = entry.segments[0]
    assert has_index(segment)
    layer = entry.pieces[0].index(1)
    codes = make_layer(1, entry.pieces[0].keys(1)).codes
    assert layer is not None
    assert np.array_equal(layer.codes, codes)
    assert not layer.codes.flags.writeable
    sizes = sum(path_of(entry, name).stat().st_size for name in DERIVED_FILES)
    assert derived_bytes(segment) <= sizes <= derived_bytes(segment) + 4096


def test_a_row_is_checked_without_its_page(entry: Entry) -> None:
    piece, segment = entry.pieces[0], entry.segments[0]
    piece.check_rows(1, np.array([0, 17, 700, 1899]))
    assert not segment.verified.any()
    assert np.array_equal(read(entry, SHAPE), expected(IDS, SHAPE))


def test_a_damaged_row_is_noticed_and_what_lies_beside_it_is_used(
    store: Store, entry: Entry
) -> None:
    flip(path_of(entry, "kv.bin"), REGION + 700 * ROW + 256 + 9)  # V of layer 1, token 700
    with reopen(store, IDS) as opened:
        piece = opened.pieces[0]
        piece.check_rows(1, np.array([5, 695, 704]))  # of the same page, other units
        for positions in ([700], [3, 703, 1800], [696]):
            with pytest.raises(CorruptPageError, match="page 2 of layer 1") as caught:
                piece.check_rows(1, np.array(positions))
            assert (caught.value.start, caught.value.end) == (512, 1024)


def test_damaged_units_cost_time_alone(store: Store, entry: Entry) -> None:
    path = path_of(entry, "units.bin")
    data = path.read_bytes()
    generator = np.random.default_rng(1)
    for offset in [*range(0, 48, 5), *generator.integers(48, len(data), 40).tolist()]:
        flip(path, offset)
        with reopen(store, IDS) as opened:
            for layer in range(2):
                opened.pieces[0].check_rows(layer, np.arange(0, 1900, 7))
        path.write_bytes(data)
    for size in (0, 47, 48, len(data) - 8):
        path.write_bytes(data[:size])
        with reopen(store, IDS) as opened:
            opened.pieces[0].check_rows(0, np.array([1, 1800]))
            assert opened.segments[0].verified[0, [0, 7]].all()
            with pytest.raises(DamagedStoreError, match="missing or damaged"):
                has_index(opened.segments[0])


def test_units_hide_no_damage_whatever_is_wrong_with_both_files(store: Store, entry: Entry) -> None:
    flip(path_of(entry, "kv.bin"), 700 * ROW)
    for offset in range(48, path_of(entry, "units.bin").stat().st_size, 97):
        flip(path_of(entry, "units.bin"), offset)
    with reopen(store, IDS) as opened, pytest.raises(CorruptPageError):
        opened.pieces[0].check_rows(0, np.array([700]))


def test_a_damaged_index_is_refused_and_no_index_is_used(store: Store, entry: Entry) -> None:
    path = path_of(entry, "index.bin")
    data = path.read_bytes()
    # The padding behind the header is compared too; that behind a layer is under its checksum.
    for offset in np.random.default_rng(2).integers(0, len(data), 40).tolist():
        flip(path, offset)
        with reopen(store, IDS) as opened:
            with pytest.raises(DamagedStoreError, match="checksum"):
                has_index(opened.segments[0])
            assert opened.pieces[0].index(0) is None
        path.write_bytes(data)
    for size in (0, 100, len(data) - 1, len(data) + 1):
        path.write_bytes(data[:size].ljust(size, b"\0"))
        with reopen(store, IDS) as opened, pytest.raises(DamagedStoreError, match="size"):
            has_index(opened.segments[0])


def test_an_index_of_another_version_is_as_good_as_none(store: Store, entry: Entry) -> None:
    path = path_of(entry, "index.bin")
    good = path.read_bytes()
    path.write_bytes(good[:8] + (1).to_bytes(8, "little") + good[16:-4096])
    with reopen(store, IDS) as opened:
        assert not has_index(opened.segments[0])
        assert opened.pieces[0].index(0) is None
        derive(opened.segments[0], make_layer)
        assert has_index(opened.segments[0])
    assert path.read_bytes() == good


def test_units_of_another_version_are_as_good_as_none(
    store: Store, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(entry, "units.bin")
    data = path.read_bytes()
    with monkeypatch.context() as patches:
        patches.setattr("tsdoc.store.units.VERSION", 1)
        header = units_header(entry.segments[0].info)
    path.write_bytes(header + data[len(header) :])
    with reopen(store, IDS) as opened:
        assert opened.segments[0].units() is None
        opened.pieces[0].check_rows(0, np.array([3]))


def test_another_segments_files_are_refused(store: Store, entry: Entry) -> None:
    other, _ = build(store, make_ids(1900, seed=4), shape=SHAPE)
    with other:
        derive(other.segments[0], make_layer)
        for name in DERIVED_FILES:
            path_of(entry, name).write_bytes((other.segments[0].directory / name).read_bytes())
    with reopen(store, IDS) as opened:
        with pytest.raises(DamagedStoreError):
            has_index(opened.segments[0])
        assert opened.segments[0].units() is None
        opened.pieces[0].check_rows(0, np.arange(1900))


def test_links_are_not_followed(store: Store, entry: Entry, tmp_path: Path) -> None:
    for name in DERIVED_FILES:
        path = path_of(entry, name)
        path.rename(tmp_path / name)
        path.symlink_to(tmp_path / name)
    with reopen(store, IDS) as opened:
        with pytest.raises(DamagedStoreError, match="link"):
            has_index(opened.segments[0])
        assert opened.segments[0].units() is None


def test_damage_met_while_they_are_made_is_named(store: Store) -> None:
    built, _ = build(store, IDS, shape=SHAPE)
    built.close()
    flip(built.segments[0].path, REGION + 600 * ROW)
    with reopen(store, IDS) as opened:
        with pytest.raises(CorruptPageError):
            derive(opened.segments[0], make_layer)
        assert not any(path_of(opened, name).exists() for name in DERIVED_FILES)
        assert not list(opened.segments[0].directory.glob(".tmp-*"))


def test_what_the_disk_cannot_read_any_more_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of pages that were good when they were first used."""
    built, _ = build(store, IDS, shape=SHAPE)
    read(built, SHAPE)
    bad = set(range(REGION + 600 * ROW, REGION + 601 * ROW))  # layer 1
    rows = np.empty((1900, 2, 2, 64), np.uint16)
    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, failing_at(bad, getattr(os, name)))
    for use in (
        lambda: derive(built.segments[0], make_layer),
        lambda: built.pieces[0].read(1, 0, rows),
    ):
        with pytest.raises(CorruptPageError, match="cannot be read") as caught:
            use()
        assert (caught.value.start, caught.value.end) == (512, 1024)


def temporary_files(segment: Segment) -> list[str]:
    return [path.name for path in segment.directory.iterdir() if path.name.startswith(".tmp-")]


def test_others_clean_up_while_they_are_written(store: Store, root: Path) -> None:
    """What is being written stays; what a killed run has left goes."""
    built, _ = build(store, IDS, shape=SHAPE)
    segment = built.segments[0]
    own: list[list[str]] = []
    (segment.directory / f".tmp-{'0' * 16}").write_bytes(b"left by a run that was killed")

    def make(layer: int, keys: KVArray) -> LayerIndex:
        own.append(temporary_files(segment))
        Store(root).prune()
        with Store(root).begin(KEY, SHAPE, make_ids(300), prefill_block=512, name="other"):
            own.append(temporary_files(segment))
        return make_layer(layer, keys)

    with built:
        derive(segment, make)
        assert has_index(segment)
    assert len(own) == 4
    assert all(names == own[0] for names in own)
    assert own[0] != [f".tmp-{'0' * 16}"]
    assert temporary_files(segment) == []


def test_what_a_killed_run_has_left_goes_with_the_next_clean_up(store: Store) -> None:
    built, _ = build(store, IDS, shape=SHAPE)
    with built:
        (built.segments[0].directory / f".tmp-{'0' * 16}").write_bytes(b"left")
        store.prune()
        assert temporary_files(built.segments[0]) == []


def test_a_store_that_cannot_be_written_says_so(
    store: Store, entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> NoReturn:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("tsdoc.store.replacing.open_file", refuse)
    with pytest.raises(StoreError, match="Read-only"):
        derive(entry.segments[0], make_layer)


def test_they_count_and_go_with_their_segment(store: Store, root: Path, entry: Entry) -> None:
    before = store.num_bytes()
    held = sum(path_of(entry, name).stat().st_size for name in DERIVED_FILES)
    for name in DERIVED_FILES:
        path_of(entry, name).unlink()
    assert store.num_bytes() == before - held
    derive(entry.segments[0], make_layer)
    entry.close()
    store.remove([entry.entry_id])
    assert not list(root.rglob("*.bin"))


def test_segments_that_begin_inside_a_page_have_them_too(store: Store) -> None:
    """A child's segment begins at a chunk's end, here 128 tokens into a page."""
    parent, _ = build(store, IDS[:1300], shape=SHAPE)
    parent.close()
    child, reused = build(store, IDS, shape=SHAPE)
    assert reused == 1280
    with child:
        own = child.segments[-1]
        assert is_derivable(own)
        derive(own, make_layer)
    with reopen(store, IDS) as opened:
        own = opened.segments[-1]
        assert has_index(own)
        positions = np.array([1280, 1290, 1500, 1899])
        opened.pieces[-1].check_rows(1, positions)
        assert not own.verified.any()
        rows = own.rows(1)[positions - 1280]
        assert np.array_equal(rows, expected(IDS, SHAPE)[1, positions])


def test_what_is_not_all_committed_has_none(store: Store) -> None:
    with store.begin(KEY, SHAPE, IDS, prefill_block=512, name="doc") as writer:
        assert not is_derivable(writer.segments[0])


def test_stores_without_them_work(store: Store, root: Path) -> None:
    built, _ = build(store, IDS, shape=SHAPE)
    built.close()
    with reopen(Store(root), IDS) as opened:
        assert opened.pieces[0].index(0) is None
        assert not has_index(opened.segments[0])
        opened.pieces[0].check_rows(0, np.array([3, 1899]))
        assert opened.segments[0].verified[0].sum() == 2

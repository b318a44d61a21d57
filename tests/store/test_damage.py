import errno
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

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
)
from tsdoc.errors import CorruptPageError, DamagedStoreError, StoreError, StoreFormatError
from tsdoc.kernels.kv import VALUES
from tsdoc.store import Store
from tsdoc.store.files import write_json
from tsdoc.store.key import FORMAT

IDS = make_ids(1900)
FILES = ["segment.json", "kv.bin", "journal.bin", "tokens.bin", "manifest.json", "model.json"]


@pytest.fixture
def built(store, root):
    build(store, IDS, meta={"sources": ["doc.txt"]})[0].close()
    return root


def find(root, name):
    return next(root.rglob(name))


def flip(path, offset, bit=1):
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= bit
    path.write_bytes(bytes(data))


def ask(store, ids=IDS):
    """What a session does: open or prefill, and repair what turns out to be damaged."""
    entry = store.open(KEY, ids)
    if entry is None:
        with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
            prefill(writer, ids)
            entry = writer.finish()
    with entry:
        repaired = heal(store, entry)
        assert np.array_equal(entry.ids, ids)
        assert np.array_equal(read(entry), expected(ids))
    return repaired


def test_a_flipped_bit_in_kv_is_named_and_only_its_block_computed_again(store, built, warnings):
    path = find(built, "kv.bin")
    region = 32_768  # 1900 tokens of 16 bytes, padded
    flip(path, region * 3 + 700 * 16)  # V of layer 1, token 700
    with store.open(KEY, IDS) as entry:
        entry.pieces[0].check_rows(1, VALUES, np.array([0, 255, 256, 511, 768, 1899]))
        with pytest.raises(CorruptPageError, match="page 2 of layer 1") as caught:
            entry.pieces[0].check_rows(1, VALUES, np.array([700]))
    assert (caught.value.start, caught.value.end) == (512, 1024)
    assert str(path) in str(caught.value)
    assert ask(store) == [(512, 1024)]
    assert ask(Store(built)) == []
    assert not warnings


def test_a_page_is_checked_once_per_open_entry(store, built, monkeypatch):
    with store.open(KEY, IDS) as entry:
        read(entry)
        monkeypatch.setattr("tsdoc.store.pages.Segment.read_page", None)
        read(entry)


def test_what_this_run_wrote_is_not_read_again_to_check_it(store, monkeypatch):
    entry, _ = build(store, IDS)
    monkeypatch.setattr("tsdoc.store.pages.Segment.read_page", None)
    read(entry)


def test_a_committed_block_that_rots_before_a_resumed_run_is_repaired_through_the_writer(
    store, root
):
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=1024)
    flip(find(root, "kv.bin"), 600 * 16)
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        piece = writer.pieces[0]
        piece.check_keys(0, 0, 512)
        piece.check_keys(0, 1024, 1900)  # not written yet: nothing to check
        with pytest.raises(CorruptPageError) as caught:
            piece.check_keys(0, 0, 1024)
        assert (caught.value.start, caught.value.end) == (512, 1024)
        with store.repair(writer, 512, 1024) as repair:
            assert repair.num_committed == 512
            data = expected(repair.ids)
            repair.pieces[-1].keys(0)[512:1024] = data[0, 0, 512:1024]
            repair.commit(1024)
        piece.check_keys(0, 0, 1024)
        prefill(writer, IDS)
        entry = writer.finish()
    assert np.array_equal(read(entry), expected(IDS))


def test_a_damaged_block_of_a_parent_is_repaired_with_the_parents_own_tokens(store, root):
    """The child shares only a part of the block; the rest must stay right for the parent."""
    child = np.concatenate([IDS[:640], make_ids(500, seed=4)])
    build(store, IDS)[0].close()
    path = find(root, "kv.bin")
    build(store, child)[0].close()
    flip(path, 600 * 16)
    assert ask(store, child) == [(512, 1024)]
    assert ask(store, IDS) == []


def test_a_block_that_another_process_repaired_is_not_computed_again(store, built):
    flip(find(built, "kv.bin"), 0)
    with store.open(KEY, IDS) as first, store.open(KEY, IDS) as second:
        assert heal(store, first) == [(0, 512)]
        assert heal(store, second) == []
        assert np.array_equal(read(second), expected(IDS))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_repair_that_meets_an_earlier_bad_block_repairs_that_first(store, root, resumed):
    """As the session does it: inside the repair of a block, the repair of an earlier one."""
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=1536)
        if not resumed:
            prefill(writer, IDS)
            writer.finish().close()
    flip(find(root, "kv.bin"), 100 * 16)
    flip(find(root, "kv.bin"), 1100 * 16)
    holder = (
        store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc")
        if resumed
        else store.open(KEY, IDS)
    )
    data = expected(IDS)
    with holder:
        with store.repair(holder, 1024, 1536) as later:
            with pytest.raises(CorruptPageError) as caught:
                later.pieces[-1].check_keys(0, 0, 1024)
            with store.repair(holder, caught.value.start, caught.value.end) as earlier:
                earlier.pieces[-1].keys(0)[0:512] = data[0, 0, 0:512]
                earlier.commit(512)
            later.pieces[-1].check_keys(0, 0, 1536)
            later.pieces[-1].keys(0)[1024:1536] = data[0, 0, 1024:1536]
            later.commit(1536)
        for piece in holder.pieces:
            piece.check_keys(0, 0, 1536)
        if resumed:
            prefill(holder, IDS)
            holder.finish().close()
    assert ask(store) == []


def test_verify_names_every_damaged_block_once(store, built):
    for token in (0, 1, 600, 1899):
        flip(find(built, "kv.bin"), token * 16)
    done = []
    with store.load(store.list()[0].entry_id) as entry:
        errors = store.verify(entry, lambda *progress: done.append(progress))
        assert sorted((e.start, e.end) for e in errors) == [(0, 512), (512, 1024), (1536, 1900)]
        assert done[-1] == (32, 32)
        for error in errors:
            with store.repair(entry, error.start, error.end) as repair:
                data = expected(repair.ids)
                for layer in range(2):
                    rows = slice(error.start, error.end)
                    repair.pieces[0].keys(layer)[rows] = data[layer, 0, rows]
                repair.commit(error.end)
        assert store.verify(entry) == []


def test_a_journal_record_that_rots_costs_its_block_alone(store, built):
    path = find(built, "journal.bin")
    record = (path.stat().st_size - 48) // 4
    flip(path, 48 + record + 60)
    assert ask(store) == [(512, 1024)]


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_noticed(store, built, warnings, name, share):
    path = find(built, name)
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    repaired = ask(store)
    assert warnings or repaired or name == "model.json"
    assert ask(Store(built)) == []
    assert [e.status for e in store.list()] == ["complete"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(store, built, name):
    find(built, name).unlink()
    ask(store)
    assert ask(Store(built)) == []
    assert [e.status for e in store.list()] == ["complete"]


@pytest.mark.parametrize("name", FILES[:5])
def test_files_swapped_between_two_entries_are_noticed(store, built, name):
    other = make_ids(1900, seed=1)
    build(store, other)[0].close()
    first, second = sorted(built.rglob(name))
    spare = built.parent / "spare"
    shutil.copy(first, spare)
    shutil.copy(second, first)
    shutil.copy(spare, second)
    for ids in (IDS, other):
        ask(store, ids)
        assert ask(Store(built), ids) == []


@pytest.mark.parametrize("kind", ["segments", "entries"])
def test_directories_swapped_between_two_entries_are_noticed(store, built, kind):
    other = make_ids(1900, seed=1)
    build(store, other)[0].close()
    first, second = sorted(next(built.rglob(kind)).iterdir())
    spare = built.parent / "spare"
    first.rename(spare)
    second.rename(first)
    spare.rename(second)
    for ids in (IDS, other):
        ask(store, ids)
        assert ask(Store(built), ids) == []


ABSURD = [-1, 0, 1, 7, 2**31, 2**63, 10**400, 1.5, None, True, "", "x", [], {}, [[]], "0" * 32]


@pytest.mark.parametrize("name", ["segment.json", "manifest.json"])
def test_absurd_values_are_refused_even_with_a_right_checksum(store, built, name):
    path = find(built, name)
    original = json.loads(path.read_text())
    kind = original["kind"]
    harmless = {"name", "created", "meta", "prefill_block", "kind", "format", "checksum"}
    for field in sorted(set(original) - harmless):
        for value in ABSURD:
            write_json(path, kind, {**original, field: value})
            entry = store.open(KEY, IDS)
            if entry is not None:
                assert original[field] == value or field == "chunk_size"
                entry.close()
            store.list()
            store.find(KEY, IDS)
    for value in ABSURD:
        write_json(path, kind, {**original, "created": value})
        store.list()
    ask(store)


@pytest.mark.parametrize("where", ["segment_id", "start", "end"])
def test_absurd_chains_are_refused_even_with_a_right_checksum(store, built, where):
    path = find(built, "manifest.json")
    original = json.loads(path.read_text())
    for value in ABSURD:
        if value == original["segments"][0][where]:
            continue
        segments = [{**original["segments"][0], where: value}]
        write_json(path, "entry", {**original, "segments": segments})
        assert store.open(KEY, IDS) is None
        store.list()
    ask(store)


def mutate(root, chance):
    """Damages one file of the store in one of eight ways; returns what was done."""
    paths = sorted(p for p in root.rglob("*") if p.is_file() and p.stat().st_size)
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    at = chance.randrange(len(data))
    kind = chance.choice(["flip", "byte", "zeros", "cut", "empty", "longer", "missing", "swap"])
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        data[at] = chance.randrange(256)
    elif kind == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "cut":
        del data[at:]
    elif kind == "empty":
        data.clear()
    elif kind == "longer":
        data += chance.randbytes(chance.randrange(1, 200))
    elif kind == "swap":
        other = chance.choice([p for p in paths if p.name == path.name])
        data[:], old = other.read_bytes(), bytes(data)
        other.write_bytes(old)
    if kind == "missing":
        path.unlink()
    else:
        path.write_bytes(bytes(data))
    return kind, path.name


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("count", "seed"), [(100, 1), pytest.param(2000, 2, marks=pytest.mark.slow)]
)
def test_random_damage_anywhere_never_changes_what_is_read(store, built, count, seed):
    chance = random.Random(seed)
    child = np.concatenate([IDS[:1280], make_ids(500, seed=4)])
    for _ in range(count):
        try:
            ask(store, IDS)
            ask(store, child)
        except StoreFormatError as error:  # the one digit that says "not yours": refused by name
            assert error.version > FORMAT
            Path(error.where).unlink()
        mutate(built, chance)
    ask(store, IDS)
    ask(store, child)
    assert [e.status for e in store.list()].count("complete") == 2


def test_a_newer_format_is_left_alone_and_said(store, built, warnings):
    path = find(built, "manifest.json")
    text = path.read_text().replace('"format": 1', '"format": 2')
    path.write_text(text)
    assert store.open(KEY, IDS) is None
    assert store.find(KEY, IDS).reused_tokens == 0
    assert "store_format" in warnings.codes
    with pytest.raises(StoreError, match="newer"):
        store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc")
    assert [e.status for e in store.list()] == ["newer"]
    store.prune(0)
    with pytest.raises(StoreError, match="newer"):
        store.remove([store.list()[0].entry_id])
    assert path.read_text() == text
    assert len(list(built.rglob("kv.bin"))) == 1


def test_an_older_format_is_listed_as_stale_and_goes_first(store, built):
    build(store, make_ids(300, seed=8))[0].close()
    path = find(built, "manifest.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    assert "stale" in [e.status for e in store.list()]
    gone = store.prune(store.num_bytes() - 1)
    assert gone[0].status == "stale"
    ask(store)


def test_an_older_manifest_is_replaced_when_its_document_returns(store, built, warnings):
    path = find(built, "manifest.json")
    path.write_text(path.read_text().replace('"format": 1', '"format": 0'))
    ask(store)
    assert "store_format" in warnings.codes
    assert [e.status for e in store.list()] == ["complete"]


def test_links_are_not_followed(store, built, tmp_path):
    path = find(built, "kv.bin")
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = outside.read_bytes()
    ask(store)
    assert outside.read_bytes() == before
    assert not find(built, "kv.bin").is_symlink()


def test_a_link_in_place_of_the_store_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    store = Store(tmp_path / "store")
    for call in (store.list, lambda: store.find(KEY, IDS), lambda: store.open(KEY, IDS)):
        with pytest.raises(StoreError, match="link"):
            call()
    with pytest.raises(StoreError, match="link"):
        build(store, IDS)


def test_a_foreign_owner_is_refused(built, monkeypatch):
    monkeypatch.setattr("os.getuid", lambda: 4242)
    with pytest.raises(StoreError, match="another user"):
        Store(built).list()
    with pytest.raises(StoreError, match="another user"):
        build(Store(built), IDS)


def test_a_page_that_the_disk_cannot_read_is_named_and_computed_again(store, built, monkeypatch):
    real_read, real_write = os.pread, os.pwrite
    bad = set(range(32_768 * 2 + 600 * 16, 32_768 * 2 + 900 * 16))  # K of layer 1
    monkeypatch.setattr(os, "pread", reading_without(bad, real_read))
    monkeypatch.setattr(os, "pwrite", writing_mends(bad, real_write))
    with store.open(KEY, IDS) as entry:
        entry.pieces[0].check_keys(0, 0, 1900)
        with pytest.raises(CorruptPageError, match=r"layer 1 \(K\) cannot be read") as caught:
            entry.pieces[0].check_keys(1, 0, 1900)
    assert (caught.value.start, caught.value.end) == (512, 1024)
    assert ask(store) == [(512, 1024)]
    assert not bad
    assert ask(Store(built)) == []


def reading_without(bad, real):
    def pread(fd, size, offset):
        if bad & set(range(offset, offset + size)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, size, offset)

    return pread


def writing_mends(bad, real):
    def pwrite(fd, data, offset):
        written = real(fd, data, offset)
        bad.difference_update(range(offset, offset + written))
        return written

    return pwrite


@pytest.mark.parametrize("size", [0, 4096, 32_768 * 4 - 1])
def test_a_file_that_is_cut_while_it_is_open_is_an_error_before_each_use(store, built, size):
    path = find(built, "kv.bin")
    with store.open(KEY, IDS) as entry:
        read(entry)
        os.truncate(path, size)
        for check in (
            lambda: entry.pieces[0].check_keys(0, 0, 10),
            lambda: entry.pieces[0].check_rows(1, VALUES, np.array([1, 1899])),
        ):
            with pytest.raises(DamagedStoreError, match="was cut to"):
                check()
    assert ask(store) == []  # computed as a new segment


def test_a_file_that_is_cut_while_it_is_written_is_not_committed(store, root):
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=512)
        os.truncate(find(root, "kv.bin"), 40_000)
        with pytest.raises(DamagedStoreError, match="was cut to"):
            writer.commit(1024)
    ask(store)
    assert len(list(root.rglob("kv.bin"))) == 1


def test_what_is_passed_over_is_said_with_what_follows(store, built, warnings):
    flip(find(built, "tokens.bin"), 8)
    ask(store)
    assert warnings
    assert all("computed again when needed" in message for _, _, message in warnings)


def test_pages_are_checked_ahead_and_what_is_damaged_is_left_to_its_user(store, built):
    flip(find(built, "kv.bin"), 32_768 * 2 + 600 * 16)  # K of layer 1
    with store.open(KEY, IDS) as entry:
        entry.check_ahead()
        entry.check_ahead()
        entry._checking.join()
        verified = entry.segments[0].verified
        assert verified[0, 0].all()
        assert np.flatnonzero(~verified[1, 0]).tolist() == [2]
        assert verified[:, 1].all()
        with pytest.raises(CorruptPageError, match=r"page 2 of layer 1 \(K\)"):
            entry.pieces[0].check_keys(1, 0, 1900)
        assert heal(store, entry) == [(512, 1024)]


def test_an_entry_can_be_closed_while_it_is_checked_ahead(store):
    build(store, make_ids(60_000))[0].close()
    for _ in range(5):
        entry = store.open(KEY, make_ids(60_000))
        entry.check_ahead()
        entry.close()
        assert not entry._checking.is_alive()

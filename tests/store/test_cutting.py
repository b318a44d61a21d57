"""What goes with a document whose beginning another one uses, too."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import Warnings
from tests.store.damage import ask, flip
from tests.store.synthetic import BLOCK, KEY, SHAPE, build, expected, make_ids, prefill, read, write
from tests.store.test_crashes import dies
from tests.store.test_eviction import disk_bytes, named
from tsdoc.store import Store
from tsdoc.store.key import Ids

PARENT = make_ids(3000)


def child_of(ids: Ids, shared: int) -> Ids:
    return np.concatenate([ids[:shared], make_ids(100, seed=1)])


def two(store: Store, shared: int) -> Ids:
    """A document, and one that begins like it; returns the latter."""
    build(store, PARENT, name="parent", meta={"sources": ["secret.txt"]})[0].close()
    child = child_of(PARENT, shared)
    entry, reused = build(store, child, name="child")
    entry.close()
    assert reused == shared
    return child


def remove(store: Store, name: str) -> int:
    return store.remove([named(store)[name].entry_id])


def traces(root: Path, ids: Ids, first: int) -> list[str]:
    """Files that hold ids, K or V of `ids` from position `first` on, or the parent's name."""
    rows = expected(ids)[:, first:].reshape(SHAPE.num_layers, len(ids) - first, -1)
    secrets = {ids[n : n + 2].tobytes() for n in range(first, len(ids) - 1)}
    secrets |= {layer[n : n + 2].tobytes() for layer in rows for n in range(len(layer) - 1)}
    sizes = {len(secret) for secret in secrets}
    found = []
    for path in root.rglob("*.*"):
        data = path.read_bytes()
        windows = {data[at : at + size] for size in sizes for at in range(0, len(data), 4)}
        if b'"parent"' in data or b"secret.txt" in data or windows & secrets:
            found.append(path.name)
    return found


@pytest.mark.parametrize("shared", [128, 512, 640, 2048, 2560, 2688, 2944])
def test_what_only_a_removed_document_had_is_gone(
    store: Store, root: Path, warnings: Warnings, shared: int
) -> None:
    child = two(store, shared)
    assert traces(root, PARENT, shared)
    freed, before = named(store)["parent"].exclusive_bytes, store.num_bytes()
    assert 0.8 * freed - 8192 <= remove(store, "parent") == before - store.num_bytes() > 0
    assert not traces(root, PARENT, shared)
    assert store.num_bytes() == disk_bytes(root) == named(store)["child"].exclusive_bytes
    assert [e.status for e in store.list()] == ["complete"]
    assert ask(store, child) == []
    assert not warnings


def test_an_index_and_finer_checksums_go_with_what_they_are_made_from(
    store: Store, root: Path
) -> None:
    two(store, 2560)
    places = [path.parent for path in root.rglob("segment.json")]
    for place in places:
        (place / "index.bin").write_bytes(b"index")
        (place / "units.bin").write_bytes(b"units")
    remove(store, "parent")
    assert len(list(root.rglob("index.bin"))) == len(list(root.rglob("units.bin"))) == 1


@pytest.mark.parametrize("shared", [2560, 2688])
def test_a_document_comes_back_on_what_is_left_of_it(store: Store, root: Path, shared: int) -> None:
    child = two(store, shared)
    remove(store, "parent")
    entry, reused = build(store, PARENT, name="parent")
    assert reused == shared
    with entry:
        assert np.array_equal(read(entry), expected(PARENT))
    assert ask(store, child) == []
    remove(store, "parent")
    assert not traces(root, PARENT, shared)
    entry, reused = build(store, PARENT[:shared], name="what was left")
    assert reused == shared
    with entry:
        assert np.array_equal(read(entry), expected(PARENT[:shared]))
    remove(store, "child")
    remove(store, "what was left")
    assert store.num_bytes() == 0


def test_a_chain_is_cut_where_each_of_its_parts_is_used(store: Store, root: Path) -> None:
    child = two(store, 2560)
    longer = np.concatenate([child[:2560], make_ids(1500, seed=2)])
    build(store, longer, name="longer")[0].close()
    last = np.concatenate([longer[:3072], make_ids(70, seed=3)])
    build(store, last, name="last")[0].close()
    for name, ids, left in (("parent", PARENT, 2560), ("longer", longer, 3072)):
        remove(store, name)
        assert not traces(root, ids, left)
    assert ask(store, last) == []
    remove(store, "last")
    assert not traces(root, last, 2560)
    assert ask(store, child) == []
    assert store.num_bytes() == disk_bytes(root)


def test_what_is_in_use_is_cut_by_the_next_removal(
    store: Store, root: Path, warnings: Warnings
) -> None:
    child = two(store, 2688)
    entry = store.open(KEY, child)
    assert entry is not None
    with entry:
        assert remove(store, "parent") == 0
        assert warnings.codes == {"not_cut"}
        assert traces(root, PARENT, 2688)
        assert np.array_equal(read(entry), expected(child))
    warnings.clear()
    store.prune()
    assert not warnings
    assert not traces(root, PARENT, 2688)
    assert ask(store, child) == []


def pending(root: Path) -> Ids:
    """Like `two`, and the parent was removed while the child was in use; returns the child."""
    store = Store(root, max_bytes=1 << 30)
    child = two(store, 640)
    entry = store.open(KEY, child)
    assert entry is not None
    with entry:
        remove(store, "parent")
    return child


@pytest.mark.parametrize("way", ["prune", "begin"])
def test_a_cut_that_waits_is_made_before_anything_is_evicted(tmp_path: Path, way: str) -> None:
    pending(tmp_path / "first")
    first = Store(tmp_path / "first", max_bytes=1 << 30)
    loose = first.num_bytes()
    first.prune()
    if way == "begin":
        build(first, make_ids(300, seed=5), name="other")[0].close()
    most = first.num_bytes() + 100  # moments differ in length
    assert most < loose
    child = pending(tmp_path / "second")
    if way == "prune":
        store = Store(tmp_path / "second", max_bytes=1 << 30)
        before = store.num_bytes()
        assert store.prune(most) == ([], before - store.num_bytes())
    else:
        store = Store(tmp_path / "second", max_bytes=most)
        build(store, make_ids(300, seed=5), name="other")[0].close()
    assert "child" in named(store)
    assert ask(store, child) == []
    assert store.num_bytes() <= most


def test_an_unfinished_document_keeps_what_it_goes_on_from(store: Store, root: Path) -> None:
    build(store, PARENT, name="parent")[0].close()
    child = np.concatenate([PARENT[:2560], make_ids(2000, seed=1)])
    with store.begin(KEY, SHAPE, child, prefill_block=BLOCK, name="child") as writer:
        prefill(writer, child, stop=3072)
        remove(store, "parent")
    store.prune()
    assert not traces(root, PARENT, 2560)
    entry, reused = build(store, child, name="child")
    assert reused == 3072
    with entry:
        assert np.array_equal(read(entry), expected(child))


@pytest.mark.parametrize("shared", [2560, 2688])
def test_death_at_every_step_of_a_cut_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: int
) -> None:
    number = 0
    died = True
    while died:
        number += 1
        root = tmp_path / str(number)
        store = Store(root, max_bytes=1 << 30)
        child = two(store, shared)
        died = dies(monkeypatch, number, partial(remove, store, "parent"))
        entry = store.open(KEY, child)
        assert entry is not None
        with entry:
            assert np.array_equal(read(entry), expected(child))
        if "parent" in named(store):
            remove(store, "parent")
        store.prune()
        assert not traces(root, PARENT, shared)
        assert ask(store, child) == []
        assert store.num_bytes() == disk_bytes(root)
    assert number > 15


def test_many_cuts_do_not_make_a_journal_longer(tmp_path: Path) -> None:
    """Each commits a block's rest anew: one too long for its segment is taken for damage."""
    store, size = Store(tmp_path / "store", max_bytes=1 << 30), 64 * 128
    parent = make_ids(size)
    build(store, parent, block=size, name="parent")[0].close()
    ends = range(size - 128, size - 34 * 128, -128)
    children = {f"child {end}": child_of(parent, end) for end in ends}
    for name, ids in children.items():
        build(store, ids, name=name)[0].close()
    remove(store, "parent")
    journal = max(tmp_path.rglob("journal.bin"), key=lambda path: path.stat().st_size)
    before = journal.stat().st_size
    *others, last = children
    for name in others:
        remove(store, name)
        assert all(entry.status == "complete" for entry in store.list())
    assert journal.stat().st_size < before
    entry = store.open(KEY, children[last])
    assert entry is not None
    with entry:
        assert np.array_equal(read(entry), expected(children[last]))


def test_evictions_cut_too(root: Path) -> None:
    child = two(Store(root), 640)
    size = Store(root).num_bytes()
    store = Store(root, max_bytes=size)
    build(store, make_ids(1000, seed=5), name="other")[0].close()
    assert set(named(store)) == {"child", "other"}
    assert store.num_bytes() <= size
    assert not traces(root, PARENT, 640)
    assert ask(store, child) == []


def test_a_document_that_begins_may_cut_what_it_begins_with(root: Path) -> None:
    build(Store(root), PARENT, name="parent")[0].close()
    store = Store(root, max_bytes=Store(root).num_bytes())
    child = np.concatenate([PARENT[:640], make_ids(1500, seed=1)])
    entry, reused = build(store, child, name="child")
    assert reused == 640
    with entry:
        assert np.array_equal(read(entry), expected(child))
    assert set(named(store)) == {"child"}
    assert not traces(root, PARENT, 640)


@pytest.mark.parametrize("shared", [1024, 2560, 2688])
def test_blocks_that_were_computed_again_in_part_stay_valid(
    store: Store, root: Path, shared: int
) -> None:
    """A repair that was interrupted leaves pages of one block to records of several."""
    entry, _ = build(store, PARENT, name="parent", block=3072)
    flip(next(root.rglob("kv.bin")), 0)
    with entry, store.repair(entry, 0, 3000) as repair:
        write(repair.pieces, expected(PARENT), 0, 512)
        repair.commit(512)
    child = child_of(PARENT, shared)
    build(store, child, name="child")[0].close()
    remove(store, "parent")
    assert not traces(root, PARENT, shared)
    assert ask(store, child) == []


def test_a_damaged_page_at_the_cut_is_computed_again(store: Store, root: Path) -> None:
    child = two(store, 2688)
    shared = max(root.rglob("kv.bin"), key=lambda path: path.stat().st_size)
    flip(shared, 2600 * SHAPE.row_bytes)
    remove(store, "parent")
    assert not traces(root, PARENT, 2688)
    assert ask(store, child) == [(2560, 2688)]
    assert ask(store, child) == []


@pytest.mark.parametrize("name", ["tokens.bin", "segment.json", "journal.bin"])
def test_what_nobody_can_use_any_more_goes_whole(store: Store, root: Path, name: str) -> None:
    child = two(store, 2560)
    shared = max(root.rglob("kv.bin"), key=lambda path: path.stat().st_size).parent
    flip(shared / name, 20 if name == "journal.bin" else -1)
    before = store.num_bytes()
    assert remove(store, "parent") == before - store.num_bytes()
    assert not shared.exists()
    ask(store, child)
    assert ask(store, child) == []


def test_links_are_not_followed(store: Store, root: Path, tmp_path: Path) -> None:
    two(store, 2560)
    shared = max(root.rglob("kv.bin"), key=lambda path: path.stat().st_size)
    mine = tmp_path / "mine"
    shared.rename(mine)
    shared.symlink_to(mine)
    before = mine.read_bytes()
    remove(store, "parent")
    assert mine.read_bytes() == before
    assert not shared.is_symlink()


def test_where_a_file_cannot_have_holes_zeros_are_written(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = two(store, 640)
    monkeypatch.setattr("tsdoc.store.files.PUNCH_HOLE", 1 << 20)
    before = disk_bytes(root)
    remove(store, "parent")
    assert not traces(root, PARENT, 640)
    assert ask(store, child) == []
    assert before - store.num_bytes() < os.sysconf("SC_PAGE_SIZE") * 4

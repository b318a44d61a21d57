from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import Warnings
from tests.store.synthetic import (
    BLOCK,
    KEY,
    SHAPE,
    build,
    expected,
    make_ids,
    make_key,
    prefill,
    read,
    reopen,
)
from tsdoc.errors import DiskFullError, StoreError
from tsdoc.store import EntryInfo, Store, begin
from tsdoc.terminal import format_bytes


def disk_bytes(root: Path) -> int:
    files = [p.stat() for p in root.rglob("*.*") if p.parent.parent.name == "segments"]
    return sum(min(info.st_size, 512 * info.st_blocks) for info in files)


def named(store: Store) -> dict[str, EntryInfo]:
    return {e.name: e for e in store.list()}


def age(root: Path, store: Store, name: str, seconds: int) -> None:
    entry = named(store)[name]
    path = root / entry.model_key / "entries" / entry.entry_id / "use.lock"
    os.utime(path, (1_700_000_000 - seconds,) * 2)


def several(store: Store, root: Path, *names: str, num_tokens: int = 1000) -> int:
    """Entries of equal size (but for digits of a date), the first used longest ago."""
    for seed, name in enumerate(names):
        build(store, make_ids(num_tokens, seed=seed), name=name)[0].close()
    for at, name in enumerate(names):
        age(root, store, name, 1000 - at)
    return named(store)[names[0]].num_bytes


def test_the_list_tells_what_there_is(store: Store) -> None:
    ids = make_ids(1300)
    build(store, ids, name="a", meta={"sources": ["x.pdf", "y.pdf"]})[0].close()
    with store.begin(KEY, SHAPE, make_ids(2000, seed=1), prefill_block=BLOCK, name="b") as writer:
        prefill(writer, writer.ids, stop=1024)
        assert named(store)["b"].in_use
    first, second = named(store)["a"], named(store)["b"]
    assert (first.status, first.num_tokens, first.committed_tokens) == ("complete", 1300, 1300)
    assert (first.sources, first.in_use, first.problem) == (("x.pdf", "y.pdf"), False, "")
    assert first.model["chunk_size"] == 128
    assert (second.status, second.num_tokens, second.committed_tokens) == ("incomplete", 2000, 1024)
    assert first.last_used >= first.created - 60
    assert store.num_bytes() == first.num_bytes + second.num_bytes


def test_shared_bytes_are_counted_once(store: Store, root: Path) -> None:
    ids = make_ids(3000)
    build(store, ids, name="parent")[0].close()
    alone = store.num_bytes()
    child = np.concatenate([ids[:2560], make_ids(100, seed=1)])
    build(store, child, name="child")[0].close()
    assert store.num_bytes() == disk_bytes(root) < 1.5 * alone
    parent, mine = named(store)["parent"], named(store)["child"]
    assert mine.exclusive_bytes == store.num_bytes() - alone
    assert parent.num_bytes == alone
    assert mine.num_bytes - mine.exclusive_bytes == store.shared_bytes() == alone * 2560 // 3000
    assert parent.num_bytes - parent.exclusive_bytes == store.shared_bytes()


def test_removing_a_parent_leaves_its_child_whole(store: Store, root: Path) -> None:
    ids = make_ids(3000)
    build(store, ids, name="parent")[0].close()
    child = np.concatenate([ids[:2560], make_ids(100, seed=1)])
    build(store, child, name="child")[0].close()
    assert store.remove([named(store)["parent"].entry_id]) < 0.2 * store.num_bytes()
    with reopen(store, child) as entry:
        assert np.array_equal(read(entry), expected(child))
    before = store.num_bytes()
    assert store.remove([named(store)["child"].entry_id]) == before
    assert store.num_bytes() == 0
    assert [p.name for p in root.rglob("*")] == ["store.lock"]


def test_what_was_used_longest_ago_goes_first(store: Store, root: Path) -> None:
    size = several(store, root, "a", "b", "c")
    gone, _ = store.prune(2 * size + 100)
    assert [e.name for e in gone] == ["a"]
    assert set(named(store)) == {"b", "c"}


def test_what_is_freed_is_what_the_store_loses(store: Store) -> None:
    """Of what two entries share nothing goes with the first of them, and all with the second."""
    ids = make_ids(2944)
    build(store, ids, name="parent")[0].close()
    build(store, np.concatenate([ids, make_ids(10, seed=1)]), name="child")[0].close()
    before = store.num_bytes()
    gone, freed = store.prune(0)
    assert len(gone) == 2
    assert freed == before
    assert store.num_bytes() == 0


def test_opening_counts_as_use(store: Store, root: Path) -> None:
    size = several(store, root, "a", "b", "c")
    reopen(store, make_ids(1000, seed=0)).close()
    assert [e.name for e in store.prune(size + 100)[0]] == ["b", "c"]
    assert set(named(store)) == {"a"}


def test_verifying_does_not_count_as_use(store: Store, root: Path) -> None:
    size = several(store, root, "a", "b", "c")
    for entry in store.list():
        with store.load(entry.entry_id) as opened:
            store.verify(opened)
    assert [e.name for e in store.prune(size + 100)[0]] == ["a", "b"]


def test_entries_in_use_and_kept_entries_stay(store: Store, root: Path) -> None:
    several(store, root, "a", "b", "c")
    with reopen(store, make_ids(1000, seed=0)):
        age(root, store, "a", 5000)
        gone, _ = store.prune(0, keep=[named(store)["c"].entry_id])
    assert [e.name for e in gone] == ["b"]
    assert set(named(store)) == {"a", "c"}


def test_an_entry_in_use_is_not_removed(store: Store, root: Path) -> None:
    several(store, root, "a")
    with reopen(store, make_ids(1000, seed=0)) as entry:
        with pytest.raises(StoreError, match="in use"):
            store.remove([entry.entry_id])
        assert np.array_equal(read(entry), expected(entry.ids))
    assert store.remove([entry.entry_id]) > 0


def test_a_parent_goes_only_when_that_frees_something(store: Store, root: Path) -> None:
    """The old parent's pages are the child's: evicting the parent would gain nothing."""
    ids = make_ids(2944)
    build(store, ids, name="parent")[0].close()
    child = np.concatenate([ids, make_ids(10, seed=1)])
    build(store, child, name="child")[0].close()
    build(store, make_ids(3000, seed=5), name="other")[0].close()
    for at, name in enumerate(["parent", "child", "other"]):
        age(root, store, name, 1000 - at)
    gone, _ = store.prune(store.num_bytes() - 1000)
    assert [e.name for e in gone] == ["child"]
    gone, _ = store.prune(store.num_bytes() - 1000)
    assert [e.name for e in gone] == ["parent"]


def test_a_new_entry_makes_room_within_the_budget(root: Path, warnings: Warnings) -> None:
    size = several(Store(root), root, "a", "b", "c")
    store = Store(root, max_bytes=3 * size + 100, on_warning=warnings)
    build(store, make_ids(1000, seed=7), name="d")[0].close()
    assert set(named(store)) == {"b", "c", "d"}
    assert store.num_bytes() <= 3 * size + 100
    assert [(code, message.split()[0]) for code, _, message in warnings] == [("evicted", "a")]


def test_an_entry_that_alone_is_beyond_the_budget_is_refused_and_evicts_nothing(
    root: Path, warnings: Warnings
) -> None:
    size = several(Store(root), root, "a", "b")
    before = sorted(root.rglob("*"))
    store = Store(root, max_bytes=3 * size, on_warning=warnings)
    with pytest.raises(DiskFullError) as caught:
        build(store, make_ids(4000, seed=7), name="d")
    limit = format_bytes(3 * size)
    assert "d needs 2" in caught.value.message
    assert caught.value.message.endswith(f"of the store, and store.max_bytes allows {limit}")
    assert sorted(root.rglob("*")) == before
    assert not warnings


def test_so_is_one_that_grows_beyond_it(root: Path) -> None:
    size = several(Store(root), root, "a", num_tokens=3000)
    store = Store(root, max_bytes=int(1.1 * size))
    longer = np.concatenate([make_ids(3000), make_ids(1000, seed=1)])
    with pytest.raises(DiskFullError, match=r"store\.max_bytes"):
        build(store, longer, name="d")
    assert set(named(store)) == {"a"}


def test_so_is_one_that_was_interrupted_under_a_larger_budget(root: Path) -> None:
    ids = make_ids(3000)
    with Store(root).begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, ids, stop=1024)
    size = several(Store(root), root, "a")
    with pytest.raises(DiskFullError, match=r"store\.max_bytes"):
        build(Store(root, max_bytes=2 * size), ids, name="doc")
    assert set(named(Store(root))) == {"a", "doc"}
    assert build(Store(root, max_bytes=4 * size), ids, name="doc")[1] == 1024


def test_by_default_one_may_be_larger_while_it_is_alone(
    root: Path, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = several(Store(root), root, "a", "b")
    store = Store(root, on_warning=warnings)
    monkeypatch.setattr("tsdoc.store.room.DEFAULT_BYTES", 2 * size)
    build(store, make_ids(3000, seed=7), name="d")[0].close()
    assert set(named(store)) == {"d"}
    assert [code for code, _, _ in warnings] == ["beyond_budget", "evicted", "evicted"]
    assert "store.max_bytes" in warnings[0][2]
    build(store, make_ids(1000, seed=8), name="e")[0].close()
    assert set(named(store)) == {"e"}


def test_nothing_is_evicted_for_what_the_disk_cannot_take_anyway(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = several(Store(root), root, "a", "b")
    store = Store(root, max_bytes=3 * size)
    monkeypatch.setattr("tsdoc.store.room.free_bytes", lambda path: int(0.7 * size))
    with pytest.raises(DiskFullError, match="KV pages need"):
        build(store, make_ids(2900, seed=7), name="d")
    assert set(named(store)) == {"a", "b"}
    monkeypatch.setattr("tsdoc.store.room.free_bytes", lambda path: int(0.9 * size))
    build(store, make_ids(2900, seed=7), name="d")[0].close()
    assert set(named(store)) == {"d"}


def test_the_parents_of_a_new_entry_are_not_evicted_for_it(root: Path) -> None:
    ids = make_ids(3000)
    build(Store(root), ids, name="parent")[0].close()
    store = Store(root, max_bytes=Store(root).num_bytes())
    child = np.concatenate([ids[:2560], make_ids(100, seed=1)])
    entry, reused = build(store, child, name="child")
    assert reused == 2560
    assert set(named(store)) == {"child"}
    assert np.array_equal(read(entry), expected(child))


def test_the_budget_spans_all_models(root: Path) -> None:
    store = Store(root, max_bytes=50_000)
    build(store, make_ids(500), key=make_key(model="one"))[0].close()
    build(store, make_ids(500), key=make_key(model="two"))[0].close()
    assert [e.model["model"] for e in store.list()] == ["two"]
    assert len([p for p in root.iterdir() if p.is_dir()]) == 1


def test_the_default_budget_is_a_share_of_the_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(root)
    monkeypatch.setattr("tsdoc.store.room.free_bytes", lambda path: 100_000_000_000)
    assert store.budget() == 20_000_000_000
    monkeypatch.setattr("tsdoc.store.room.free_bytes", lambda path: 10**13)
    assert store.budget() == 50_000_000_000


def test_removing_what_is_not_there_is_an_error(store: Store) -> None:
    with pytest.raises(StoreError, match="no entry"):
        store.remove(["0" * 32])


@pytest.mark.parametrize("where", ["", "key", "entry", "segment"])
def test_foreign_files_are_never_deleted(store: Store, root: Path, where: str) -> None:
    several(store, root, "a")
    entry = next(root.rglob("manifest.json")).parent
    segment = next(root.rglob("segment.json")).parent
    place = {"": root, "key": entry.parent.parent, "entry": entry, "segment": segment}[where]
    for name in ("notes.txt", ".tmp-mine", "f" * 32 + ".bak", "kv.bin.old"):
        (place / name).write_text("mine")
    folder = place / "folder"
    folder.mkdir()
    (folder / "kv.bin").write_text("mine")
    store.remove([named(store)["a"].entry_id])
    store.prune(0)
    build(store, make_ids(500, seed=3))[0].close()
    store.prune(0)
    assert store.list() == []
    ours = ("store.lock", "model.json")
    mine = [p.read_text() for p in root.rglob("*") if p.is_file() and p.name not in ours]
    assert mine == ["mine"] * 5


def test_directories_with_names_of_ours_but_foreign_content_stay(store: Store, root: Path) -> None:
    several(store, root, "a")
    foreign = root / ("e" * 32) / "segments" / ("d" * 32)
    foreign.mkdir(parents=True)
    (foreign / "photo.jpg").write_text("mine")
    store.prune(0)
    build(store, make_ids(500, seed=3))[0].close()
    assert [p.name for p in foreign.iterdir()] == ["photo.jpg"]
    assert "damaged" not in {e.status for e in store.list()}


def test_a_prefill_that_committed_nothing_leaves_nothing(store: Store, root: Path) -> None:
    with store.begin(KEY, SHAPE, make_ids(1000), prefill_block=BLOCK, name="doc"):
        assert len(store.list()) == 1
    assert [p.name for p in root.rglob("*")] == ["store.lock"]


def test_an_entry_whose_segment_was_never_made_is_litter(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object, **options: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(begin.Beginning, "_abandon", lambda self: None)  # it was killed
        patch.setattr(begin, "write_tokens", die)
        store.begin(KEY, SHAPE, make_ids(1000), prefill_block=BLOCK, name="killed")
    assert [entry.status for entry in store.list()] == ["damaged"]
    store.prune()
    assert [p.name for p in root.rglob("*")] == ["store.lock"]


def test_what_a_killed_prefill_reserved_is_given_back_by_the_next_change(
    store: Store, root: Path
) -> None:
    ids = make_ids(1000)
    build(store, ids, name="parent")[0].close()
    child = np.concatenate([ids[:640], make_ids(3000, seed=1)])
    writer = store.begin(KEY, SHAPE, child, prefill_block=BLOCK, name="killed")
    store.prune()
    assert "killed" in named(store)  # its locks are held
    assert writer._own is not None
    for lock in writer._locks:  # as death does it
        lock.release()
    writer._own.close()
    assert named(store)["killed"].committed_tokens == 640
    store.prune()
    assert set(named(store)) == {"parent"}
    assert len(list(root.rglob("kv.bin"))) == 1


@pytest.mark.parametrize("seed", range(2))
def test_the_budget_is_never_exceeded(root: Path, seed: int) -> None:
    """Also while an entry is written, and with parents that are shared."""
    chance = np.random.default_rng(seed)
    budget, refused = 250_000, 0
    store = Store(root, max_bytes=budget)
    documents = [make_ids(int(chance.integers(300, 5000)), seed=9 + seed)]
    for number in range(25):
        ids = documents[int(chance.integers(len(documents)))]
        cut = int(chance.integers(0, len(ids)))
        ids = np.concatenate([ids[:cut], make_ids(int(chance.integers(1, 3000)), seed=number)])
        documents.append(ids)

        def check(_: int) -> None:
            assert disk_bytes(root) <= store.num_bytes() <= budget

        try:
            with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
                check(0)
                prefill(writer, ids, on_block=check)
                writer.finish().close()
        except DiskFullError:
            refused += 1
        check(0)
    assert 0 < refused < 15

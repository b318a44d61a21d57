"""What can be seen of damage without opening a large file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.damage import IDS, ask, find
from tests.store.synthetic import BLOCK, KEY, SHAPE, build, make_ids, prefill
from tsdoc.store import Store

FILES = ["kv.bin", "journal.bin", "tokens.bin", "segment.json"]


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "longer":
        os.truncate(path, path.stat().st_size + 1)
    else:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "link"])
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_missing_or_cut_makes_an_entry_damaged(
    store: Store, built: Path, name: str, how: str
) -> None:
    path = find(built, name)
    damage(path, how)
    (entry,) = store.list()
    assert entry.status == "damaged"
    assert f"segments/{path.parent.name} is damaged: {name} " in entry.problem
    # Of a journal's good records something may be left.
    assert entry.committed_tokens == (512 if (name, how) == ("journal.bin", "cut") else 0)
    ask(store)
    assert {e.status for e in store.list()} == {"complete"}


@pytest.mark.parametrize("name", ["kv.bin", "tokens.bin"])
def test_so_does_one_that_is_too_long(store: Store, built: Path, name: str) -> None:
    damage(find(built, name), "longer")
    (entry,) = store.list()
    assert entry.status == "damaged"
    assert "bytes instead of" in entry.problem


def test_a_manifest_that_is_not_one_is_named(store: Store, built: Path) -> None:
    find(built, "manifest.json").write_text("{")
    (entry,) = [e for e in store.list() if e.status == "damaged"]
    assert entry.problem == "manifest.json is not valid JSON"


def test_a_segment_that_is_gone_is_named(store: Store, built: Path) -> None:
    (segment,) = built.glob("*/segments/*")
    segment.rename(built / "elsewhere")
    (entry,) = store.list()
    assert (entry.status, entry.problem) == ("damaged", f"segments/{segment.name} is missing")


def test_what_is_made_from_other_files_may_be_missing(store: Store, built: Path) -> None:
    for name in ("index.bin", "units.bin", "votes.bin"):
        for path in built.rglob(name):
            path.unlink()
    assert [e.status for e in store.list()] == ["complete"]


@pytest.mark.parametrize("is_cut", [False, True])
def test_pages_are_not_opened(
    store: Store, built: Path, monkeypatch: pytest.MonkeyPatch, is_cut: bool
) -> None:
    if is_cut:
        damage(find(built, "kv.bin"), "cut")
    opened = []
    real = os.open

    def note(path: str | Path, *arguments: Any, **options: Any) -> int:
        opened.append(Path(path).name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", note)
    store.list()
    assert "manifest.json" in opened
    assert "kv.bin" not in opened


def test_looking_changes_nothing_also_where_no_lock_was_left(store: Store, root: Path) -> None:
    for seed in range(4):
        build(store, make_ids(300, seed=seed), name=str(seed))[0].close()
    find(root, "manifest.json").unlink()
    for path in root.rglob("*.lock"):
        path.unlink()
    for at, path in enumerate([*root.glob("*/entries/*"), *root.glob("*/segments/*")]):
        os.utime(path, (1_000_000 + at % 2,) * 2)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    order = [e.entry_id for e in store.list()]
    assert [e.entry_id for e in store.list()] == order
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
    late = [e.last_used for e in store.list()]
    assert sorted(late, reverse=True) == late


def test_an_entry_being_computed_is_incomplete_at_every_block(store: Store) -> None:
    seen = []
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        seen += store.list()
        prefill(writer, IDS, on_block=lambda end: seen.extend(store.list()))
    assert {(e.status, e.problem) for e in seen} == {("incomplete", "")}
    assert [e.committed_tokens for e in seen] == [0, 512, 1024, 1536, 1900]


def test_an_interrupted_entry_that_lost_its_pages_is_damaged(store: Store, root: Path) -> None:
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=1024)
    damage(find(root, "kv.bin"), "cut")
    (entry,) = store.list()
    assert (entry.status, entry.committed_tokens) == ("damaged", 0)
    ask(store)
    assert "damaged" not in {e.status for e in store.list()}


def test_an_entry_is_complete_on_the_finished_part_of_an_interrupted_one(store: Store) -> None:
    with store.begin(KEY, SHAPE, IDS, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, IDS, stop=1024)
    child = np.concatenate([IDS[:1024], make_ids(300, seed=4)])
    assert build(store, child, name="child")[1] == 1024
    assert {e.name: e.status for e in store.list()} == {"doc": "incomplete", "child": "complete"}


def test_damage_to_what_is_shared_shows_in_all_that_share_it(store: Store, built: Path) -> None:
    child = np.concatenate([IDS[:1024], make_ids(300, seed=4)])
    build(store, child, name="child")[0].close()
    damage(max(built.rglob("kv.bin"), key=lambda path: path.stat().st_size), "cut")
    assert {e.name: e.status for e in store.list()} == {"doc": "damaged", "child": "damaged"}


def test_what_has_lost_its_pages_is_evicted_first(built: Path) -> None:
    store = Store(built, max_bytes=1 << 30)
    build(store, make_ids(1900, seed=1), name="older")[0].close()
    damage(find(next(built.glob("*/entries")).parent, "kv.bin"), "cut")
    statuses = {e.name: e.status for e in store.list()}
    assert sorted(statuses.values()) == ["complete", "damaged"]
    ((gone,), _) = store.prune(store.num_bytes() - 1)
    assert statuses[gone.name] == "damaged"

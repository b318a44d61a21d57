"""Damage to the store's small files, wrong formats, links: noticed, said, and computed again."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.store.conftest import Warnings
from tests.store.damage import IDS, OLD_KEY, ask, find, flip, rewrite_as_version_1
from tests.store.synthetic import BLOCK, KEY, SHAPE, build, make_ids
from tsdoc.errors import StoreError, StoreFormatError
from tsdoc.store import Store
from tsdoc.store.files import write_json
from tsdoc.store.journal import journal_header
from tsdoc.store.key import FORMAT

FILES = ["segment.json", "kv.bin", "journal.bin", "tokens.bin", "manifest.json", "model.json"]


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_noticed(
    store: Store, built: Path, warnings: Warnings, name: str, share: float
) -> None:
    path = find(built, name)
    with path.open("r+b") as file:
        file.truncate(int(path.stat().st_size * share))
    repaired = ask(store)
    assert warnings or repaired or name == "model.json"
    assert ask(Store(built)) == []
    assert [e.status for e in store.list()] == ["complete"]


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_noticed(store: Store, built: Path, name: str) -> None:
    find(built, name).unlink()
    ask(store)
    assert ask(Store(built)) == []
    assert [e.status for e in store.list()] == ["complete"]


@pytest.mark.parametrize("name", FILES[:5])
def test_files_swapped_between_two_entries_are_noticed(
    store: Store, built: Path, name: str
) -> None:
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
def test_directories_swapped_between_two_entries_are_noticed(
    store: Store, built: Path, kind: str
) -> None:
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


ABSURD: list[object] = [
    -1,
    0,
    1,
    7,
    2**31,
    2**63,
    10**400,
    1.5,
    None,
    True,
    "",
    "x",
    [],
    {},
    [[]],
    "0" * 32,
]


@pytest.mark.parametrize("name", ["segment.json", "manifest.json"])
def test_absurd_values_are_refused_even_with_a_right_checksum(
    store: Store, built: Path, name: str
) -> None:
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
def test_absurd_chains_are_refused_even_with_a_right_checksum(
    store: Store, built: Path, where: str
) -> None:
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


def mutate(root: Path, chance: random.Random) -> tuple[str, str]:
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
def test_random_damage_anywhere_never_changes_what_is_read(
    store: Store, built: Path, count: int, seed: int
) -> None:
    chance = random.Random(seed)
    child = np.concatenate([IDS[:1280], make_ids(500, seed=4)])
    for _ in range(count):
        try:
            ask(store, IDS)
            ask(store, child)
        except StoreFormatError as error:  # the one digit that says "not yours": refused by name
            assert error.version > FORMAT
            assert error.where is not None
            Path(error.where).unlink()
        mutate(built, chance)
    ask(store, IDS)
    ask(store, child)
    assert [e.status for e in store.list()].count("complete") == 2


def test_a_newer_format_is_left_alone_and_said(
    store: Store, built: Path, warnings: Warnings
) -> None:
    path = find(built, "manifest.json")
    text = path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}')
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


def test_an_older_format_is_listed_as_stale_and_goes_first(store: Store, built: Path) -> None:
    build(store, make_ids(300, seed=8))[0].close()
    path = find(built, "manifest.json")
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}'))
    assert "stale" in [e.status for e in store.list()]
    gone, _ = store.prune(store.num_bytes() - 1)
    assert gone[0].status == "stale"
    ask(store)


def test_version_1_is_never_used_and_goes_first(store: Store, root: Path) -> None:
    """There K and V of a layer lay apart, and its model keys name that version."""
    build(store, IDS, key=OLD_KEY)[0].close()
    rewrite_as_version_1(root)
    old = root / OLD_KEY.digest
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert store.open(KEY, IDS) is None
    assert store.find(KEY, IDS).reused_tokens == 0
    assert {e.status for e in store.list()} == {"stale"}
    ask(store)
    assert {path: path.read_bytes() for path in before} == before
    (own,) = [e for e in store.list() if e.status != "stale"]
    gone, _ = store.prune(own.num_bytes)
    assert {e.status for e in gone} == {"stale"}
    assert not old.exists()
    assert [e.status for e in store.list()] == ["complete"]
    assert ask(store) == []


def test_what_version_1_has_kept_is_listed_with_its_segments(store: Store, root: Path) -> None:
    build(store, IDS, key=OLD_KEY, name="parent", meta={"sources": ["a"]})[0].close()
    child = np.concatenate([IDS[:1024], make_ids(300, seed=4)])
    build(store, child, key=OLD_KEY, name="child")[0].close()
    before = {e.name: e for e in store.list()}
    rewrite_as_version_1(root)
    after = {e.name: e for e in store.list()}
    assert {e.status for e in after.values()} == {"stale"}
    assert all("format 1 of an older tsdoc" in e.problem for e in after.values())
    assert {e.committed_tokens for e in after.values()} == {0}
    same = ("entry_id", "num_tokens", "shared_with", "sources")
    for name in ("parent", "child"):
        assert [getattr(after[name], f) for f in same] == [getattr(before[name], f) for f in same]
    parent = after["parent"]
    assert store.remove([parent.entry_id]) == parent.exclusive_bytes == parent.num_bytes
    (left,) = store.list()
    assert (left.name, left.exclusive_bytes) == ("child", left.num_bytes)
    assert store.remove([left.entry_id]) == left.num_bytes
    assert not list(root.rglob("*.bin"))


def test_version_1_gives_way_without_a_word(root: Path, warnings: Warnings) -> None:
    store = Store(root, max_bytes=150_000, on_warning=warnings)
    build(store, IDS, key=OLD_KEY)[0].close()
    rewrite_as_version_1(root)
    ask(store)
    assert [e.status for e in store.list()] == ["complete"]
    assert not warnings


@pytest.mark.parametrize("how", ["cut", "flip"])
def test_an_older_manifest_that_is_damaged_tells_nothing(
    store: Store, root: Path, how: str
) -> None:
    build(store, IDS, key=OLD_KEY)[0].close()
    rewrite_as_version_1(root)
    path = find(root, "manifest.json")
    text = path.read_text()
    path.write_text(text[:-9] if how == "cut" else text.replace("1900", "1901"))
    assert [(e.status, e.name) for e in store.list()] == [("stale", "")] * 2
    store.prune(0)
    assert not list(root.rglob("*.bin"))


def test_a_journal_of_version_1_is_not_read(
    store: Store, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksums are of other bytes."""
    path = find(built, "journal.bin")
    with monkeypatch.context() as patches:
        patches.setattr("tsdoc.store.journal.FORMAT", 1)
        header = journal_header(path.parent.name)
    path.write_bytes(header + path.read_bytes()[len(header) :])
    ask(store)
    assert [e.status for e in store.list()] == ["complete"]
    assert find(built, "journal.bin").parent != path.parent


def test_an_older_manifest_is_replaced_when_its_document_returns(
    store: Store, built: Path, warnings: Warnings
) -> None:
    path = find(built, "manifest.json")
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}'))
    ask(store)
    assert "store_format" in warnings.codes
    assert [e.status for e in store.list()] == ["complete"]


def test_links_are_not_followed(store: Store, built: Path, tmp_path: Path) -> None:
    path = find(built, "kv.bin")
    outside = tmp_path / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = outside.read_bytes()
    ask(store)
    assert outside.read_bytes() == before
    assert not find(built, "kv.bin").is_symlink()


def test_a_link_in_place_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    store = Store(tmp_path / "store")
    for call in (store.list, lambda: store.find(KEY, IDS), lambda: store.open(KEY, IDS)):
        with pytest.raises(StoreError, match="link"):
            call()
    with pytest.raises(StoreError, match="link"):
        build(store, IDS)


def test_a_foreign_owner_is_refused(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 4242)
    with pytest.raises(StoreError, match="another user"):
        Store(built).list()
    with pytest.raises(StoreError, match="another user"):
        build(Store(built), IDS)


def test_what_is_passed_over_is_said_with_what_follows(
    store: Store, built: Path, warnings: Warnings
) -> None:
    flip(find(built, "tokens.bin"), 8)
    ask(store)
    assert warnings
    assert all("computed again when needed" in message for _, _, message in warnings)

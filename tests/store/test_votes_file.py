"""What any question looks at is kept with an entry, trusted only when whole, and goes with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from tests.store.synthetic import build, make_ids
from tsdoc.store import EntryInfo, Store
from tsdoc.store.entry import Entry
from tsdoc.store.votes_file import VOTES_FILE

ASKED = b"what"
VOTES = np.linspace(0, 1, 2 * 900, dtype=np.float32).reshape(2, 900)


def open_entry(store: Store, seed: int = 0) -> Entry:
    return build(store, make_ids(1000, seed=seed), name="a")[0]


def path_of(root: Path, entry: Entry) -> Path:
    (path,) = root.glob(f"*/entries/{entry.entry_id}")
    return path / VOTES_FILE


def test_votes_are_found_again_under_what_was_asked(store: Store, root: Path) -> None:
    with open_entry(store) as entry:
        assert entry.read_votes(ASKED, VOTES.shape) is None
        entry.keep_votes(ASKED, VOTES)
        assert path_of(root, entry).stat().st_mode & 0o777 == 0o600
    with open_entry(store) as again:
        found = again.read_votes(ASKED, VOTES.shape)
        assert found is not None
        assert np.array_equal(found, VOTES)
        assert again.read_votes(b"who", VOTES.shape) is None
        assert again.read_votes(ASKED, (2, 899)) is None
        assert again.read_votes(ASKED, (3, 900)) is None
        again.keep_votes(b"who", VOTES)
        assert again.read_votes(ASKED, VOTES.shape) is None


@pytest.mark.parametrize("damage", ["flipped", "short", "long", "empty", "link", "other entry"])
def test_damaged_votes_are_as_if_missing(
    store: Store, root: Path, tmp_path: Path, damage: str
) -> None:
    with open_entry(store) as entry:
        entry.keep_votes(ASKED, VOTES)
        path = path_of(root, entry)
        data = path.read_bytes()
        if damage == "link":
            path.rename(tmp_path / "elsewhere")
            path.symlink_to(tmp_path / "elsewhere")
        elif damage == "other entry":
            with open_entry(store, seed=1) as other:
                other.keep_votes(ASKED, VOTES)
                path_of(root, other).replace(path)
        else:
            path.write_bytes(
                {
                    "flipped": data[:200] + bytes([data[200] ^ 1]) + data[201:],
                    "short": data[:-1],
                    "long": data + b"0",
                    "empty": b"",
                }[damage]
            )
        assert entry.read_votes(ASKED, VOTES.shape) is None
        entry.keep_votes(ASKED, VOTES)
        assert entry.read_votes(ASKED, VOTES.shape) is not None
        if damage == "link":
            assert (tmp_path / "elsewhere").read_bytes() == data


def test_votes_go_with_their_entry(store: Store, root: Path) -> None:
    with open_entry(store) as entry:
        entry.keep_votes(ASKED, VOTES)
        directory = path_of(root, entry).parent
        entry_id = entry.entry_id
    assert store.prune(0)[0]
    assert entry_id not in {e.entry_id for e in store.list()}
    assert not directory.exists()


def test_others_clean_up_while_they_are_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_entry(store) as entry:
        real = os.fsync
        cleaned: list[list[EntryInfo]] = []

        def fsync(fd: int) -> None:
            if not cleaned:
                cleaned.append(store.prune()[0])
            real(fd)

        monkeypatch.setattr(os, "fsync", fsync)
        entry.keep_votes(ASKED, VOTES)
        assert cleaned == [[]]
        assert entry.read_votes(ASKED, VOTES.shape) is not None


def test_what_cannot_be_written_is_not_kept(
    store: Store, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_entry(store) as entry:
        directory = path_of(root, entry).parent
        before = sorted(p.name for p in directory.iterdir())

        def refuse(*args: object) -> NoReturn:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", refuse)
        entry.keep_votes(ASKED, VOTES)
        monkeypatch.undo()
        assert sorted(p.name for p in directory.iterdir()) == before
        assert entry.read_votes(ASKED, VOTES.shape) is None


def test_a_number_per_layer_is_kept_beside_the_votes(store: Store, root: Path) -> None:
    with open_entry(store) as entry:
        assert entry.read_shares(ASKED, 3) is None
        entry.keep_votes(ASKED, VOTES)
        entry.keep_shares(ASKED, [0.5, -1.0, 1.0])
    with open_entry(store) as again:
        assert again.read_shares(ASKED, 3) == [0.5, -1.0, 1.0]
        assert again.read_shares(ASKED, 4) is None
        assert again.read_shares(b"who", 3) is None
        assert again.read_votes(ASKED, VOTES.shape) is not None
    path = path_of(root, again).with_name("shares.bin")
    path.write_bytes(path.read_bytes()[:-1] + b"0")
    with open_entry(store) as damaged:
        assert damaged.read_shares(ASKED, 3) is None

"""index.bin and units.bin are whole or not there, whatever happens while they are made."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.store.derived import IDS, SHAPE, plain_layer, slowly
from tests.store.synthetic import build, expected, make_ids, read, reopen
from tests.store.test_crashes import REPOSITORY, Died, P, R, next_line
from tests.store.test_eviction import age, named
from tsdoc.errors import ResourceError
from tsdoc.store import Store
from tsdoc.store.derive import derive, has_index
from tsdoc.store.entry import Entry
from tsdoc.store.segment import DERIVED_FILES


@pytest.fixture
def kept(store: Store) -> Store:
    """A store with one entry that has no derived files yet."""
    build(store, IDS, shape=SHAPE)[0].close()
    return store


def start(root: Path, delay_s: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.derived", str(root), str(delay_s)]
    return subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def assert_usable(store: Store) -> bool:
    """K and V are as they were; the derived files are all good, or not used."""
    with reopen(store, IDS) as entry:
        whole = has_index(entry.segments[0]) if index_is_paired(entry) else False
        assert np.array_equal(read(entry, SHAPE), expected(IDS, SHAPE))
        entry.pieces[0].check_rows(1, np.arange(0, 1900, 31))
        index = entry.pieces[0].index(1)
        if index is not None:
            good = plain_layer(1, entry.pieces[0].keys(1))
            assert np.array_equal(index.codes, good.codes)
        return whole


def index_is_paired(entry: Entry) -> bool:
    """Between the two renames there is an index without its units: made again, not trusted."""
    return all((entry.segments[0].directory / name).exists() for name in DERIVED_FILES)


def test_killed_processes_leave_nothing_that_is_trusted(kept: Store, root: Path) -> None:
    chance = random.Random(3)
    for _ in range(6):
        process = start(root, 0.05)
        assert next_line(process) == "begun\n"
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert_usable(kept)
    with reopen(kept, IDS) as entry:
        derive(entry.segments[0], plain_layer)
        segment = entry.segments[0].directory
    assert assert_usable(kept)
    kept.remove([named(kept)["doc"].entry_id])
    assert not segment.exists()  # with what the killed ones left


def test_death_at_every_write_and_rename_is_survived(
    kept: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work() -> None:
        with reopen(kept, IDS) as entry:
            derive(entry.segments[0], plain_layer)

    def at_call(number: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
        left = number

        def wrap(real: Callable[P, R]) -> Callable[P, R]:
            def call(*args: P.args, **kwargs: P.kwargs) -> R:
                nonlocal left
                left -= 1
                if left <= 0:
                    raise Died
                return real(*args, **kwargs)

            return call

        return wrap

    number, died = 0, True
    while died:
        number += 1
        with monkeypatch.context() as patches:
            wrap = at_call(number)
            for name in ("write", "pwrite", "fsync"):
                patches.setattr(os, name, wrap(getattr(os, name)))
            for name in ("replace", "unlink"):
                patches.setattr(f"pathlib.Path.{name}", wrap(getattr(type(kept._root.path), name)))
            try:
                work()
                died = False
            except Died:
                pass
        assert_usable(kept)
    assert number > 8
    assert assert_usable(kept)


@pytest.mark.parametrize("name", ["write", "pwrite"])
def test_on_a_full_disk_nothing_is_left_and_the_entry_is_good(
    kept: Store, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = getattr(os, name)
    for allowed in range(4):
        left = allowed

        def full(fd: int, data: bytes, *args: int) -> int:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(fd, data[: max(1, len(data) // 2)], *args)  # and short writes

        with reopen(kept, IDS) as entry:
            segment = entry.segments[0]
            with monkeypatch.context() as patches, pytest.raises(ResourceError, match="full"):
                patches.setattr(os, name, full)
                derive(segment, plain_layer)
            assert not list(segment.directory.glob(".tmp-*"))
            assert not (segment.directory / "units.bin").exists()
        assert_usable(kept)


def test_two_processes_that_make_it_at_once_both_succeed_and_a_reader_sees_all_or_nothing(
    kept: Store, root: Path
) -> None:
    processes = [start(root, 0.1) for _ in range(2)]
    for process in processes:
        assert next_line(process) == "begun\n"
    while any(process.poll() is None for process in processes):
        assert_usable(kept)
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert assert_usable(kept)
    with reopen(kept, IDS) as entry:
        assert not list(entry.segments[0].directory.glob(".tmp-*"))


def test_an_entry_goes_on_with_its_index_while_another_replaces_it(kept: Store) -> None:
    with reopen(kept, IDS) as entry, reopen(kept, IDS) as other:
        derive(entry.segments[0], plain_layer)
        held = entry.pieces[0].index(1)
        assert held is not None
        codes = held.codes.copy()
        making = threading.Thread(target=derive, args=(other.segments[0], slowly(0.01)))
        making.start()
        while making.is_alive():
            assert np.array_equal(held.codes, codes)
        making.join()
        assert has_index(entry.segments[0])
        assert has_index(other.segments[0])


def test_the_one_used_longest_ago_goes_with_its_index_when_the_budget_is_short(
    store: Store, root: Path
) -> None:
    for seed, name in enumerate(("old", "new")):
        built, _ = build(store, make_ids(1900, seed=seed), shape=SHAPE, name=name)
        with built:
            derive(built.segments[0], plain_layer)
    age(root, store, "old", 1000)
    held = store.num_bytes()
    # segment.json holds a moment, whose decimals are not always as many
    assert abs(named(store)["old"].num_bytes - named(store)["new"].num_bytes) < 64
    assert sum(1 for p in root.rglob("*.bin") if p.name in DERIVED_FILES) == 4
    with reopen(store, make_ids(1900, seed=1)):
        assert [e.name for e in store.prune(held - 1)[0]] == ["old"]
        assert store.prune(0) == ([], 0)  # in use
        assert store.num_bytes() == named(store)["new"].num_bytes
    assert sum(1 for p in root.rglob("*.bin") if p.name in DERIVED_FILES) == 2


def test_room_for_another_entry_is_made_by_counting_the_index_too(store: Store, root: Path) -> None:
    built, _ = build(store, IDS, shape=SHAPE, name="old")
    with built:
        derive(built.segments[0], plain_layer)
    without = named(store)["old"].num_bytes - sum(
        p.stat().st_size for p in root.rglob("*.bin") if p.name in DERIVED_FILES
    )
    tight = Store(root, max_bytes=2 * without + 4096)  # two entries without an index
    build(tight, make_ids(1900, seed=9), shape=SHAPE, name="new")[0].close()
    assert set(named(tight)) == {"new"}


def test_unequal_kinds_of_damage_at_once_are_all_repaired(kept: Store) -> None:
    with reopen(kept, IDS) as entry:
        derive(entry.segments[0], plain_layer)
        directory = entry.segments[0].directory
    for name in DERIVED_FILES:
        path = directory / name
        path.write_bytes(path.read_bytes()[:-1])
    with reopen(kept, IDS) as entry:
        assert entry.pieces[0].index(0) is None
        derive(entry.segments[0], plain_layer)
    assert assert_usable(kept)

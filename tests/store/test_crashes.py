from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

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
    prefill,
    read,
    reopen,
)
from tsdoc.store import Store
from tsdoc.store.key import Ids
from tsdoc.store.manifest import ENTRY_FILES
from tsdoc.store.pages import Segment
from tsdoc.store.segment import DERIVED_FILES, SEGMENT_FILES
from tsdoc.store.votes_file import SHARES_FILE, VOTES_FILE

REPOSITORY = Path(__file__).parents[2]
NUM_TOKENS = 4000

P = ParamSpec("P")
R = TypeVar("R")


def start(
    root: Path, num_tokens: int = NUM_TOKENS, seed: int = 0, delay_s: float = 0.0
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.store.synthetic", root, num_tokens, seed, delay_s]
    return subprocess.Popen([*map(str, command)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def events(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    out, _ = process.communicate(timeout=60)
    lines = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError):  # a line that the kill cut short
            lines.append(json.loads(line))
    return lines


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kills", [5, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_prefill_goes_on_from_the_last_committed_block(tmp_path: Path, kills: int) -> None:
    """Every kill is followed by a look: what was reported committed is there, bit for bit."""
    chance = random.Random(5)
    done = rounds = 0
    while done < kills:
        root = tmp_path / str(rounds)  # its own: a process may finish before it is killed
        done, rounds = done + kill_until_finished(root, chance), rounds + 1
        store = Store(root)
        with reopen(store, make_ids(NUM_TOKENS)) as entry:
            assert np.array_equal(read(entry), expected(entry.ids))
        check_alone(root, entry.ids)


def kill_until_finished(root: Path, chance: random.Random) -> int:
    """Starts and kills processes until one finishes; returns the number of kills."""
    store, ids = Store(root), make_ids(NUM_TOKENS)
    known = kills = 0
    while True:
        process = start(root, delay_s=0.01)
        first = next_line(process)
        time.sleep(chance.uniform(0, 0.12))
        process.send_signal(signal.SIGKILL)
        said = [json.loads(first), *events(process)]
        if {"done": True} in said:
            return kills
        kills += 1
        assert said[0]["start"] == known
        committed = max([known, *(e["committed"] for e in said if "committed" in e)])
        known = store.find(KEY, ids).reused_tokens
        # Killed between the commit and its report at the most.
        assert committed <= known <= committed + BLOCK


CALLS = ["fsync", "open", "pwrite", "posix_fallocate", "ftruncate"]


class Died(BaseException):
    """Stands for the process's end."""


class Mortality:
    """Lets this process, as far as its files are concerned, die at the n-th call that changes them.

    From then on every such call fails, so that no cleaning up reaches the disk.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(getattr(os, name)))
        for name in ("replace", "unlink", "mkdir", "rmdir"):
            monkeypatch.setattr(Path, name, self._wrap(getattr(Path, name)))

    def _wrap(self, real: Callable[P, R]) -> Callable[P, R]:
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            self.left -= 1
            if self.left <= 0:
                raise Died
            return real(*args, **kwargs)

        return call


def dies(monkeypatch: pytest.MonkeyPatch, number: int, work: Callable[[], object]) -> bool:
    """Runs `work`, dying at call `number`; returns whether it died."""
    with monkeypatch.context() as patches:
        Mortality(patches, number)
        try:
            work()
        except Died:
            return True
    return False


def prefill_all(store: Store, ids: Ids) -> None:
    with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
        prefill(writer, ids)
        writer.finish().close()


def test_death_at_every_single_file_operation_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings
) -> None:
    ids = make_ids(1500)
    number = 0
    died = True
    while died:
        number += 1
        root = tmp_path / str(number)
        died = dies(monkeypatch, number, partial(prefill_all, Store(root), ids))
        warnings.clear()
        prefill_all(Store(root, on_warning=warnings), ids)
        assert not warnings  # a death is no damage
        check_alone(root, ids)
    assert number > 60


class Diary:
    """Notes in which order files are written and made durable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lines: list[tuple[str, str]] = []
        self._note(monkeypatch, os, "fsync", lambda fd: ("sync", name_of(fd)))
        self._note(monkeypatch, os, "pwrite", lambda fd, *_: ("write", name_of(fd)))
        self._note(monkeypatch, Path, "replace", lambda _, target: ("rename", target.name))
        self._note(monkeypatch, Segment, "flush", lambda _: ("sync", "kv.bin"))

    def _note(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: object,
        name: str,
        describe: Callable[..., tuple[str, str]],
    ) -> None:
        real = getattr(owner, name)

        def noted(*args: object) -> object:
            self.lines.append(describe(*args))
            return real(*args)

        monkeypatch.setattr(owner, name, noted)


def name_of(fd: int) -> str:
    name = Path(f"/proc/self/fd/{fd}").readlink().name
    return "temporary" if name.startswith(".tmp-") else name


def test_what_vouches_for_data_is_written_after_they_are_durable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a power cut leaves is some beginning of this."""
    ids = make_ids(1500)
    diary = Diary(monkeypatch)
    prefill_all(Store(root), ids)
    name = next(root.rglob("manifest.json")).parent.name
    head = [("sync", "temporary"), ("rename", "manifest.json"), ("sync", name)]
    assert diary.lines[-3:] == head
    begun = diary.lines.index(("rename", "segment.json"))
    assert diary.lines.index(("sync", "tokens.bin")) < begun
    assert diary.lines.index(("rename", "manifest.json")) < begun < len(diary.lines) - 3
    journal = [line for line in diary.lines if line[1] in ("kv.bin", "journal.bin")]
    assert journal[0] == ("sync", "kv.bin")  # reserved
    commit = [("sync", "kv.bin"), ("write", "journal.bin"), ("sync", "journal.bin")]
    assert journal[-9:] == 3 * commit


@pytest.mark.parametrize("seed", range(3))
def test_a_row_of_deaths_is_survived(
    store: Store, root: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(1500, seed=seed)
    chance = random.Random(seed)
    for _ in range(12):
        dies(monkeypatch, chance.randrange(1, 90), lambda: prefill_all(store, ids))
        assert all(e.status != "complete" for e in store.list()) or store.open(KEY, ids)
    prefill_all(store, ids)
    check_alone(root, ids)


def test_death_at_every_step_of_a_removal_leaves_nothing_half_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = make_ids(300)
    number = 0
    died = True
    while died:
        number += 1
        root = tmp_path / str(number)
        store = Store(root, max_bytes=1 << 30)
        prefill_all(store, ids)
        name = store.list()[0].entry_id
        died = dies(monkeypatch, number, partial(store.remove, [name]))
        entry = store.open(KEY, ids)
        if entry is not None:
            with entry:
                assert np.array_equal(read(entry), expected(ids))
        elif store.list():
            store.remove([name])
            assert not list(root.rglob("tokens.bin"))
        prefill_all(store, ids)
        check_alone(root, ids)


def check_alone(root: Path, ids: Ids) -> None:
    """The store holds this one entry, right, and no litter."""
    store = Store(root, max_bytes=1 << 30)
    with reopen(store, ids) as entry:
        assert np.array_equal(read(entry), expected(ids))
    assert [e.status for e in store.list()] == ["complete"]
    names = {p.name for p in root.rglob("*") if p.is_file()}
    written = {*ENTRY_FILES, *SEGMENT_FILES} - {*DERIVED_FILES, VOTES_FILE, SHARES_FILE}
    assert names == {"store.lock", "model.json", *written}
    assert len(list(root.rglob("*"))) == len(names) + 5  # and the directories


def test_two_processes_at_once_compute_a_document_once(root: Path) -> None:
    processes = [start(root, delay_s=0.02) for _ in range(3)]
    said = [events(p) for p in processes]
    assert all(e[-1] == {"done": True} for e in said)
    committed = [e["committed"] for lines in said for e in lines if "committed" in e]
    assert len(committed) == len(set(committed)) == -(-NUM_TOKENS // BLOCK)
    ids = make_ids(NUM_TOKENS)
    check_alone(root, ids)


def test_who_waits_takes_over_when_the_writer_is_killed(store: Store, root: Path) -> None:
    first = start(root, delay_s=0.2)
    assert json.loads(next_line(first)) == {"start": 0}
    second = start(root)
    while json.loads(next_line(first))["committed"] < 2 * BLOCK:
        pass
    first.send_signal(signal.SIGKILL)
    events(first)
    said = events(second)
    assert said[-1] == {"done": True}
    assert said[0]["start"] in (2 * BLOCK, 3 * BLOCK)


def test_who_waits_is_told_how_far_the_other_is(store: Store, root: Path) -> None:
    other = start(root, delay_s=0.15)
    next_line(other)
    heard: list[int] = []
    ids = make_ids(NUM_TOKENS)
    with store.begin(
        KEY, SHAPE, ids, prefill_block=BLOCK, name="doc", on_wait=heard.append
    ) as writer:
        assert writer.complete
    assert events(other)[-1] == {"done": True}
    assert heard
    assert heard == sorted(heard)
    assert heard[-1] <= NUM_TOKENS


def test_an_open_entry_outlives_its_removal_by_force(store: Store, root: Path) -> None:
    """Readers that mapped the files keep their data, whatever happens to the names."""
    ids = make_ids(1300)
    prefill_all(store, ids)
    entry = reopen(store, ids)
    for path in sorted(root.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert np.array_equal(read(entry), expected(ids))


def test_a_segment_that_a_killed_run_only_began_is_not_listed_and_goes_with_the_next_run(
    store: Store, root: Path
) -> None:
    build(store, make_ids(1024))[0].close()
    segment = next(root.rglob("segment.json")).parent
    unborn = segment.with_name("0" * 32)
    unborn.mkdir(mode=0o700)
    for name in ("write.lock", "tokens.bin", "journal.bin"):
        (unborn / name).write_bytes(b"")
    assert [entry.status for entry in store.list()] == ["complete"]
    build(store, make_ids(1024, seed=1))[0].close()
    assert not unborn.exists()
    assert [entry.status for entry in store.list()] == ["complete", "complete"]

"""`tsdoc cache repair`: entries made whole again without their sources."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.conftest import Recorder
from tsdoc.home import Home
from tsdoc.session import Session
from tsdoc.session.repairing import Repaired, Repairer
from tsdoc.settings import ModelSettings, Settings
from tsdoc.store import Store
from tsdoc.store.key import FORMAT

Start = Callable[..., Session]
QUESTION = "What does locker 7 hold?"


@pytest.fixture
def cold(start: Start, document: Path) -> str:
    """The answer of a first run; the document is gone afterwards."""
    with start() as session:
        text = session.ask(QUESTION, lambda piece: None).text
    shutil.copy(document, document.with_suffix(".kept"))
    document.unlink()
    return text


@pytest.fixture
def repair(home: Home, model_directory: Path) -> Callable[..., list[Repaired]]:
    """Repairs the whole store, with the right model or another."""

    def run(source: str | None = None, *, reporter: Recorder | None = None) -> list[Repaired]:
        store = Store(home.store)
        settings = Settings(model=ModelSettings(source=source or str(model_directory)))
        recorder = reporter or Recorder()
        repairer = Repairer(settings=settings, home=home, store=store, reporter=recorder)
        return [repairer.repair(info) for info in store.list()]

    return run


def find(home: Home, name: str) -> Path:
    (path,) = home.store.rglob(name)
    return path


def flip(path: Path, *offsets: int) -> None:
    data = bytearray(path.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path.write_bytes(bytes(data))


def answer(start: Start, document: Path) -> str:
    shutil.copy(document.with_suffix(".kept"), document)
    reporter = Recorder()
    with start(reporter) as session:
        answer = session.ask(QUESTION, lambda piece: None)
        assert answer.reused_tokens == len(session.prompt.ids)
    assert reporter.warnings == []
    return answer.text


def test_a_whole_store_is_left_as_it_is(
    cold: str, repair: Callable[..., list[Repaired]], home: Home
) -> None:
    before = find(home, "kv.bin").read_bytes()
    assert repair() == [Repaired()]
    assert find(home, "kv.bin").read_bytes() == before


def test_damaged_blocks_become_what_they_were(
    cold: str, repair: Callable[..., list[Repaired]], home: Home, start: Start, document: Path
) -> None:
    path = find(home, "kv.bin")
    before = path.read_bytes()
    flip(path, 0, 1000 * 128)  # layer 0, tokens 0 and 1000
    reporter = Recorder()
    (found,) = repair(reporter=reporter)
    assert found.problem is None
    assert (found.num_blocks, found.num_tokens) == (2, 512)
    assert [message for _, _, message in reporter.warnings] == [
        f"KV page {page} of layer 0 does not match its checksum; "
        f"computing tokens {256 * page:,} to {256 * page + 256:,} again"
        for page in (0, 3)
    ]
    assert reporter.stages[-1] == "compute again"
    assert path.read_bytes() == before
    assert repair() == [Repaired()]
    assert answer(start, document) == cold


@pytest.mark.parametrize("name", ["kv.bin", "journal.bin", "segment.json", "manifest.json"])
@pytest.mark.parametrize("how", ["cut", "missing"])
def test_an_entry_that_lost_a_file_is_computed_from_its_own_ids(
    cold: str,
    repair: Callable[..., list[Repaired]],
    home: Home,
    start: Start,
    document: Path,
    name: str,
    how: str,
) -> None:
    path = find(home, name)
    before = find(home, "kv.bin").read_bytes()
    if how == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.unlink()
    assert {found.problem for found in repair()} == {None}
    assert find(home, "kv.bin").read_bytes() == before
    assert answer(start, document) == cold


def test_pages_behind_a_lost_manifest_are_read_too(
    cold: str, repair: Callable[..., list[Repaired]], home: Home, start: Start, document: Path
) -> None:
    find(home, "manifest.json").unlink()
    path = find(home, "kv.bin")
    before = path.read_bytes()
    flip(path, 0)
    (found,) = repair()
    assert (found.problem, found.num_blocks, found.num_tokens) == (None, 1, 256)
    assert path.read_bytes() == before
    assert answer(start, document) == cold


def test_without_its_ids_an_entry_is_lost_and_said_so(
    cold: str, repair: Callable[..., list[Repaired]], home: Home
) -> None:
    flip(find(home, "tokens.bin"), -5)
    (found,) = repair()
    assert found.problem is not None
    assert "token ids are lost. Ask about its sources again" in found.problem


def test_without_its_model_nothing_is_repaired(
    cold: str, repair: Callable[..., list[Repaired]], home: Home, model_directory: Path
) -> None:
    flip(find(home, "kv.bin"), 0)
    (found,) = repair(str(model_directory / "elsewhere"))
    assert found.problem is not None
    assert "the model that computed it is not on this disk" in found.problem
    assert "--model" in found.problem


def test_what_another_tsdoc_wrote_and_what_is_not_finished_is_left_alone(
    cold: str, repair: Callable[..., list[Repaired]], home: Home, start: Start, document: Path
) -> None:
    path = find(home, "manifest.json")
    path.write_text(path.read_text().replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'))
    assert repair() == [Repaired(problem="was written by a newer tsdoc")]
    path.unlink()
    for lost in home.store.rglob("segment.json"):
        lost.unlink()
    shutil.copy(document.with_suffix(".kept"), document)
    with pytest.raises(KeyboardInterrupt), start(Recorder(interrupt_at=512)) as session:
        session.prepare()
    assert Repaired() in repair()

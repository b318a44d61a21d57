"""Questions that go by the key index: made once, checked, made again, and never needed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.session.conftest import Recorder
from tsdoc.home import Home
from tsdoc.kernels.index_use import IndexConfig, IndexWatch
from tsdoc.kernels.torch_selection import TorchSelector
from tsdoc.session import Answer, Session
from tsdoc.session.indexing import keep_shares, recall_shares
from tsdoc.store.segment import DERIVED_FILES

Start = Callable[..., Session]
LONG = "".join(f"Fact {i}: the locker {i} holds item {i * 37 % 101}.\n" for i in range(330))
WIDE = {
    "index": "int4",
    "index_candidates": 16,
    "theta": None,
}  # 1,024 candidates of some 5,000 tokens


@pytest.fixture
def long(start: Start, document: Path) -> Start:
    document.write_text(LONG, encoding="utf-8")

    def open_it(reporter: Recorder | None = None, **engine: object) -> Session:
        base = {"prefill_block": 1024, "question_chunk_size": 64}
        return start(reporter, engine={**base, **WIDE, **engine})

    return open_it


def ask(session: Session) -> Answer:
    with session:
        return session.ask("What does locker 7 hold?", lambda text: None)


def derived(home: Home) -> list[Path]:
    return sorted(p for p in home.root.rglob("*.bin") if p.name in DERIVED_FILES)


def test_it_is_made_with_the_entry_and_found_again(long: Start, home: Home) -> None:
    first = ask(long())
    files = derived(home)
    assert [p.name for p in files] == ["index.bin", "units.bin"]
    times = [p.stat().st_mtime_ns for p in files]
    second = long()
    assert ask(second).text == first.text
    assert [p.stat().st_mtime_ns for p in derived(home)] == times
    whole = long(index="none")  # the same entry
    assert second.model_key == whole.model_key
    assert ask(whole).reused_tokens == ask(long()).reused_tokens > 4096


def test_without_it_nothing_is_made(long: Start, home: Home) -> None:
    ask(long(index="none"))
    assert derived(home) == []


def test_a_damaged_one_is_named_and_made_again(long: Start, home: Home) -> None:
    text = ask(long()).text
    for number in range(2):
        path = derived(home)[number]
        good = path.read_bytes()
        path.write_bytes(good[:-9] if number else bytes([good[0] ^ 1]) + good[1:])
        reporter = Recorder()
        assert ask(long(reporter)).text == text
        assert [code for code, _, _ in reporter.warnings] == ["damaged_store"]
        assert path.name in reporter.warnings[0][1]
        assert derived(home)[number].read_bytes() == good


def test_damaged_keys_are_computed_again_while_it_is_made(long: Start, home: Home) -> None:
    text = ask(long()).text
    for path in derived(home):
        path.unlink()
    (pages,) = home.root.rglob("kv.bin")
    data = bytearray(pages.read_bytes())
    data[5000] ^= 4
    pages.write_bytes(data)
    reporter = Recorder()
    assert ask(long(reporter)).text == text
    assert [code for code, _, _ in reporter.warnings] == ["page_repaired"]
    assert len(derived(home)) == 2


def test_a_damaged_row_of_a_candidate_is_computed_again(long: Start, home: Home) -> None:
    text = ask(long()).text
    (pages,) = home.root.rglob("kv.bin")
    good = pages.read_bytes()
    pages.write_bytes(bytes(byte ^ 1 for byte in good[:200_000]) + good[200_000:])
    reporter = Recorder()
    assert ask(long(reporter)).text == text
    assert {code for code, _, _ in reporter.warnings} == {"page_repaired"}


def test_on_a_full_disk_all_keys_are_read_and_the_next_one_has_it(
    long: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ask(long(index="none")).text
    reporter = Recorder()
    with monkeypatch.context() as patches:

        def full(*arguments: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patches.setattr("tsdoc.store.derive.write_index", full)
        assert ask(long(reporter)).text == text
    assert [code for code, _, _ in reporter.warnings] == ["no_index"]
    assert "disk is full" in reporter.warnings[0][2]
    assert derived(home) == []
    ask(long())
    assert len(derived(home)) == 2


def test_where_the_budget_has_no_room_all_keys_are_read(
    long: Start, start: Start, home: Home
) -> None:
    text = ask(long(index="none")).text
    (pages,) = home.root.rglob("kv.bin")
    reporter = Recorder()
    session = start(
        reporter,
        engine={"prefill_block": 1024, "question_chunk_size": 64, **WIDE},
        store={"max_bytes": pages.stat().st_size + 100_000},
    )
    assert ask(session).text == text
    assert derived(home) == []
    (warning,) = reporter.warnings
    assert warning[0] == "no_index"
    assert "the store's budget has" in warning[2]


def test_a_damaged_index_does_not_matter_where_none_is_asked_for(long: Start, home: Home) -> None:
    ask(long())
    path = derived(home)[0]
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    reporter = Recorder()
    assert ask(long(reporter, index="none")).text
    assert reporter.warnings == []


def test_how_well_each_layer_selects_is_found_by_the_first_question_and_kept(
    long: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = long()
    text = ask(first).text
    watch = first._engines.make(1).index
    assert watch is not None
    assert None not in watch.known(first.model.config.num_layers)
    (path,) = home.root.rglob("shares.bin")
    kept = path.read_bytes()
    exactly: list[int] = []
    select = TorchSelector._select_exactly

    def note(self: TorchSelector, layer: int, *arguments: object) -> list[torch.Tensor]:
        exactly.append(layer)
        return select(self, layer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(TorchSelector, "_select_exactly", note)
    second = long()
    assert ask(second).text == text
    assert not exactly
    assert path.read_bytes() == kept
    path.write_bytes(kept[:-1])  # damaged: found out again
    assert ask(long()).text == text
    assert exactly
    assert path.read_bytes() == kept


def test_what_one_device_found_out_is_not_taken_for_another() -> None:
    """They differ in how many candidates there are."""
    kept: dict[bytes, list[float]] = {}
    entry: Any = SimpleNamespace(
        read_shares=lambda asked, num_layers: kept.get(asked),
        keep_shares=lambda asked, shares: kept.update({asked: shares}),
    )

    def engine(device: str) -> Any:
        decoder = SimpleNamespace(config=SimpleNamespace(num_layers=2))
        backend = SimpleNamespace(device=SimpleNamespace(type=device))
        return SimpleNamespace(runner=SimpleNamespace(decoder=decoder), backend=backend)

    found = IndexWatch(IndexConfig())
    found.note(1, 0.9)
    keep_shares(engine("cuda"), found, entry)
    for device, known in (("cpu", [None, None]), ("cuda", [None, 0.9])):
        watch = IndexWatch(IndexConfig())
        recall_shares(engine(device), watch, entry)
        assert watch.known(2) == known

"""Passages under an answer: whole, short, in their place, and for nothing when not wanted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.session.conftest import TEXT, Recorder
from tsdoc.engine import evidence as engine_evidence
from tsdoc.engine import query_log
from tsdoc.errors import CorruptPageError
from tsdoc.evidence.results import Evidence
from tsdoc.home import Home
from tsdoc.session import Answer, Session
from tsdoc.session.evidence import EvidenceFinder
from tsdoc.store import Entry

Start = Callable[..., Session]
QUESTION = "What does locker 7 hold?"


def explained(session: Session, count: int) -> Answer:
    answer = session.ask(QUESTION, lambda text: None, keep_queries=True)
    return session.find_evidence(answer, count=count)


@pytest.mark.parametrize("top_k", [64, 4000], ids=["selected", "everything fits"])
def test_passages_are_text_of_the_document_with_their_lines(start: Start, top_k: int) -> None:
    with start(selection={"top_k": top_k, "n_local": 64}) as session:
        answer = explained(session, 4)
    evidence = answer.evidence
    assert evidence is not None
    assert len(evidence.passages) == 4
    assert answer.times_s["evidence"] > 0
    lines = TEXT.split("\n")
    for passage in evidence.passages:
        assert passage.text == TEXT[passage.start : passage.end]
        assert TEXT[: passage.start].rpartition("\n")[2] == passage.lead
        assert passage.num_tokens <= 100
        first, last = passage.first.line, passage.last.line
        assert first is not None
        assert last is not None
        assert passage.text in "\n".join(lines[first - 1 : last])
        assert passage.text.split("\n")[0] in lines[first - 1]
        assert 0 < passage.share < 1
        assert 0 <= passage.attention < 1
    for one, other in combinations(evidence.passages, 2):
        assert one.end <= other.start or other.end <= one.start
    assert max(evidence.strip) == 1
    assert min(evidence.strip) >= 0


def test_the_answer_is_the_same_with_evidence(start: Start) -> None:
    with start() as session:
        plain = session.ask(QUESTION, lambda text: None)
        first = explained(session, 2)
        again = explained(session, 2)
    assert first.text == plain.text
    assert plain.evidence is None
    assert "evidence" not in plain.times_s
    assert again.evidence == first.evidence


def test_evidence_that_is_not_wanted_costs_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(query_log.QueryLog, "__init__", None)
    with start() as session:
        assert session.ask(QUESTION, lambda text: None).generated_tokens > 0


def test_coverage_counts_files(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text(TEXT[number * 300 :][:300], encoding="utf-8")
    with start(sources=[str(folder)]) as session:
        evidence = explained(session, 1).evidence
    assert evidence is not None
    assert evidence.coverage is not None
    assert evidence.coverage.unit == "file"
    assert evidence.coverage.total == 5
    assert 1 <= evidence.coverage.holding <= 5


def test_damage_that_is_met_after_the_answer_is_repaired(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as session:
        expected = explained(session, 3)
    damaged = [CorruptPageError("KV page 0", where="kv.bin", start=0, end=256)]
    find = EvidenceFinder.find

    def find_it(*args: Any, **options: Any) -> Evidence:
        if damaged:
            raise damaged.pop()
        return find(*args, **options)

    monkeypatch.setattr(EvidenceFinder, "find", find_it)
    reporter = Recorder()
    with start(reporter) as session:
        assert explained(session, 3).evidence == expected.evidence
    assert [code for code, _, _ in reporter.warnings] == ["page_repaired"]


def test_the_neutral_question_is_asked_once_for_all_sessions(
    start: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as session:
        first = explained(session, 3)
    asked = []
    real = engine_evidence.document_votes

    def count(*args: Any, **options: Any) -> torch.Tensor:
        asked.append(args)
        return real(*args, **options)

    monkeypatch.setattr(engine_evidence, "document_votes", count)
    with start() as session:
        assert explained(session, 3).evidence == first.evidence
    assert not asked
    (path,) = home.store.rglob("votes.bin")
    path.write_bytes(path.read_bytes()[:-4])
    with start() as session:
        assert explained(session, 3).evidence == first.evidence
    assert len(asked) == 1
    # Votes that no model casts are not believed, whoever sealed them.
    with start() as session:
        entry = session._kept.get().entry
        assert entry is not None
        asked_for: list[Any] = []

        def read_votes(entry: Entry, *args: Any) -> None:
            asked_for.append(args)

        with monkeypatch.context() as patched:
            patched.setattr(type(entry), "read_votes", read_votes)
            explained(session, 3)
        key, shape = asked_for[0]
        entry.keep_votes(key, np.full(shape, np.nan, np.float32))
    with start() as session:
        assert explained(session, 3).evidence == first.evidence

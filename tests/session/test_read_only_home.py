"""A home that cannot be written costs what would be kept, and never the answer."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.read_only import make_read_only
from tests.session.conftest import Recorder
from tsdoc.errors import ResourceError, StoreError
from tsdoc.home import Home
from tsdoc.prompt.files import write_checked
from tsdoc.session import Conversation, Session
from tsdoc.session.calibration import MIN_TOKENS, Calibration, read_all
from tsdoc.session.kept import forget_conversation
from tsdoc.session.parts import split_document
from tsdoc.session.summary import Summarizer

Start = Callable[..., Session]
QUESTION = "What does locker 7 hold?"


def ignore(text: str) -> None:
    pass


def codes(reporter: Recorder) -> list[str]:
    return [code for code, _, _ in reporter.warnings]


@pytest.mark.parametrize("exists", [False, True])
def test_a_new_document_is_answered_and_what_is_not_kept_is_said(
    start: Start, home: Home, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    with start(store={"enabled": False}) as session:
        expected = session.ask(QUESTION, ignore)
    shutil.rmtree(home.root)
    if exists:
        for directory in (home.root, home.store, home.records, home.models):
            directory.mkdir(mode=0o700)
    make_read_only(monkeypatch, home.root)
    reporter = Recorder()
    with start(reporter) as session:
        prepared = session.prepare()
        answer = session.ask(QUESTION, ignore, keep_queries=True)
        explained = session.find_evidence(answer, count=1)
    assert prepared.computed_tokens >= MIN_TOKENS  # its rate was to be noted
    assert not prepared.kept
    assert answer.text == expected.text
    assert explained.evidence is not None
    assert codes(reporter) == ["not_kept", "not_kept"]
    assert read_all(home) == {}


def test_what_was_kept_before_is_used(
    start: Start, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start() as session:
        expected = session.ask(QUESTION, ignore)
    make_read_only(monkeypatch, home.root)
    reporter = Recorder()
    with start(reporter) as session:
        prepared = session.prepare()
        answer = session.ask(QUESTION, ignore)
    assert (prepared.kept, prepared.computed_tokens) == (True, 0)
    assert answer.text == expected.text
    assert "tokenise" not in reporter.stages
    assert reporter.warnings == []


def test_a_rate_that_cannot_be_written_is_left_out(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = Calibration(home=home, model_key="ab" * 16, device="cpu", threads=2)
    rate.note(1000, 10.0, memory_bytes=1, prompt_tokens=1000)
    make_read_only(monkeypatch, home.root)
    rate.note(1000, 20.0, memory_bytes=1, prompt_tokens=1000)
    known = rate.read()
    assert known is not None
    assert known.tokens_per_s == 100.0


@pytest.mark.parametrize("exists", [False, True])
def test_a_conversation_that_cannot_be_kept_says_to_leave_out_its_name(
    start: Start, home: Home, monkeypatch: pytest.MonkeyPatch, exists: bool
) -> None:
    session = start()
    if exists:
        home.conversations.mkdir(mode=0o700)
    make_read_only(monkeypatch, home.root)
    with pytest.raises(StoreError, match="Read-only file system") as caught, session:
        Conversation(session=session, name="lockers").__enter__()
    assert str(home.conversations) in (caught.value.where or "")
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("Leave out --name, or point TSDOC_HOME")
    with pytest.raises(StoreError, match="removing the conversation failed"):
        forget_conversation(home, "lockers")


def test_summaries_of_parts_are_made_though_they_cannot_be_kept(
    start: Start, home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.md"
    lines = "".join(f"The locker {n} holds item {n * 37 % 101}.\n" for n in range(30))
    book.write_text("".join(f"# Chapter {n}\n\n{lines}\n" for n in (1, 2)), "utf-8")
    reporter = Recorder()
    with start(reporter, sources=[str(book)]) as session:
        session.prepare()
        parts = split_document(session.document, session.prompt, "section")
        summarizer = Summarizer(session, "short", max_new_tokens=4)
        first = summarizer.part(parts[0])
        make_read_only(monkeypatch, home.root)
        second = summarizer.part(parts[1])
        summarizer.part(parts[1])
        kept = summarizer.kept_part(parts[0])
    assert len(parts) == 2
    assert second.answer is not None
    assert kept is not None
    assert kept.text == first.text
    assert codes(reporter) == ["not_kept"]
    assert not summarizer.keeps


def test_a_full_disk_is_an_error_of_resources_wherever_it_is_met(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    home.root.mkdir()
    monkeypatch.setattr("tsdoc.prompt.files.write_private", full)
    with pytest.raises(ResourceError, match="the disk is full"):
        write_checked(home.root / "any.json", {})

"""A command line run in this process: real arguments, made streams, a made library."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tsdoc.cli.app import build_app
from tsdoc.cli.console import Terminal
from tsdoc.cli.counting import CountTexts
from tsdoc.cli.edge import run_command
from tsdoc.cli.services import ListedModel, Services
from tsdoc.evidence import Coverage, Evidence, Passage
from tsdoc.home import Home
from tsdoc.ingest.document import (
    Document,
    IngestWarning,
    Place,
    Section,
    SkippedFile,
    SourceFile,
)
from tsdoc.ingest.options import IngestOptions
from tsdoc.progress import Reporter
from tsdoc.session import Answer, Estimate, Outcome
from tsdoc.session.parts import Part
from tsdoc.session.repairing import Repaired
from tsdoc.session.summary import CitedSentence, Summary
from tsdoc.settings import Settings


class Screen(io.StringIO):
    """A stream that may claim to be a terminal."""

    def __init__(self, text: str = "", *, terminal: bool = False) -> None:
        super().__init__(text)
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


@dataclass
class FakeSession:
    """A session whose answers are given; it records what it was opened with and asked."""

    settings: Settings
    sources: tuple[str, ...]
    ingest: IngestOptions
    offline: bool
    reporter: Reporter
    behaviour: FakeServices
    asked: list[str] = field(default_factory=list)
    explained: list[int] = field(default_factory=list)
    closed: bool = False

    @property
    def model(self) -> SimpleNamespace:
        return SimpleNamespace(
            name="test-model", licence="Apache-2.0", small=True, note="Copied by hand."
        )

    @property
    def document(self) -> Document:
        return self.behaviour.document

    @property
    def prompt(self) -> SimpleNamespace:
        arrays = SimpleNamespace(section_tokens=np.array([10, 20, 50, 90]))
        token_map = SimpleNamespace(
            document=self.document,
            arrays=arrays,
            section_range=lambda section: tuple(arrays.section_tokens[section : section + 2]),
        )
        return SimpleNamespace(ids=[0] * 100, map=token_map)

    @property
    def warnings(self) -> list[IngestWarning]:
        return list(self.document.warnings)

    def estimate(self) -> Estimate:
        reused = self.behaviour.reused_tokens
        return Estimate(
            prompt_tokens=100,
            reused_tokens=reused,
            prefill_tokens=100 - reused,
            prefill_s=self.behaviour.known_prefill_s,
            kv_bytes=2_000_000,
            free_disk_bytes=10**9,
            memory_bytes=10**8,
            memory_tokens=100,
        )

    def prepare(self, *, must_keep: bool = False) -> SimpleNamespace:
        reused = self.behaviour.reused_tokens
        return SimpleNamespace(
            prompt_tokens=100,
            reused_tokens=reused,
            computed_tokens=100 - reused,
            kept=True,
            entry_id="abc123",
            estimate=self.estimate(),
            outcome=Outcome(prefill_s=1.5, memory_bytes=10**8),
            times_s={"prefill": 1.5},
        )

    def ask(
        self, question: str, on_text: Callable[[str], None], *, keep_queries: bool = False
    ) -> Any:
        self.asked.append(question)
        self.behaviour.before_answer(self.reporter)
        for piece in self.behaviour.pieces:
            on_text(piece)
        return Answer(
            question=question,
            text="".join(self.behaviour.pieces),
            finish_reason=self.behaviour.finish_reason,
            prompt_tokens=110,
            reused_tokens=100,
            reread_tokens=0,
            generated_tokens=len(self.behaviour.pieces),
            selection_steps=4,
            selection_hits=3,
            times_s={
                "question": self.behaviour.answer_s / 3,
                "decode": self.behaviour.answer_s * 2 / 3,
            },
        )

    def find_evidence(self, answer: Answer, *, count: int) -> Answer:
        self.explained.append(count)
        evidence = self.behaviour.evidence
        assert evidence is not None
        return dataclasses.replace(answer, evidence=evidence)


@dataclass
class FakeConversation:
    """Turns of a made session; nothing is kept."""

    session: Any
    name: str | None
    turns: list[Any] = field(default_factory=list)
    num_tokens: int = 0
    num_pending: int = 0

    def __enter__(self) -> FakeConversation:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def ask(
        self, question: str, on_text: Callable[[str], None], *, keep_queries: bool = False
    ) -> Answer:
        answer: Answer = self.session.ask(question, on_text, keep_queries=keep_queries)
        self.turns.append(
            SimpleNamespace(
                question=question, finish_reason=answer.finish_reason, evidence=answer.evidence
            )
        )
        self.num_tokens += 12
        return answer

    def find_evidence(self, answer: Answer, *, count: int) -> Answer:
        answer = self.session.find_evidence(answer, count=count)
        self.turns[-1].evidence = answer.evidence
        return answer


def made_place(line: int) -> Place:
    """Returns a line of a made book."""
    return Place(file="big.txt", titles=(), page=None, page_label=None, line=line)


@dataclass
class FakeSummarizer:
    """Summaries that are given; the first `num_kept` parts have theirs already."""

    session: Any
    behaviour: FakeServices
    length: str
    max_new_tokens: int | None
    keeps: bool = True
    made: list[str] = field(default_factory=list)

    def _summary(self, *sentences: tuple[str, int | None], kept: bool = False) -> Summary:
        answer: Any = None if kept else self.session.ask("Summarise.", lambda text: None)
        return Summary(
            sentences=tuple(
                CitedSentence(text=text, place=self._place(line)) for text, line in sentences
            ),
            nearest=self._place(self.behaviour.nearest_line),
            finish_reason="stop",
            generated_tokens=9,
            answer=answer,
        )

    def _place(self, line: int | None) -> Place | None:
        return None if line is None else self.behaviour.place or made_place(line)

    def whole(self, on_sentence: Callable[[CitedSentence], None]) -> Summary:
        summary = self._summary(
            ("It begins.", 3), ("It goes on.", 3), ("Nobody knows.", None), ("It ends.", 3)
        )
        for sentence in summary.sentences:
            on_sentence(sentence)
        return summary

    def kept_part(self, part: Part) -> Summary | None:
        number = self.behaviour.parts.index(part)
        if number >= self.behaviour.num_kept_parts:
            return None
        return self._summary((f"{part.title} is kept.", 5), kept=True)

    def part(self, part: Part) -> Summary:
        self.made.append(part.title)
        text, line = self.behaviour.part_text, self.behaviour.part_line
        return self._summary(*([(text.format(part.title), line)] if text else []))

    def of_summaries(
        self, parts: Sequence[tuple[Part, Summary]], on_sentence: Callable[[CitedSentence], None]
    ) -> Summary:
        summary = self._summary((f"It has {len(parts)} parts.", None))
        on_sentence(summary.sentences[0])
        return summary


class FakeServices(Services):
    """A library that reads nothing and answers what it is told to."""

    def __init__(self, home: Path) -> None:
        self.root = home
        self.pieces = ["The villain", " is Moriarty."]
        self.finish_reason = "stop"
        self.answer_s = 1.5
        self.evidence: Evidence | None = make_evidence()
        self.reused_tokens = 0
        self.known_prefill_s: float | None = None
        self.count: CountTexts | None = None
        self.document = make_document()
        self.sessions: list[FakeSession] = []
        self.parts = [
            Part(
                title=title,
                headings=((title,),),
                sections=(n, n + 1),
                tokens=(n * 10, n * 10 + 10),
                first=made_place(n * 10 + 1),
                last=made_place(n * 10 + 10),
            )
            for n, title in enumerate(("One", "Two", "Three"))
        ]
        self.num_kept_parts = 0
        self.part_text: str | None = "{} is new."
        self.part_line: int | None = 7
        self.nearest_line: int | None = 9
        self.place: Place | None = None
        self.summarizers: list[FakeSummarizer] = []
        self.conversations: list[FakeConversation] = []
        self.kept_questions: list[str] = []
        self.kept_reason = "interrupted"
        self.kept_evidence: Evidence | None = None
        self.repaired: dict[str, Repaired] = {}
        self.before_answer: Callable[[Reporter], None] = lambda reporter: None

    def home(self) -> Home:
        return Home(self.root)

    @contextmanager
    def open_session(self, **arguments: Any) -> Iterator[Any]:
        arguments.pop("home")
        arguments["sources"] = tuple(arguments["sources"])
        session = FakeSession(**arguments, behaviour=self)
        for warning in self.document.warnings:
            session.reporter.warn(warning.code, warning.where, warning.message)
        self.sessions.append(session)
        try:
            yield session
        finally:
            session.closed = True

    def open_conversation(self, session: Any, *, name: str | None) -> Any:
        turns = [
            SimpleNamespace(
                question=question, finish_reason=self.kept_reason, evidence=self.kept_evidence
            )
            for question in self.kept_questions
        ]
        tokens = 12 * len(turns)
        conversation = FakeConversation(session, name, turns, tokens, tokens)
        self.conversations.append(conversation)
        return conversation

    def open_summarizer(self, session: Any, **options: Any) -> Any:
        self.summarizers.append(FakeSummarizer(session, self, **options))
        return self.summarizers[-1]

    def split_document(self, session: Any, by: str) -> list[Part]:
        return self.parts

    def read_sources(
        self, sources: Sequence[str], options: IngestOptions, reporter: Reporter
    ) -> Document:
        return self.document

    def token_counter(self, **arguments: Any) -> CountTexts | None:
        return self.count

    def repairer(self, **arguments: Any) -> Any:
        return SimpleNamespace(repair=lambda entry: self.repaired.get(entry.entry_id, Repaired()))

    def list_profiles(self, home: Home) -> list[ListedModel]:
        return [
            ListedModel(
                name=name,
                source=source,
                licence=licence,
                download_bytes=size,
                directory=None,
                path=Path(f"/profiles/{name}.yaml"),
            )
            for name, source, licence, size in (
                ("default", "default", None, None),
                ("tiny", "pypi:small-model", "Apache-2.0", 92_900_000),
            )
        ]

    def get_model(self, name: str, **arguments: Any) -> Any:
        assert arguments["reporter"].confirm(f"Download {name}?")
        return SimpleNamespace(
            name=name,
            directory=Path("/models/tiny"),
            licence="Apache-2.0",
            licence_url=None,
            fingerprint="f00d",
            config=SimpleNamespace(architecture="llama", window=8192),
        )


def make_evidence(**changes: Any) -> Evidence:
    """Returns two passages of `make_document`'s file big.txt."""

    def passage(start: int, text: str, line: int, last: int, **more: Any) -> Passage:
        place = Place(file="big.txt", titles=("One",), page=None, page_label=None, line=line)
        values: dict[str, Any] = {
            "text": text,
            "lead": "",
            "first": place,
            "last": dataclasses.replace(place, line=last),
            "section": 1,
            "start": start,
            "end": start + len(text),
            "num_tokens": 4,
            "position": 0.5,
            "share": 0.25,
            "attention": 0.125,
        }
        return Passage(**{**values, **more})

    values: dict[str, Any] = {
        "passages": (
            passage(0, "many words\nmany words", 1, 2),
            passage(33, "many words", 4, 4, position=0.75),
        ),
        "coverage": Coverage(unit="file", holding=1, total=2),
        "stands_out": True,
        "strip": (0.0, 1.0, 0.5, 0.25),
    }
    return Evidence(**{**values, **changes})


def make_document(**changes: Any) -> Document:
    """Returns a document of two files, with one warning and one skipped file."""
    values: dict[str, Any] = {
        "name": "shelf",
        "files": tuple(
            SourceFile(name=name, path=None, kind="text", num_bytes=10, sha256="0" * 64)
            for name in ("a/small.txt", "big.txt")
        ),
        "sections": (
            Section(file=0, titles=(), text="few words", first_line=1),
            Section(file=1, titles=("One",), text="many words " * 50, first_line=1),
            Section(file=1, titles=("Two",), text="more words " * 90, first_line=7),
        ),
        "warnings": (IngestWarning(code="decoded_lossily", where="big.txt", message="guessed"),),
        "skipped": (SkippedFile(name="logo.png", reason="binary", num_bytes=2048),),
    }
    return Document(**{**values, **changes})


@dataclass
class Result:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> dict[str, Any]:
        value = json.loads(self.stdout)
        assert isinstance(value, dict)
        return value


Cli = Callable[..., Result]


@pytest.fixture
def services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServices:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("TSDOC_PASSWORD", raising=False)
    monkeypatch.chdir(tmp_path)
    return FakeServices(tmp_path / "home")


@pytest.fixture
def cli(services: FakeServices) -> Cli:
    """Runs a command line and returns its exit code and streams."""

    def run(
        *args: str, terminal: bool = False, stdin: str = "", piped_stdout: bool = False
    ) -> Result:
        stdout, stderr = Screen(terminal=terminal and not piped_stdout), Screen(terminal=terminal)
        screen = Terminal(stdin=Screen(stdin, terminal=terminal), stdout=stdout, stderr=stderr)
        code = run_command(build_app(), args, terminal=screen, services=services)
        return Result(code, stdout.getvalue(), stderr.getvalue())

    return run

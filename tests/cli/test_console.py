"""Streams: encodings, terminals, hostile text, progress, questions."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.cli.conftest import Cli, FakeServices, Screen, make_document
from tsdoc.cli.console import Terminal
from tsdoc.cli.reporter import ConsoleReporter, Stage, amount, duration
from tsdoc.cli.wrapping import GrowingText, word_wrapped
from tsdoc.ingest.document import Section, SkippedFile, SourceFile

HOSTILE = "\x1b[31m\x07[bold]\u202e\r\n\t"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def screen(*, terminal: bool = False, stdin: str = "") -> tuple[Terminal, Screen, Screen]:
    stdout, stderr = Screen(terminal=terminal), Screen(terminal=terminal)
    typed = Screen(stdin, terminal=terminal)
    return Terminal(stdin=typed, stdout=stdout, stderr=stderr), stdout, stderr


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short enough", ["short enough"]),
        ("one two three four five", ["one two three", "four five"]),
        ("go with `tsdoc models use A` (any)", ["go with", "`tsdoc models use A`", "(any)"]),
        ("say: tsdoc ask a.txt \"And why?\"", ["say:", 'tsdoc ask a.txt "And why?"']),
        ("/a/path/that/has/no/end is gone", ["/a/path/that/has/no/end", "is gone"]),
        ("東京東京 東京東京", ["東京東京", "東京東京"]),
        ("", [""]),
    ],
)  # fmt: skip
def test_lines_are_cut_between_words_and_commands_stay_whole(text: str, lines: list[str]) -> None:
    assert word_wrapped(text, 14) == lines
    assert word_wrapped(text, None) == [text]


LONG = "x" * 50
STREAMED = [
    ("one two three four five", "one two three\nfour five"),
    ("exactly 14 ch. next", "exactly 14 ch.\nnext"),
    ("exactly 14 ch. \nnext", "exactly 14 ch.\nnext"),
    ("one two three \n\nfour", "one two three \n\nfour"),
    ("    indented code stays", "    indented\ncode stays"),
    ("a\tb\tc", "a\tb\nc"),
    ("a\t\tc", "a\nc"),
    ("東京東京東京東京 東京", "東京東京東京東\n京 東京"),
    ("see 東京, then it", "see 東京, then\nit"),
    (f"a {LONG} b", f"a\n{LONG} b"),
    (f"{LONG} of it and so", f"{LONG} of it\nand so"),
    ("  ", "  "),
    ("", ""),
]  # fmt: skip


@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
@pytest.mark.parametrize(("text", "shown"), STREAMED)
def test_a_growing_text_is_cut_between_words(text: str, shown: str, step: int) -> None:
    growing = GrowingText()
    pieces = [growing.add(text[at : at + step], 14) for at in range(0, len(text), step)]
    assert "".join(pieces) + growing.end() == shown
    assert not growing.begun


@given(
    text=st.text(st.sampled_from("ab \n東😀é-"), max_size=200),
    width=st.integers(2, 20),
    step=st.integers(1, 7),
)
def test_cutting_a_growing_text_loses_nothing_but_white_space(
    text: str, width: int, step: int
) -> None:
    growing = GrowingText()
    pieces = [growing.add(text[at : at + step], width) for at in range(0, len(text), step)]
    shown = "".join(pieces) + growing.end()
    assert "".join(shown.split()) == "".join(text.split())
    whole = GrowingText()
    assert whole.add(text, width) + whole.end() == shown
    for line in shown.split("\n"):
        for word in re.finditer(r"[abé-]+", line):
            # Behind a word longer than a line, a terminal goes on in the middle of one.
            column, length = cell_len(line[: word.start()]) % width, cell_len(word[0])
            assert column + length <= width or length > width or line[0].isspace()


def test_an_answer_is_cut_between_words_on_a_terminal_and_exact_in_a_pipe(
    cli: Cli, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    services.pieces = ["The vil", "lain is", " Mori", "arty", ".\nYes"]
    monkeypatch.setattr(Screen, "fileno", lambda self: 1)
    monkeypatch.setattr("os.get_terminal_size", lambda number: os.terminal_size((14, 24)))
    shown = cli("ask", "a.txt", "Who?", "--evidence", "0", terminal=True)
    assert shown.stdout == "The villain is\nMoriarty.\nYes\n"
    assert (
        "\x1b[2K\n110 prompt" in shown.stderr
    )  # an empty line, below where "answering" was erased
    monkeypatch.undo()
    assert cli("ask", "a.txt", "Who?").stdout == "The villain is Moriarty.\nYes\n"


def test_where_both_streams_go_is_known(tmp_path: Path) -> None:
    stdin = io.StringIO()
    with (tmp_path / "a").open("w") as one, (tmp_path / "b").open("w") as other:
        again = os.fdopen(os.dup(one.fileno()), "w")
        for stdout, stderr, same in [(one, again, True), (one, other, False)]:
            terminal = Terminal(stdin=stdin, stdout=stdout, stderr=stderr)
            assert terminal.answers_beside_notes == same
        terminal = Terminal(stdin=stdin, stdout=one, stderr=again)
        again.close()
        assert not terminal.answers_beside_notes
        assert not Terminal(stdin=stdin, stdout=io.StringIO(), stderr=one).answers_beside_notes


@pytest.mark.parametrize("beside", [True, False])
def test_a_line_every_while_does_not_cut_an_answer_in_two(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, beside: bool
) -> None:
    monkeypatch.setattr("tsdoc.cli.reporter.LINE_EVERY_S", 0)
    monkeypatch.setattr(Terminal, "answers_beside_notes", beside)
    said = cli("ask", "a.txt", "Who?", "--evidence", "0").stderr
    assert ("answering: " in said) == (not beside)


def test_what_is_said_in_the_middle_of_an_answer_has_lines_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, stdout, stderr = screen(terminal=True)
    monkeypatch.setattr(Screen, "fileno", lambda self: 1)
    monkeypatch.setattr("os.get_terminal_size", lambda number: os.terminal_size((80, 24)))
    terminal.stream("It be")
    terminal.say("warning: a page was repaired")
    terminal.stream("gins.")
    terminal.line()
    assert stdout.getvalue() == "It be\ngins.\n"
    assert stderr.getvalue() == "warning: a page was repaired\n"


def test_what_is_said_fits_the_terminal_and_stays_one_line_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, _, stderr = screen(terminal=True)
    terminal.say("one two three four")
    monkeypatch.setattr(Screen, "fileno", lambda self: 2)
    monkeypatch.setattr("os.get_terminal_size", lambda number: os.terminal_size((9, 24)))
    terminal.say("one two three four")
    assert stderr.getvalue() == "one two three four\none two\nthree\nfour\n"


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_no_encoding_is_too_small(encoding: str) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding=encoding)
    terminal = Terminal(stdin=io.StringIO(), stdout=stdout, stderr=io.StringIO())
    terminal.write("a → ☃ 😀 \udcff z\n")
    terminal.flush()
    text = raw.getvalue().decode(encoding)
    assert text.startswith("a ")
    assert text.endswith(" z\n")
    assert ("→" in text) == (encoding == "utf-8")


@pytest.mark.parametrize("encoding", ["cp1252", "ascii", "utf-8"])
def test_json_loses_nothing_in_any_encoding(encoding: str) -> None:
    raw = io.BytesIO()
    stdout = io.TextIOWrapper(raw, encoding=encoding)
    terminal = Terminal(stdin=io.StringIO(), stdout=stdout, stderr=io.StringIO())
    value = {"text": "→ ☃ 😀 é \udcff"}
    terminal.json(value)
    terminal.flush()
    assert json.loads(raw.getvalue().decode(encoding)) == value


def test_an_answer_is_exact_in_a_pipe_and_visible_on_a_terminal(
    cli: Cli, services: FakeServices
) -> None:
    services.pieces = [HOSTILE]
    assert cli("ask", "a.txt", "Who?").stdout == f"{HOSTILE}\n"
    on_screen = cli("ask", "a.txt", "Who?", "--evidence", "0", terminal=True).stdout
    assert on_screen == "\\x1b[31m\\x07[bold]\\u202e\\r\n\t\n"


def test_hostile_names_in_a_table_are_text(cli: Cli, services: FakeServices) -> None:
    name = "\x1b[31m[bold]x\u202e\n.txt"
    services.document = make_document(
        name=name,
        files=(SourceFile(name=name, path=None, kind="text", num_bytes=1, sha256=""),),
        sections=(Section(file=0, titles=(f"t{name}",), text="x", first_line=1),),
        skipped=(SkippedFile(name=name, reason="binary", num_bytes=1),),
        warnings=(),
    )
    for terminal in (False, True):
        result = cli("tokens", "x", terminal=terminal)
        assert result.code == 0
        for stream in (result.stdout.replace("\x1b[1m", "").replace("\x1b[0m", ""), result.stderr):
            assert "\x1b" not in stream
            assert "[bold]x\\u202e\\n.txt" in stream


def test_plain_progress_comes_every_30_s() -> None:
    terminal, stdout, stderr = screen()
    clock = Clock()
    reporter = ConsoleReporter(terminal, quiet=False, clock=clock)
    reporter.start("prefill", 10_000, "tokens")
    for second in range(1, 91):
        clock.now += 1
        reporter.advance(second * 100)
    reporter.finish()
    assert stdout.getvalue() == ""
    lines = stderr.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0] == ("prefill: 3,000 of 10,000 tokens, 30 %, 100/s, 70 s left")


def test_plain_progress_comes_every_30_s_where_stages_are_shorter() -> None:
    terminal, _, stderr = screen()
    clock = Clock()
    reporter = ConsoleReporter(terminal, quiet=False, clock=clock)
    for number in range(9):
        reporter.start(f"stage {number}", None, "steps")
        clock.now += 10
        reporter.finish()
    assert stderr.getvalue().splitlines() == ["stage 3 …", "stage 6 …"]


def test_what_a_resumed_stage_finds_done_does_not_count_as_speed() -> None:
    stage = Stage("prefill", 100_000, "tokens", now=0.0)
    stage.advance(50_000, now=0.1)
    stage.advance(51_000, now=10.1)
    assert stage.rate() == pytest.approx(100)
    assert stage.describe(now=20.1) == ("51,000 of 100,000 tokens, 51 %, 100/s, 8 min left")


def test_what_is_computed_of_an_unfinished_block_is_shown_and_not_counted_as_done() -> None:
    terminal, _, stderr = screen()
    clock = Clock()
    reporter = ConsoleReporter(terminal, quiet=False, clock=clock)
    reporter.start("prefill", 8192, "tokens")
    clock.now += 5  # loading the model says nothing about the rate
    reporter.advance(0)
    clock.now += 20
    reporter.working(1024)
    clock.now += 20
    reporter.working(2048)
    shown = "prefill: 2,048 of 8,192 tokens, 25 %, 51/s, 2 min left"
    assert stderr.getvalue().splitlines() == [shown]
    assert reporter.prefill is not None
    assert reporter.prefill.done == 0
    reporter.advance(4096)
    assert reporter.prefill.done == reporter.prefill.reached == 4096


def test_a_stage_without_total_or_progress() -> None:
    stage = Stage("loading", None, "tensors", now=0.0)
    assert stage.describe(now=0.5) == ""
    assert stage.describe(now=5.0) == "5 s so far"
    stage.advance(3, now=1.5)
    assert stage.describe(now=5.0) == "3 tensors, 2/s"
    assert Stage("reading", 0, "pages", now=0.0).describe(now=0.5) == "0 of 0 pages"


def test_a_live_line_vanishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, _, stderr = screen(terminal=True)
    reporter = ConsoleReporter(terminal, quiet=False)
    reporter.start("prefill", 100, "tokens")
    reporter.advance(50)
    reporter.note("a note [bold]")
    reporter.finish()
    text = stderr.getvalue()
    assert "of 100 tokens" in text
    assert "a note [bold]" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


@pytest.mark.parametrize("name", ["dumb", ""])
def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TERM", name)
    terminal, _, stderr = screen(terminal=True)
    reporter = ConsoleReporter(terminal, quiet=False)
    reporter.start("prefill", 100, "tokens")
    reporter.advance(50)
    reporter.finish()
    assert stderr.getvalue() == ""


def test_no_color_is_obeyed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in cli("tokens", "x", terminal=True).stdout


@pytest.mark.parametrize(
    ("typed", "agreed"), [("\n", True), ("y\n", True), ("Yes\n", True), ("n\n", False), ("", False)]
)
def test_a_question_is_asked_on_a_terminal(typed: str, agreed: bool) -> None:
    terminal, _, stderr = screen(terminal=True, stdin=typed)
    assert ConsoleReporter(terminal, quiet=True).confirm("Download 1 GB?") is agreed
    assert "Download 1 GB? [Y/n] " in stderr.getvalue()


@pytest.mark.parametrize(("typed", "agreed"), [("\n", False), ("y\n", True), ("", False)])
def test_what_cannot_be_undone_takes_more_than_enter(typed: str, agreed: bool) -> None:
    terminal, _, stderr = screen(terminal=True, stdin=typed)
    assert ConsoleReporter(terminal, quiet=True).confirm("Remove?", enter=False) is agreed
    assert "Remove? [y/N] " in stderr.getvalue()


def test_without_a_terminal_the_question_is_said_and_answered() -> None:
    terminal, _, stderr = screen(stdin="n\n")
    assert ConsoleReporter(terminal, quiet=False).confirm("Download 1 GB?") is True
    assert stderr.getvalue() == "Download 1 GB? (no terminal to ask on: yes)\n"


def test_lines_from_a_pipe_are_not_asked_for_even_if_the_answers_are_on_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stdout, stderr = Screen(terminal=True), Screen(terminal=True)
    monkeypatch.setattr("sys.stdin", io.StringIO("Who?\n"))
    terminal = Terminal(stdin=sys.stdin, stdout=stdout, stderr=stderr)
    assert terminal.read_line("> ") == "Who?"
    assert terminal.read_line("> ") is None
    assert stdout.getvalue() == stderr.getvalue() == capsys.readouterr().out == ""


def test_a_warning_is_said_once() -> None:
    terminal, _, stderr = screen()
    reporter = ConsoleReporter(terminal, quiet=False)
    for _ in range(2):
        reporter.warn("code", "a.txt p. 3", "no text")
    assert stderr.getvalue() == "warning: a.txt p. 3: no text\n"
    assert len(reporter.warnings) == 1


def test_numbers_as_people_read_them() -> None:
    assert [amount(n, "bytes") for n in (5, 2048, 12_500_000, 60_100_000_000)] == [
        "5 B",
        "2.0 kB",
        "12.5 MB",
        "60.1 GB",
    ]
    assert amount(1_048_576, "tokens") == "1,048,576"
    assert [duration(s) for s in (0.4, 119, 120, 5390, 5400, 36_000)] == [
        "0 s",
        "119 s",
        "2 min",
        "1 h 30 min",
        "1 h 30 min",
        "10 h 0 min",
    ]

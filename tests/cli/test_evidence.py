"""Passages below an answer: on a terminal, in JSON, on a page, and never in a pipe unasked."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, FakeServices, FakeSession, make_evidence
from tsdoc.cli.evidence import evidence_lines
from tsdoc.evidence import Coverage
from tsdoc.ingest.document import Place

ANSWER = "The villain is Moriarty.\n"
LISTED = """
What the model looked at most (where to check, not a proof):

 1. big.txt:1-2 · One
    many words many words

 2. big.txt:4 · One
    many words

90 % of the attention paid to the document went to 1 of 2 files.
"""


def test_a_terminal_shows_the_passages_below_the_answer(cli: Cli, services: FakeServices) -> None:
    result = cli("ask", "a.txt", "Who?", terminal=True)
    assert result.stdout == ANSWER + LISTED
    assert services.sessions[0].explained == [3]


def test_a_pipe_gets_the_answer_alone_and_nothing_is_looked_for(
    cli: Cli, services: FakeServices
) -> None:
    result = cli("ask", "a.txt", "Who?")
    assert result.stdout == ANSWER
    assert services.sessions[0].explained == []


def test_passages_that_were_asked_for_go_to_stderr_in_a_pipe(
    cli: Cli, services: FakeServices
) -> None:
    result = cli("ask", "a.txt", "Who?", "--evidence", "2")
    assert result.stdout == ANSWER
    assert LISTED in result.stderr
    assert services.sessions[0].explained == [2]


def test_passages_that_were_asked_for_are_shown_though_it_is_quiet(
    cli: Cli, services: FakeServices
) -> None:
    assert cli("ask", "a.txt", "Who?", "--evidence", "2", "--quiet").stderr.endswith(LISTED)
    typed = cli(
        "chat",
        "a.txt",
        "--quiet",
        terminal=True,
        piped_stdout=True,
        stdin="Who?\n/evidence\n/quit\n",
    )
    assert "big.txt:1-2" in typed.stderr


def test_a_page_alone_lists_no_passages_in_a_pipe(cli: Cli) -> None:
    piped = cli("ask", "a.txt", "Who?", "--html", "why.html")
    assert (piped.stdout, "big.txt:1-2" in piped.stderr) == (ANSWER, False)
    both = cli("ask", "a.txt", "Who?", "--html", "why.html", "--evidence", "2")
    assert LISTED in both.stderr


@pytest.mark.parametrize("more", [["--evidence", "0"], ["--set", "evidence=0"]])
def test_evidence_can_be_switched_off(cli: Cli, services: FakeServices, more: list[str]) -> None:
    assert cli("ask", "a.txt", "Who?", *more, terminal=True).stdout == ANSWER
    assert services.sessions[0].explained == []


def test_json_carries_the_passages(cli: Cli, services: FakeServices) -> None:
    (answer,) = cli("ask", "a.txt", "Who?", "--json").json()["answers"]
    assert answer["evidence"] == {
        "passages": [
            {
                "file": "big.txt",
                "page": None,
                "page_label": None,
                "line": line,
                "cell": None,
                "last_page": None,
                "last_line": last,
                "last_cell": None,
                "section": ["One"],
                "text": text,
                "tokens": 4,
                "share": 0.25,
                "attention": 0.125,
            }
            for line, last, text in ((1, 2, "many words\nmany words"), (4, 4, "many words"))
        ],
        "coverage": {"unit": "file", "holding": 1, "total": 2},
        "stands_out": True,
    }


def test_it_is_said_when_nothing_stands_out(cli: Cli, services: FakeServices) -> None:
    services.evidence = make_evidence(stands_out=False)
    result = cli("ask", "a.txt", "Who?", "--json")
    assert [w["code"] for w in result.json()["warnings"]][-1] == "nothing_stands_out"
    assert "warning: no passage stands out" in result.stderr


def test_pages_show_their_printed_label_and_range() -> None:
    evidence = make_evidence(coverage=Coverage(unit="page", holding=3, total=900))
    place = Place(file="b.pdf", titles=("I", "Files"), page=12, page_label="x", line=None)
    following = Place(file="b.pdf", titles=(), page=13, page_label="xi", line=None)
    passage = make_evidence().passages[0]
    passage = dataclasses.replace(passage, first=place, last=following)
    evidence = make_evidence(passages=(passage,), coverage=evidence.coverage)
    text = "\n".join(evidence_lines(evidence, width=80))
    assert " 1. b.pdf p. 12 (printed x) to p. 13 · I › Files" in text
    assert "went to 3 of 900 pages." in text


def test_passages_of_a_notebook_name_its_cells(cli: Cli, services: FakeServices) -> None:
    first = Place(file="n.ipynb", titles=(), page=None, page_label=None, line=None, cell=2)
    passages = tuple(
        dataclasses.replace(
            make_evidence().passages[0], first=first, last=dataclasses.replace(first, cell=last)
        )
        for last in (2, 3)
    )
    services.evidence = make_evidence(passages=passages)
    shown = cli("ask", "n.ipynb", "Who?", terminal=True).stdout
    assert " 1. n.ipynb cell 2\n" in shown
    assert " 2. n.ipynb cell 2-3\n" in shown
    (answer,) = cli("ask", "n.ipynb", "Who?", "--json").json()["answers"]
    cells = [(p["cell"], p["last_cell"]) for p in answer["evidence"]["passages"]]
    assert cells == [(2, 2), (2, 3)]


def test_files_without_pages_are_not_called_pages() -> None:
    evidence = make_evidence(coverage=Coverage(unit="page_or_file", holding=3, total=7))
    line = evidence_lines(evidence, width=80)[-1]
    assert line.endswith("went to 3 of 7 pages, and files without pages.")


def test_it_is_not_said_that_all_of_a_document_holds_most_of_the_attention() -> None:
    evidence = make_evidence(coverage=Coverage(unit="file", holding=2, total=2))
    assert "attention" not in evidence_lines(evidence, width=80)[-1]


def test_lines_stay_readable_on_a_wide_terminal(
    cli: Cli, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    services.evidence = make_evidence(
        passages=(dataclasses.replace(make_evidence().passages[0], text="word " * 90),)
    )
    result = cli("ask", "a.txt", "Who?", terminal=True)
    assert max(map(len, result.stdout.splitlines())) == 98


def test_passages_below_a_piped_answer_fit_the_screen_they_go_to(
    cli: Cli, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.cli.console._width", lambda stream: 40)
    services.evidence = make_evidence(
        passages=(dataclasses.replace(make_evidence().passages[0], text="word " * 90),)
    )
    result = cli("ask", "a.txt", "Who?", "--evidence", "1")
    quoted = [line for line in result.stderr.splitlines() if "word word" in line]
    assert {len(line) for line in quoted[:-1]} == {38}


def test_code_keeps_its_lines_and_long_prose_is_wrapped() -> None:
    passage = make_evidence().passages[0]
    code = dataclasses.replace(passage, text="    def f():\n        return 1")
    prose = dataclasses.replace(passage, text="word " * 40)
    lines = evidence_lines(make_evidence(passages=(code, prose)), width=40)
    assert lines[4:6] == ["    def f():", "        return 1"]
    assert max(map(len, lines[8:])) <= 68  # the coverage line is no passage
    assert all(len(line) <= 40 for line in lines[8:-2])


@pytest.mark.parametrize("lead", ["      ", "of the storm. "])
def test_prose_is_one_paragraph_however_its_lines_are_indented(lead: str) -> None:
    passage = dataclasses.replace(
        make_evidence().passages[0], lead=lead, text="The lamp\n      was\n      lit."
    )
    assert (
        evidence_lines(make_evidence(passages=(passage,)), width=40)[4] == "    The lamp was lit."
    )


def test_code_keeps_the_indentation_of_its_first_line() -> None:
    code = dataclasses.replace(
        make_evidence().passages[0], lead="    ", text="def f():\n        return 1\n    x = 2"
    )
    lines = evidence_lines(make_evidence(passages=(code,)), width=40)
    assert lines[4:7] == ["    def f():", "        return 1", "    x = 2"]


def test_control_characters_in_a_passage_never_reach_the_terminal(
    cli: Cli, services: FakeServices
) -> None:
    passage = make_evidence().passages[0]
    hostile = dataclasses.replace(passage, text="a\x1b[31mred [bold]b[/bold]")
    services.evidence = make_evidence(passages=(hostile,))
    result = cli("ask", "a.txt", "Who?", terminal=True)
    assert "\x1b" not in result.stdout
    assert r"a\x1b[31mred [bold]b[/bold]" in result.stdout


def test_a_page_can_be_written(cli: Cli, tmp_path: Path) -> None:
    result = cli("ask", "a.txt", "Who?", "--html", "why.html")
    assert result.stdout == ANSWER
    assert "page written: why.html" in result.stderr
    page = (tmp_path / "why.html").read_text("utf-8")
    assert "The villain is Moriarty." in page
    assert '<a href="#a1p2"' in page
    assert page.count("<mark>many words") == 2
    assert 'data-tip="a/small.txt"' in page  # the files on the strip


def test_what_a_page_shows_executes_nothing(
    cli: Cli, services: FakeServices, tmp_path: Path
) -> None:
    script = "</mark><script>alert(1)</script><img src=x onerror=alert(2)>"
    document = services.document
    files = tuple(dataclasses.replace(f, name=f"{script}{n}") for n, f in enumerate(document.files))
    sections = tuple(
        dataclasses.replace(s, text=script + s.text, titles=(script,)) for s in document.sections
    )
    services.document = dataclasses.replace(document, name=script, files=files, sections=sections)
    passage = make_evidence().passages[0]
    place = Place(file=script, titles=(script,), page=None, page_label=None, line=1)
    hostile = dataclasses.replace(passage, text=script, first=place, last=place, end=len(script))
    services.evidence = make_evidence(passages=(hostile,))
    services.pieces = [script]
    assert cli("ask", "a.txt", script, "--html", "why.html").code == 0
    page = (tmp_path / "why.html").read_text("utf-8")
    assert page.lower().count("<script") == 2  # the data and the page's own
    assert "<img" not in page
    assert "onerror" not in page.replace("onerror=alert(2)&gt;", "").replace(
        r"onerror=alert(2)\u003e", ""
    )


def test_a_page_that_cannot_be_is_refused_before_anything_is_read(
    cli: Cli, services: FakeServices
) -> None:
    result = cli("ask", "a.txt", "Who?", "--html", "missing/why.html")
    assert result.code == 2
    assert services.sessions == []
    result = cli("ask", "a.txt", "Who?", "--html", "why.html", "--evidence", "0")
    assert result.code == 2
    assert "--html shows the passages" in result.stderr


def test_chat_shows_evidence_when_asked(cli: Cli, services: FakeServices) -> None:
    result = cli(
        "chat", "a.txt", terminal=True, stdin="/evidence\nWho?\n/evidence\n/evidence\n/quit\n"
    )
    assert "nothing has been answered yet" in result.stderr
    assert result.stderr.count("about the answer to: Who?") == 2
    assert result.stdout.count("big.txt:1-2") == 2
    assert services.sessions[0].explained == [3]  # known the second time


def test_a_kept_chat_looks_at_once_and_shows_when_asked(cli: Cli, services: FakeServices) -> None:
    named = ["chat", "a.txt", "--name", "heirs"]
    result = cli(*named, terminal=True, stdin="Who?\n/quit\n")
    assert services.sessions[0].explained == [3]
    assert "big.txt:1-2" not in result.stdout
    assert services.conversations[0].turns[-1].evidence is not None
    cli(*named, stdin="Who?\n")  # a pipe gets the answers alone
    assert services.sessions[1].explained == []


@pytest.mark.parametrize("known", [True, False])
def test_a_chat_taken_up_again_shows_what_was_kept(
    cli: Cli, services: FakeServices, known: bool
) -> None:
    services.kept_questions = ["Who?"]
    services.kept_evidence = make_evidence() if known else None
    result = cli("chat", "a.txt", "--name", "x", terminal=True, stdin="/evidence\n/quit\n")
    assert ("big.txt:1-2" in result.stdout) is known
    assert (
        "where the last answer comes from was not kept; ask again: " in result.stderr
    ) is not known
    assert services.sessions[0].explained == []


def test_chat_json_carries_the_passages(cli: Cli) -> None:
    (answer,) = cli("chat", "a.txt", "--json", stdin="Who?\n").json()["answers"]
    assert [p["line"] for p in answer["evidence"]["passages"]] == [1, 4]


def test_ctrl_c_while_a_kept_chat_looks_leaves_the_answer(
    cli: Cli, services: FakeServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeSession, "find_evidence", stop)
    result = cli("chat", "a.txt", "--name", "x", terminal=True, stdin="Who?\n/quit\n")
    assert (result.code, result.stdout) == (0, ANSWER)
    assert "(stopped looking; /evidence looks again)" in result.stderr

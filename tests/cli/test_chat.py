"""chat against a made session: lines, commands, Ctrl-C, pipes, JSON; and the kept ones."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from tests.cli.conftest import Cli, FakeServices
from tsdoc.errors import ResourceError, StoreError
from tsdoc.home import Home
from tsdoc.progress import Reporter
from tsdoc.session.kept import KeptConversation, Turn, conversation_path, save_conversation

ANSWER = "The villain is Moriarty.\n"


def test_piped_questions_are_lines_and_stdout_holds_the_answers_alone(
    cli: Cli, services: FakeServices
) -> None:
    result = cli("chat", "book.txt", stdin='Who?\n\n  Why? \r\n"""\n')
    assert result.code == 0
    assert result.stdout == f"{ANSWER}\n{ANSWER}\n{ANSWER}"
    assert services.sessions[0].asked == ["Who?", "Why?", '"""']
    assert "> " not in result.stderr


def test_comments_in_a_pipe_are_those_of_a_file_and_what_is_typed_is_a_question(
    cli: Cli, services: FakeServices
) -> None:
    lines = "# about headers\n#include <stdio.h>: why?\n#\n## more\nWho?\n"
    cli("chat", "b.txt", stdin=lines)
    assert services.sessions[0].asked == ["#include <stdio.h>: why?", "Who?"]
    cli("chat", "b.txt", terminal=True, stdin="# what is this?\n")
    assert services.sessions[1].asked == ["# what is this?"]


def test_answers_on_a_terminal_stand_right_below_their_questions(cli: Cli) -> None:
    assert cli("chat", "b.txt", terminal=True, stdin="Who?\nWhy?\n").stdout == ANSWER * 2
    typed = cli("chat", "b.txt", terminal=True, piped_stdout=True, stdin="Who?\nWhy?\n")
    assert typed.stdout == f"{ANSWER}\n{ANSWER}"


def test_a_terminal_shows_a_prompt_and_takes_questions_of_many_lines(
    cli: Cli, services: FakeServices
) -> None:
    typed = 'Who\\\nis it?\n"""\nOne\n\ntwo\n"""\n/quit\nnever asked\n'
    result = cli("chat", "book.txt", terminal=True, stdin=typed)
    assert result.code == 0
    assert services.sessions[0].asked == ["Who\nis it?", "One\n\ntwo"]
    assert result.stderr.count("> ") == 3
    assert "/help" in result.stderr


def test_an_answer_that_is_piped_is_not_mixed_with_the_prompt(cli: Cli) -> None:
    result = cli("chat", "book.txt", terminal=True, piped_stdout=True, stdin="Who?\n")
    assert result.stdout == ANSWER


def test_commands(cli: Cli, services: FakeServices) -> None:
    result = cli(
        "chat", "b.txt", terminal=True, stdin="Who?\n/tokens\n/help\n/nonsense\n/etc is?\n"
    )
    assert "the document is 100 tokens long, the conversation 12 (1 question)" in (result.stderr)
    assert "/quit" in result.stderr
    assert "there is no /nonsense; /help lists what there is" in result.stderr
    assert services.sessions[0].asked == ["Who?", "/etc is?"]


@pytest.mark.parametrize("terminal", [False, True])
def test_evidence_is_shown_where_it_is_asked_for(cli: Cli, terminal: bool) -> None:
    result = cli("chat", "b.txt", terminal=terminal, stdin="Who?\n/evidence\n")
    assert "about the answer to: Who?" in result.stderr
    assert "1. " in result.stdout + result.stderr  # in a pipe stdout has the answers alone
    off = ("chat", "b.txt", "--set", "evidence=0")
    assert "switched off" in cli(*off, terminal=terminal, stdin="Who?\n/evidence\n").stderr


@pytest.mark.parametrize("terminal", [False, True])
def test_what_stands_behind_a_command_is_refused_and_paths_are_questions(
    cli: Cli, services: FakeServices, terminal: bool
) -> None:
    asked = ["/etc/fstab: what is it?", "/quit now", "/evidences of what?", "/dev is what?"]
    lines = ["/evidence 1", "/QUIT now", asked[0], " /quit now", *asked[2:], "/quit ", "never"]
    result = cli("chat", "b.txt", terminal=terminal, stdin="\n".join(lines))
    assert services.sessions[0].asked == asked
    for name in ("evidence", "quit"):
        said = f"nothing can stand behind /{name}; a space before it makes the line a question\n"
        assert result.stderr.count(said) == 1


def test_a_kept_conversation_is_announced(cli: Cli, services: FakeServices) -> None:
    services.kept_questions = [
        "Who is the heir of the house that the second chapter describes at such length?"
    ]
    result = cli("chat", "book.txt", "--name", "heirs", stdin="Why?\n")
    assert (
        "going on with heirs: 1 question so far, the last one: Who is the heir of the house that "
        "the second chapter descri… (its answer was stopped)" in result.stderr
    )
    assert services.conversations[0].name == "heirs"


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("stop", "Who?\n"),
        ("length", "Who? (its answer was cut)\n"),
        ("loop", "Who? (its answer repeated itself)\n"),
        ("interrupted", "Who? (its answer was stopped)\n"),
    ],
)
def test_how_the_last_answer_of_a_kept_conversation_ended_is_said(
    cli: Cli, services: FakeServices, reason: str, said: str
) -> None:
    services.kept_questions, services.kept_reason = ["Who?"], reason
    result = cli("chat", "book.txt", "--name", "heirs", stdin="Why?\n")
    assert f"the last one: {said}" in result.stderr


@pytest.mark.parametrize("terminal", [False, True])
def test_every_cut_answer_is_marked(cli: Cli, services: FakeServices, terminal: bool) -> None:
    services.finish_reason = "length"
    said = cli("chat", "book.txt", terminal=terminal, stdin="Who?\nWhy?\n").stderr.splitlines()
    starts = ["warning: the answer was"] * 2
    if not terminal:
        starts = ["warning: answer 1: the answer was", "warning: answer 2: the answer was"]
    cut = [line for line in said if "was cut" in line]
    assert [line.removeprefix("> ").split(" cut")[0] for line in cut] == starts


def test_json_lists_the_answers(cli: Cli) -> None:
    value = cli("chat", "book.txt", "--json", stdin="Who?\nWhy?\n").json()
    assert value["schema"] == "tsdoc.chat/1"
    assert [answer["question"] for answer in value["answers"]] == ["Who?", "Why?"]
    assert value["conversation"] == {"name": None, "turns_before": 0, "tokens": 24}


def test_ctrl_c_stops_the_answer_and_not_the_chat(cli: Cli, services: FakeServices) -> None:
    services.finish_reason = "interrupted"
    result = cli("chat", "book.txt", terminal=True, stdin="Who?\nWhy?\n")
    assert result.code == 0
    assert len(services.sessions[0].asked) == 2
    assert result.stderr.count("(stopped; the answer stays as it is)") == 2


def test_ctrl_c_before_an_answer_drops_the_question(cli: Cli, services: FakeServices) -> None:
    calls = 0

    def stop_once(reporter: Reporter) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise KeyboardInterrupt

    services.before_answer = stop_once
    result = cli("chat", "book.txt", terminal=True, stdin="Who?\nWhy?\n")
    assert (result.code, result.stdout.strip()) == (0, ANSWER.strip())
    assert "(stopped before there was an answer; Ctrl-C again" in result.stderr


def test_ctrl_c_at_the_prompt_asks_nothing_and_a_second_one_ends_the_chat(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tsdoc.cli.console.Terminal.read_line", stop)
    result = cli("chat", "book.txt", terminal=True)
    assert result.code == 130
    assert result.stderr.count("(nothing is asked; Ctrl-C again or /quit ends the chat)") == 1


def test_ctrl_c_in_a_pipe_ends_the_chat(cli: Cli, services: FakeServices) -> None:
    services.finish_reason = "interrupted"
    result = cli("chat", "book.txt", stdin="Who?\nWhy?\n")
    assert result.code == 130
    assert services.sessions[0].asked == ["Who?"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_full_conversation_is_said_and_ends_only_a_pipe(
    cli: Cli, services: FakeServices, terminal: bool
) -> None:
    def full(reporter: Reporter) -> None:
        raise ResourceError("too long", hint="Begin a new conversation.")

    services.before_answer = full
    result = cli("chat", "book.txt", terminal=terminal, stdin="Who?\n/quit\n")
    assert result.code == (0 if terminal else 6)
    assert "tsdoc: too long. Begin a new conversation." in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-"], "reads its questions from standard input"),
        (["a.txt", "--name", "x", "--no-store"], "--no-store keeps nothing"),
        (["a.txt", "--name", "../x"], "'../x' is no name for a conversation"),
    ],
)
def test_usage_errors_come_before_a_model_is_looked_for(
    cli: Cli, services: FakeServices, args: list[str], message: str
) -> None:
    result = cli("chat", *args)
    assert (result.code, services.sessions) == (2, [])
    assert message in result.stderr


def test_json_needs_a_pipe(cli: Cli) -> None:
    result = cli("chat", "a.txt", "--json", terminal=True)
    assert result.code == 2
    assert "questions.txt" in result.json()["error"]["hint"]


@pytest.fixture
def kept(services: FakeServices) -> Path:
    path = conversation_path(Home(services.root), "heirs")
    turn = Turn(question="Who?", text="He.", finish_reason="stop", ids=(1, 2))
    talk = KeptConversation(
        document="book\x1b[31m.pdf", files=("book.pdf",), prompt="", turn_format="",
        model="m", turns=(turn,), saved_at=1e9,
    )  # fmt: skip
    save_conversation(path, talk)
    return path


def test_kept_conversations_are_listed_and_forgotten(cli: Cli, kept: Path) -> None:
    listed = cli("chat", "--list")
    assert "heirs" in listed.stdout
    assert "book\\x1b[31m.pdf" in listed.stdout
    assert cli("chat", "--list", "--json").json()["conversations"] == [
        {"name": "heirs", "document": "book\x1b[31m.pdf", "model": "m", "turns": 1, "saved_at": 1e9}
    ]
    assert cli("chat", "--forget", "heirs").stdout == "removed the conversation heirs\n"
    assert not kept.exists()
    assert cli("chat", "--forget", "heirs").code == 2
    assert "no conversation is kept" in cli("chat", "--list").stderr


def test_a_turn_that_cannot_be_kept_is_said(cli: Cli, services: FakeServices) -> None:
    def full(reporter: Reporter) -> None:
        raise StoreError(f"cannot be written ({errno.ENOSPC})", where="heirs.json")

    services.before_answer = full
    result = cli("chat", "book.txt", terminal=True, stdin="Who?\n")
    assert "heirs.json: cannot be written" in result.stderr

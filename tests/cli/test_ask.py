"""ask and ingest against a made session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Cli, FakeServices
from tsdoc.cli.reporter import ConsoleReporter
from tsdoc.progress import Reporter

ANSWER = "The villain is Moriarty.\n"


def test_the_answer_alone_is_on_stdout(cli: Cli) -> None:
    result = cli("ask", "book.txt", "Who is the villain?")
    assert (result.code, result.stdout) == (0, ANSWER)
    assert "110 prompt tokens, 100 of them reused; 2 generated" in result.stderr


def test_the_session_gets_sources_options_and_settings(cli: Cli, services: FakeServices) -> None:
    result = cli(
        "ask", "a.txt", "b.txt", "Who?", "--pages", "2-3", "--section", "Two",
        "--include", "*.txt", "--exclude", "x/", "--strict", "--password", "pw", "--offline",
        "--model", "hf:A/B", "--device", "cpu", "--no-store", "--max-new-tokens", "9",
        "--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--set", "top_k=64",
    )  # fmt: skip
    assert result.code == 0, result.stderr
    (session,) = services.sessions
    assert session.sources == ("a.txt", "b.txt")
    assert session.asked == ["Who?"]
    assert session.offline
    assert session.closed
    ingest, settings = session.ingest, session.settings
    assert (ingest.pages, ingest.section, ingest.strict) == (((2, 3),), "Two", True)
    assert (ingest.include, ingest.exclude, ingest.password) == (("*.txt",), ("x/",), "pw")
    assert (settings.model.source, settings.engine.device) == ("hf:A/B", "cpu")
    assert (settings.store.enabled, settings.selection.top_k) == (False, 64)
    answer = settings.answer
    assert (answer.max_new_tokens, answer.temperature, answer.top_p, answer.seed) == (
        9,
        0.5,
        0.9,
        7,
    )


def test_several_questions_are_answered_in_one_session(cli: Cli, services: FakeServices) -> None:
    asked = ["ask", "a.txt", "-q", "Who?", "-q", "Why?", "--evidence", "0"]
    result = cli(*asked, terminal=True)
    assert result.stdout == f"> Who?\n\n{ANSWER}\n> Why?\n\n{ANSWER}"
    piped = cli(*asked)
    assert piped.stdout == f"{ANSWER}\n{ANSWER}"
    assert [session.asked for session in services.sessions] == [["Who?", "Why?"]] * 2


@pytest.mark.parametrize(
    ("args", "piped", "shown"),
    [((), False, None), ((), True, 2), (("--json",), True, 2)],
)
def test_how_far_an_answer_is_shows_where_it_does_not_itself(
    cli: Cli,
    args: tuple[str, ...],
    piped: bool,
    shown: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would take minutes without a word."""
    counts: list[int] = []
    advance = ConsoleReporter.advance

    def noted(reporter: ConsoleReporter, done: int) -> None:
        if reporter.stage is not None and reporter.stage.name == "answering":
            counts.append(done)
        advance(reporter, done)

    monkeypatch.setattr(ConsoleReporter, "advance", noted)
    result = cli("ask", "a.txt", "Who?", *args, terminal=True, piped_stdout=piped)
    assert result.code == 0
    assert max(counts, default=None) == shown


def test_json_is_one_object(cli: Cli) -> None:
    value = cli("ask", "a.txt", "Who?", "--json", "--evidence", "0").json()
    assert value["schema"] == "tsdoc.ask/1"
    assert value["model"] == {"name": "test-model", "licence": "Apache-2.0", "small": True}
    assert value["prompt_tokens"] == 100
    assert value["entry"] == "abc123"
    assert value["warnings"] == [
        {"code": "decoded_lossily", "where": "big.txt", "message": "guessed"}
    ]
    assert value["answers"] == [
        {
            "question": "Who?",
            "text": "The villain is Moriarty.",
            "finish_reason": "stop",
            "prompt_tokens": 110,
            "reused_tokens": 100,
            "reread_tokens": 0,
            "generated_tokens": 2,
            "selection_cache": {"steps": 4, "hits": 3},
            "times_s": {"question": 0.5, "decode": 1.0},
            "evidence": None,
        }
    ]


def test_a_cut_answer_is_marked(cli: Cli, services: FakeServices) -> None:
    services.finish_reason = "length"
    result = cli("ask", "a.txt", "Who?")
    assert "the answer was cut after 2 tokens; --max-new-tokens allows more" in result.stderr
    assert "answer_cut" in cli("ask", "a.txt", "Who?", "--json").stdout


def test_each_of_several_cut_answers_is_marked(cli: Cli, services: FakeServices) -> None:
    services.finish_reason = "length"
    args = ["ask", "a.txt", "-q", "Who?", "-q", "Why?"]
    cut = "the answer was cut after 2 tokens; --max-new-tokens allows more"
    said = [line for line in cli(*args).stderr.splitlines() if cut in line]
    assert said == [f"warning: answer 1: {cut}", f"warning: answer 2: {cut}"]
    warnings = cli(*args, "--json", "--evidence", "0").json()["warnings"]
    assert [w["where"] for w in warnings if w["code"] == "answer_cut"] == ["answer 1", "answer 2"]


def test_an_answer_that_was_ended_for_its_loop_is_marked(cli: Cli, services: FakeServices) -> None:
    services.finish_reason = "loop"
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert result.stderr.splitlines()[-1] == (
        "warning: the model said the same over and over, and the answer was ended; "
        "`--set stop_loops=false` lets it go on"
    )
    value = cli("ask", "a.txt", "Who?", "--json").json()
    assert value["answers"][0]["finish_reason"] == "loop"
    assert "answer_looped" in [warning["code"] for warning in value["warnings"]]


def test_a_small_model_is_said_for_a_new_source_and_its_origin_once(
    cli: Cli, services: FakeServices
) -> None:
    first = cli("ask", "a.txt", "Who?").stderr
    assert "test-model is a small model" in first
    assert "Copied by hand." in first
    services.known_prefill_s = 2.0
    second = cli("ask", "b.txt", "Who?").stderr
    assert "test-model is a small model" in second
    assert "Copied by hand." not in second
    services.reused_tokens = 90
    again = cli("ask", "a.txt", "Who?").stderr
    assert "small model" not in again
    assert "Copied by hand." not in again


def test_quiet_leaves_warnings_alone(cli: Cli) -> None:
    result = cli("ask", "a.txt", "Who?", "--quiet")
    assert result.stderr == "warning: big.txt: guessed\n"


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_says_what_is_kept(cli: Cli, services: FakeServices, as_json: bool) -> None:
    def stop(reporter: Reporter) -> None:
        reporter.start("prefill", 105_312, "tokens")
        reporter.advance(45_056)
        raise KeyboardInterrupt

    services.before_answer = stop
    result = cli("ask", "a.txt", "Who?", "--quiet", *(["--json"] if as_json else []))
    assert result.code == 130
    last = result.stderr.splitlines()[-1]
    assert last == (
        "tsdoc: stopped; 45,056 of 105,312 tokens are kept, run the same command to go on"
    )
    assert services.sessions[0].closed
    if as_json:
        assert result.json()["error"]["code"] == "interrupted"


def test_ctrl_c_within_the_first_block_says_that_nothing_is_kept(
    cli: Cli, services: FakeServices
) -> None:
    def stop(reporter: Reporter) -> None:
        reporter.start("prefill", 105_312, "tokens")
        raise KeyboardInterrupt

    services.before_answer = stop
    said = cli("ask", "a.txt", "Who?").stderr
    assert said.endswith("tsdoc: stopped; no block was finished, nothing new is kept\n")


def test_ctrl_c_without_a_store_keeps_nothing(cli: Cli, services: FakeServices) -> None:
    def stop(reporter: Reporter) -> None:
        reporter.start("prefill", 100, "tokens")
        reporter.advance(50)
        raise KeyboardInterrupt

    services.before_answer = stop
    assert cli("ask", "a.txt", "Who?", "--no-store").stderr.endswith("tsdoc: stopped\n")


def test_ctrl_c_where_nothing_can_be_kept_does_not_say_it_is(
    cli: Cli, services: FakeServices
) -> None:
    def stop(reporter: Reporter) -> None:
        reporter.warn("not_kept", "/home", "going on in memory, nothing is kept")
        reporter.start("prefill", 100, "tokens")
        reporter.advance(50)
        raise KeyboardInterrupt

    services.before_answer = stop
    assert cli("ask", "a.txt", "Who?").stderr.endswith("tsdoc: stopped\n")


def test_ingest_says_what_is_kept(cli: Cli) -> None:
    result = cli("ingest", "a.txt")
    assert (
        result.stdout
        == "shelf: 100 tokens, 0 of them reused, kept as abc123 (2.0 MB of K and V, 2 s)\n"
    )
    value = cli("ingest", "a.txt", "--json").json()
    assert (value["schema"], value["computed_tokens"]) == ("tsdoc.ingest/1", 100)


@pytest.mark.parametrize("command", ["chat", "summarize", "ingest", "tokens", "text"])
def test_a_source_is_needed(cli: Cli, command: str) -> None:
    result = cli(command)
    assert result.code == 2
    assert result.stderr == f"tsdoc: SOURCE missing. For example: tsdoc {command} book.pdf\n"


def test_question_missing_is_one_line_and_exit_2(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("text")
    result = cli("ask", "book.txt")
    assert (result.code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert 'tsdoc ask book.txt "your question"' in result.stderr

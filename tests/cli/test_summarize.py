"""summarize against made summaries: Markdown, citations, consent to long runs, Ctrl-C, JSON."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cli, FakeServices
from tsdoc.progress import Reporter

BY_SECTION = """\
# Summary of shelf

It has 3 parts. [nearest: big.txt:9]

## One (big.txt:1-10)

One is new. [big.txt:7]

## Two (big.txt:11-20)

Two is new. [big.txt:7]

## Three (big.txt:21-30)

Three is new. [big.txt:7]
"""


def test_the_whole_is_markdown_with_each_place_named_once(cli: Cli) -> None:
    result = cli("summarize", "a.txt")
    assert result.code == 0
    assert result.stdout == (
        "# Summary of shelf\n\nIt begins. [big.txt:3] It goes on. Nobody knows.\n"
    )


def test_parts_follow_the_summary_of_their_summaries(cli: Cli, services: FakeServices) -> None:
    result = cli("summarize", "a.txt", "--by", "section", "--length", "short")
    assert (result.code, result.stdout) == (0, BY_SECTION)
    assert services.summarizers[0].length == "short"


def test_the_length_decides_how_much_is_generated_unless_the_user_does(
    cli: Cli, services: FakeServices
) -> None:
    cli("summarize", "a.txt")
    cli("summarize", "a.txt", "--max-new-tokens", "50")
    assert [made.max_new_tokens for made in services.summarizers] == [None, 50]


def test_only_missing_parts_are_summarised(cli: Cli, services: FakeServices) -> None:
    services.num_kept_parts = 2
    result = cli("summarize", "a.txt", "--by", "file")
    assert services.summarizers[0].made == ["Three"]
    assert "2 of 3 parts are kept from before" in result.stderr
    assert "Two is kept. [big.txt:5]" in result.stdout


class Clock:
    """Every look at it is ten minutes later."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 600.0
        return self.now


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tsdoc.cli.summarize.time.perf_counter", Clock())


def test_one_more_part_is_one(cli: Cli, services: FakeServices) -> None:
    services.num_kept_parts = 1
    result = cli("summarize", "a.txt", "--by", "section")
    assert "1 more part, about" in result.stderr


@pytest.mark.usefixtures("slow")
def test_a_long_run_is_asked_about(cli: Cli, services: FakeServices) -> None:
    result = cli("summarize", "a.txt", "--by", "section", terminal=True, stdin="n\n")
    assert "2 more parts, about 50 min at 600 s each. Ctrl-C is safe. Go on? [Y/n]" in result.stderr
    assert result.code == 130
    assert services.summarizers[0].made == ["One"]
    assert "1 of 3 parts are kept, run the same command to go on" in result.stderr


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("args", "terminal", "stdin"),
    [([], True, "y\n"), (["--yes"], True, ""), ([], False, "")],
)
def test_a_long_run_goes_on_with_consent(
    cli: Cli, args: list[str], terminal: bool, stdin: str
) -> None:
    result = cli("summarize", "a.txt", "--by", "section", *args, terminal=terminal, stdin=stdin)
    assert (result.code, result.stdout) == (0, BY_SECTION)
    assert "about 50 min" in result.stderr


def test_ctrl_c_says_how_many_parts_are_kept(cli: Cli, services: FakeServices) -> None:
    calls = 0

    def stop_at_the_third(reporter: Reporter) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt

    services.before_answer = stop_at_the_third
    result = cli("summarize", "a.txt", "--by", "section")
    assert (result.code, result.stdout) == (130, "")
    assert result.stderr.endswith(
        "tsdoc: stopped; 2 of 3 parts are kept, run the same command to go on\n"
    )


def test_json_lists_parts_and_places(cli: Cli, services: FakeServices) -> None:
    services.num_kept_parts = 1
    value = cli("summarize", "a.txt", "--by", "section", "--json").json()
    assert (value["schema"], value["by"], value["length"]) == (
        "tsdoc.summarize/1", "section", "medium",
    )  # fmt: skip
    assert value["summary"]["text"] == "It has 3 parts."
    assert [part["kept"] for part in value["parts"]] == [True, False, False]
    assert value["parts"][0]["where"] == "big.txt:1-10"
    assert value["parts"][0]["sentences"][0]["place"]["line"] == 5
    assert len(value["answers"]) == 3
    whole = cli("summarize", "a.txt", "--json").json()
    assert (whole["by"], whole["parts"]) == ("whole", [])
    assert whole["summary"]["text"] == "It begins. It goes on. Nobody knows."

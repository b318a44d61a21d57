"""summarize against made summaries: Markdown, citations, consent to long runs, Ctrl-C, JSON."""

from __future__ import annotations

import dataclasses

import pytest

from tests.cli.conftest import Cli, FakeServices
from tsdoc.ingest.document import Place
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


def test_the_whole_is_markdown_with_the_place_of_every_sentence_that_has_one(cli: Cli) -> None:
    result = cli("summarize", "a.txt")
    assert result.code == 0
    assert result.stdout == (
        "# Summary of shelf\n\n"
        "It begins. [big.txt:3] It goes on. [big.txt:3] Nobody knows. It ends. [big.txt:3]\n"
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


@pytest.fixture
def slow(services: FakeServices) -> None:
    services.answer_s = 600.0


@pytest.mark.parametrize(
    ("answer_s", "num_kept", "said"),
    [
        (3.52, 0, "2 more parts at about 3.5 s each, then about 10 s for the summary of them all: "
                  "about 18 s"),
        (0.24, 0, "2 more parts at about 0.2 s each, then about 1 s for the summary of them all: "
                  "about 1 s"),
        (12.3, 1, "1 more part at about 12 s, then about 36 s for the summary of them all: "
                  "about 48 s"),
    ],
)  # fmt: skip
def test_an_estimate_can_be_reckoned(
    cli: Cli, services: FakeServices, answer_s: float, num_kept: int, said: str
) -> None:
    services.answer_s, services.num_kept_parts = answer_s, num_kept
    assert said in cli("summarize", "a.txt", "--by", "section").stderr.splitlines()


def test_no_estimate_where_only_the_last_part_was_missing(cli: Cli, services: FakeServices) -> None:
    services.num_kept_parts = 2
    assert "about" not in cli("summarize", "a.txt", "--by", "section").stderr


@pytest.mark.usefixtures("slow")
def test_a_long_run_is_asked_about(cli: Cli, services: FakeServices) -> None:
    result = cli("summarize", "a.txt", "--by", "section", terminal=True, stdin="n\n")
    assert "2 more parts at about 600 s each, then about 30 min for the summary of them all: " in (
        result.stderr
    )
    assert "about 50 min. Ctrl-C is safe. Go on? [Y/n]" in result.stderr
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


def test_a_part_without_a_citation_has_the_nearest_place_or_its_own_range(
    cli: Cli, services: FakeServices
) -> None:
    services.part_line = None
    nearest = cli("summarize", "a.txt", "--by", "section").stdout
    assert "One is new. [nearest: big.txt:9]\n" in nearest
    services.nearest_line = None
    ranges = cli("summarize", "a.txt", "--by", "section").stdout
    assert "It has 3 parts.\n" in ranges
    assert "One is new. [somewhere in big.txt:1-10]\n" in ranges
    assert "Three is new. [somewhere in big.txt:21-30]\n" in ranges


def test_the_range_of_a_part_without_pages_and_lines_is_its_headings(
    cli: Cli, services: FakeServices
) -> None:
    place = Place(file="a.epub", titles=("I", "Heir"), page=None, page_label=None, line=None)
    part = dataclasses.replace(services.parts[0], title="I › Heir", first=place, last=place)
    by_file = dataclasses.replace(part, title="a.epub")
    services.parts, services.part_line, services.nearest_line = [part, by_file], None, None
    shown = cli("summarize", "a.epub", "--by", "section").stdout
    assert "I › Heir is new. [somewhere in a.epub › I › Heir]\n" in shown
    assert "a.epub is new. [somewhere in a.epub]\n" in shown


@pytest.mark.parametrize("args", [(), ("--by", "section"), ("--json",), ("--json", "--by", "file")])
def test_a_summary_that_was_cut_is_marked(
    cli: Cli, services: FakeServices, args: tuple[str, ...]
) -> None:
    services.finish_reason = "length"
    assert cli("summarize", "a.txt", *args).stderr.count("warning: the answer was cut") == 1


def test_a_part_of_which_nothing_was_said_is_no_empty_heading(
    cli: Cli, services: FakeServices
) -> None:
    services.part_text, services.nearest_line = None, None
    assert (
        "## One (big.txt:1-10)\n\n(no summary: the model said nothing that could stand here) "
        "[somewhere in big.txt:1-10]\n"
    ) in cli("summarize", "a.txt", "--by", "section").stdout


def test_headings_stand_for_a_place_without_pages_and_lines(
    cli: Cli, services: FakeServices
) -> None:
    services.place = Place(
        file="a.epub", titles=("I", "The\x1bHeir"), page=None, page_label=None, line=None
    )
    assert "It begins. [a.epub › I › The\\x1bHeir] It goes on." in cli("summarize", "a").stdout


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
    assert value["parts"][0]["sections"] == [{"titles": ["One"]}]
    assert value["parts"][0]["sentences"][0]["place"]["line"] == 5
    assert len(value["answers"]) == 3
    whole = cli("summarize", "a.txt", "--json").json()
    assert (whole["by"], whole["parts"]) == ("whole", [])
    assert whole["summary"]["text"] == "It begins. It goes on. Nobody knows. It ends."

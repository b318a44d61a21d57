"""Which arguments are sources and which is the question; pages; passwords."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tsdoc.cli.arguments import (
    Request,
    find_password,
    parse_pages,
    parse_request,
    parse_size,
)
from tsdoc.errors import UsageError
from tsdoc.ingest.options import LAST_PAGE


def request(*positionals: str, questions: tuple[str, ...] = (), file: str | None = None) -> Request:
    return parse_request(positionals, questions=questions, questions_file=file)


def test_the_last_argument_is_the_question() -> None:
    assert request("a.txt", "b.txt", "Who?") == Request(
        sources=("a.txt", "b.txt"), questions=("Who?",)
    )


def test_with_q_every_argument_is_a_source() -> None:
    assert request("a.txt", "b.txt", questions=("Who?", "Why?")) == Request(
        sources=("a.txt", "b.txt"), questions=("Who?", "Why?")
    )


@pytest.mark.parametrize("last", ["book.txt", "-", "https://example.org/book"])
def test_a_source_as_the_last_argument_means_that_the_question_is_missing(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("text")
    with pytest.raises(UsageError, match="question missing") as caught:
        request("my notes.txt", last)
    assert f"tsdoc ask 'my notes.txt' {last} \"your question\"" in str(caught.value)


def test_a_dangling_link_is_a_source_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("nowhere")
    with pytest.raises(UsageError, match="question missing"):
        request("a.txt", "link")


def test_one_argument_is_not_enough() -> None:
    with pytest.raises(UsageError, match="question missing") as caught:
        request("book.txt")
    assert 'tsdoc ask book.txt "your question"' in str(caught.value)


def test_a_lone_question_is_told_to_need_a_source() -> None:
    with pytest.raises(UsageError, match="question missing") as caught:
        request("Who is it?")
    assert "tsdoc ask book.pdf 'Who is it?'" in str(caught.value)


def test_a_second_question_is_no_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="only the last argument is a question") as caught:
        request("a.txt", "Who is it?", "Why?")
    assert "-q" in str(caught.value)
    Path("why?").write_text("text")
    assert request("why?", "Why?").sources == ("why?",)


def test_no_argument_at_all() -> None:
    with pytest.raises(UsageError, match="SOURCE and question missing"):
        request()


def test_q_without_a_source() -> None:
    with pytest.raises(UsageError, match="SOURCE missing"):
        request(questions=("Who?",))


def test_an_empty_question_is_refused() -> None:
    with pytest.raises(UsageError, match="empty"):
        request("a.txt", " ")


def test_a_name_with_a_nul_or_beyond_the_file_system_is_no_path() -> None:
    assert request("a.txt", "x" * 5000).questions == ("x" * 5000,)
    assert request("a.txt", "a\0b").questions == ("a\0b",)


def test_questions_file_gives_one_question_per_line(tmp_path: Path) -> None:
    file = tmp_path / "questions.txt"
    file.write_text(
        "\ufeff# about people\n#\n##\tmore\n #define N: why?\nWho?\n\n  Why? \r\n", encoding="utf-8"
    )
    assert request("a.txt", questions=("First?",), file=str(file)).questions == (
        "First?",
        "#define N: why?",
        "Who?",
        "Why?",
    )


def test_questions_file_that_is_missing_empty_or_binary(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        request("a.txt", file=str(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    with pytest.raises(UsageError, match="no question"):
        request("a.txt", file=str(empty))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        request("a.txt", file=str(binary))


@pytest.mark.parametrize(
    ("text", "pages"),
    [
        ("7", ((7, 7),)),
        ("100-180", ((100, 180),)),
        ("1, 5-9 ,20-", ((1, 1), (5, 9), (20, LAST_PAGE))),
    ],
)
def test_page_ranges(text: str, pages: tuple[tuple[int, int], ...]) -> None:
    assert parse_pages(text) == pages


@pytest.mark.parametrize("text", ["", "x", "5-3", "0", "-5", "1,,2", "1-2-3", "٣", "1" * 10])
def test_what_is_no_page_range(text: str) -> None:
    with pytest.raises(UsageError, match="--pages"):
        parse_pages(text)


def test_password_comes_from_file_then_option_then_environment(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("first line\nsecond\n")
    environment = {"TSDOC_PASSWORD": "env"}
    assert find_password(file=str(file), option=None, environment=environment) == "first line"
    assert find_password(file=None, option="given", environment=environment) == "given"
    assert find_password(file=None, option=None, environment=environment) == "env"
    assert find_password(file=None, option=None, environment={}) is None


def test_two_passwords_or_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="exclude each other"):
        find_password(file="x", option="y", environment={})
    with pytest.raises(UsageError, match="No such file"):
        find_password(file=str(tmp_path / "none"), option=None, environment={})


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1500", 1500), ("10GB", 10**10), ("1.5 MB", 1_500_000), ("3k", 3000), ("7b", 7)],
)
def test_sizes_are_written_as_they_are_shown(text: str, size: int) -> None:
    assert parse_size(text, option="--max-bytes") == size


@pytest.mark.parametrize("text", ["", "GB", "-1", "1e9", "10 XB", "1,000", "2GiB", "٣"])
def test_what_is_no_size_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="is no size"):
        parse_size(text, option="--max-bytes")


def test_a_password_file_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"\xef\xbb\xbfgeheim\r\n")
    assert find_password(file=str(tmp_path / "secret"), option=None, environment={}) == "geheim"


class Piped:
    """Standard input that somebody piped into, or a terminal."""

    closed = False

    def __init__(self, data: bytes, *, terminal: bool = False) -> None:
        self.buffer = io.BytesIO(data)
        self.isatty = lambda: terminal


def test_questions_come_from_standard_input_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Piped(b"Who?\n# no\nWhy?\n"))
    assert request("a.txt", file="-").questions == ("Who?", "Why?")
    with pytest.raises(UsageError, match="cannot be both"):
        request("-", file="-")
    for nothing in (None, Piped(b"", terminal=True)):
        monkeypatch.setattr(sys, "stdin", nothing)
        with pytest.raises(UsageError, match="no questions come from standard input"):
            request("a.txt", file="-")


def test_a_question_without_quotes_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "docs"):
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match="needs quotes") as caught:
        request("a.txt", "What", "is", "it")
    assert caught.value.hint == 'For example: tsdoc ask a.txt "What is it"'
    for sources in (["a.txt", "docs"], ["a.txt", "src/missing"], ["a.txt", "missing.md"]):
        assert request(*sources, "What is it").sources == tuple(sources)
        assert request(*sources, "why").sources == tuple(sources)

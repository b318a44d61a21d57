"""Tables keep their width, whatever is in them."""

from __future__ import annotations

from rich.cells import cell_len

from tsdoc.cli.tables import Column, table_lines

COLUMNS = [
    Column(title="n", right=True),
    Column(title="short", shrinks=True),
    Column(title="long", shrinks=True),
]


def test_without_a_limit_nothing_is_cut() -> None:
    lines = table_lines(COLUMNS, [("1", "a", "x" * 300), ("22", "bcd", "y")], width=None)
    assert lines == [" n  short  long", f" 1  a      {'x' * 300}", "22  bcd    y"]


def test_only_columns_that_shrink_are_cut() -> None:
    lines = table_lines(COLUMNS, [("1,000,000", "s" * 12, "x" * 90)], width=40)
    assert lines[1] == f"1,000,000  {'s' * 12}  {'x' * 14}…"
    assert cell_len(lines[1]) == 40


def test_wide_characters_count_twice() -> None:
    lines = table_lines(COLUMNS, [("1", "語" * 30, "文" * 30)], width=40)
    assert cell_len(lines[1]) <= 40
    assert lines[1].endswith("…")


def test_a_column_can_be_limited_anywhere() -> None:
    columns = [Column(title="value", max_width=5), Column(title="origin")]
    assert table_lines(columns, [("123456789", "here")], width=None)[1] == "1234…  here"


def test_control_characters_are_visible() -> None:
    assert "\\x1b[31m\\n" in table_lines(COLUMNS, [("1", "\x1b[31m\n", "")], width=None)[1]


def test_a_table_without_rows_has_its_titles() -> None:
    assert table_lines(COLUMNS, [], width=80) == ["n  short  long"]


def test_a_column_goes_below_where_the_terminal_is_narrow() -> None:
    columns = [
        Column(title="name"),
        Column(title="kind", shrinks=True),
        Column(title="source", below=True),
    ]
    rows = [("one", "a kind of some length", "hf:someone/something")]
    assert table_lines(columns, rows, width=80) == [
        "name  kind                   source",
        "one   a kind of some length  hf:someone/something",
    ]
    assert table_lines(columns, rows, width=20) == [
        "name  kind",
        "    source",
        "one   a kind of som…",
        "    hf:someone/somet",
        "    hing",
    ]


def test_text_wraps_between_words_where_it_may() -> None:
    columns = [Column(title="name"), Column(title="licence", wraps=True), Column(title="n")]
    rows = [("one", "Apache-2.0 (the packages state none)", "1"), ("two", "MIT", "2")]
    assert table_lines(columns, rows, width=80)[1:] == [
        "one   Apache-2.0 (the packages state none)  1",
        "two   MIT                                   2",
    ]
    assert table_lines(columns, rows, width=28)[1:] == [
        "one   Apache-2.0 (the      1",
        "      packages state",
        "      none)",
        "two   MIT                  2",
    ]


def test_words_stay_whole_unless_they_are_longer_than_any() -> None:
    columns = [Column(title="kind", shrinks=True), Column(title="value", wraps=True)]
    rows = [("a kind of thing", "unofficial copy"), ("two", "f" * 40)]
    lines = table_lines(columns, rows, width=22)
    assert lines[1:3] == ["a kind of…  unofficial", "            copy"]
    assert "".join(line[12:] for line in lines[3:]) == "f" * 40


def test_a_table_fits_where_words_do_not() -> None:
    columns = [Column(title="name"), Column(title="value", wraps=True)]
    lines = table_lines(columns, [("one", "unofficial")], width=14)
    assert lines[1:] == ["one   unoffici", "      al"]

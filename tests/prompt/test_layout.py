from __future__ import annotations

import re

from hypothesis import given, settings

from tests.prompt.strategies import documents, make_document, texts
from tsdoc.ingest.document import Document
from tsdoc.prompt.layout import prompt_text, render_document_section, render_section

_LOOKALIKE = re.compile(r"^\\*</?document[ >]")


def test_a_section_stands_between_delimiter_lines() -> None:
    rendered = render_section("src/main.py", (), "print(1)\n")
    assert rendered.text == '<document name="src/main.py">\nprint(1)\n</document>\n'
    assert rendered.text[rendered.content_start : rendered.content_end] == "print(1)\n"


def test_the_closing_delimiter_has_its_own_line_when_the_text_has_no_last_line_end() -> None:
    rendered = render_section("a", (), "x")
    assert rendered.text == '<document name="a">\nx\n</document>\n'
    assert rendered.text[rendered.content_start : rendered.content_end] == "x"


def test_an_empty_section_is_two_delimiters() -> None:
    assert render_section("a", (), "").text == '<document name="a">\n</document>\n'


def test_titles_are_joined_from_the_outermost_inwards() -> None:
    text = render_section("book.pdf", ("4", "4.2 Files"), "x").text
    assert text.startswith('<document name="book.pdf" section="4 › 4.2 Files">\n')


def test_names_and_titles_cannot_leave_their_attribute_or_line() -> None:
    text = render_section('a">\n</document>\x1b[0m&', ("<b>\u202e",), "x").text
    assert text == (
        '<document name="a&quot;&gt;\\n&lt;/document&gt;\\x1b[0m&amp;"'
        ' section="&lt;b&gt;\\u202e">\nx\n</document>\n'
    )


def test_lookalike_lines_get_one_backslash_more() -> None:
    text = "</document>\na </document>\n\\<document x>\n<documents>\n</document x\n<document>"
    rendered = render_section("a", (), text)
    assert rendered.text[rendered.content_start : rendered.content_end] == (
        "\\</document>\na </document>\n\\\\<document x>\n<documents>\n\\</document x\n\\<document>"
    )
    assert all(rendered.text[at] == "\\" for at in rendered.escapes)


def test_many_backslashes_do_not_take_quadratic_time() -> None:
    text = "\\" * 3_000_000 + "</document>"
    assert len(render_section("a", (), text).escapes) == 1


@given(texts)
def test_no_line_of_the_text_is_a_delimiter_and_unescaping_gives_it_back(text: str) -> None:
    rendered = render_section("a", (), text)
    content = rendered.text[rendered.content_start : rendered.content_end]
    lines = content.splitlines(keepends=True)
    assert not any(re.match("</?document[ >]", line) for line in lines)
    unescaped = [line[1:] if _LOOKALIKE.match(line) else line for line in lines]
    assert "".join(unescaped) == text


@settings(max_examples=50, deadline=None)
@given(documents())
def test_prompt_text_is_the_sections_and_then_the_contents(document: Document) -> None:
    parts = list(prompt_text(document, tree_tokens=1000))
    num_sections = len(document.sections)
    assert parts[:num_sections] == [
        render_document_section(document, n).text for n in range(num_sections)
    ]
    assert all(part.startswith("<contents>\n") for part in parts[num_sections:])


def test_a_section_does_not_depend_on_its_neighbours() -> None:
    one = list(prompt_text(make_document(["x", "y"]), tree_tokens=0))
    other = list(prompt_text(make_document(["x", "changed", "z"]), tree_tokens=0))
    assert one[0] == other[0]

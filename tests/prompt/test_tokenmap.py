from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.prompt.strategies import documents, make_document, texts
from tsdoc.ingest.document import Document, PageStart, Section, SourceFile
from tsdoc.prompt.assemble import Prompt, build_prompt
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.contents import contents_text
from tsdoc.prompt.layout import prompt_text
from tsdoc.prompt.render import RenderedTemplate
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.prompt.tokenmap import Span

shared_tokenizer = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=25,
    deadline=None,
)


def build(document: Document, tokenizer: TextTokenizer, *, tree_tokens: int = 100) -> Prompt:
    rendered = RenderedTemplate(head="Head:\n", tail="", turn=None, has_template=True)
    template = ChatTemplate(rendered, tokenizer)
    return build_prompt(document, tokenizer, template, tree_tokens=tree_tokens)


@shared_tokenizer
@given(document=documents(), data=st.data())
def test_every_span_gives_back_exactly_the_original_text(
    tokenizer: TextTokenizer, document: Document, data: st.DataObject
) -> None:
    prompt = build(document, tokenizer)
    num_tokens = prompt.ids.size
    assert prompt.map.text(0, num_tokens) == "".join(s.text for s in document.sections)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * 2)))
    spans = prompt.map.spans(start, end)
    assert prompt.map.text(start, end) == "".join(
        document.sections[span.section].text[span.start : span.end] for span in spans
    )
    for number in range(len(document.sections)):
        first, last = prompt.map.section_range(number)
        assert prompt.map.text(first, last) == document.sections[number].text


@shared_tokenizer
@given(document=documents(), data=st.data())
def test_the_tokens_of_a_span_spell_it_and_none_of_them_is_idle(
    tokenizer: TextTokenizer, document: Document, data: st.DataObject
) -> None:
    prompt = build(document, tokenizer)
    number = data.draw(st.integers(0, len(document.sections) - 1))
    length = len(document.sections[number].text)
    if length == 0:
        return
    start = data.draw(st.integers(0, length - 1))
    end = data.draw(st.integers(start + 1, length))
    first, last = prompt.map.tokens(Span(section=number, start=start, end=end))
    low, high = prompt.map.section_range(number)
    assert low <= first < last <= high
    (covered,) = prompt.map.spans(first, last)
    assert covered.start <= start
    assert covered.end >= end
    for token in (first, last - 1):
        for own in prompt.map.spans(token, token + 1):
            assert own.start < end
            assert own.end > start or own.start == own.end


@shared_tokenizer
@given(document=documents())
def test_single_tokens_cover_the_text_without_gaps(
    tokenizer: TextTokenizer, document: Document
) -> None:
    prompt = build(document, tokenizer)
    for number, section in enumerate(document.sections):
        covered = 0
        for token in range(*prompt.map.section_range(number)):
            for span in prompt.map.spans(token, token + 1):
                assert span.section == number
                assert span.start <= covered
                covered = max(covered, span.end)
        assert covered == len(section.text)


@shared_tokenizer
@given(texts=st.lists(texts, min_size=1, max_size=3))
def test_a_token_spells_the_text_of_its_span(byte_level: TextTokenizer, texts: list[str]) -> None:
    prompt = build(make_document(texts), byte_level)
    for token in range(prompt.head_len, prompt.contents_start):
        spelled = byte_level.decode(prompt.ids[token : token + 1])
        original = prompt.map.text(token, token + 1)
        # No letter of a token is missing in its span: delimiters and escapes are the only extras.
        if original and "\ufffd" not in spelled and original.isprintable():
            assert spelled.strip("\\") in original or original in spelled


def test_escapes_are_not_part_of_the_original(byte_level: TextTokenizer) -> None:
    text = "a\n</document>\n\\<document name=\nb"
    prompt = build(make_document([text]), byte_level)
    assert b"\n\\</document>\n\\\\<document" in byte_level.decode(prompt.ids).encode()
    for token in range(prompt.head_len, prompt.contents_start):
        assert prompt.map.text(prompt.head_len, token) == text[: len(prompt.map.text(0, token))]
    assert prompt.map.text(0, prompt.ids.size) == text


@shared_tokenizer
@given(document=documents())
def test_the_prompt_is_head_sections_and_contents(
    tokenizer: TextTokenizer, document: Document
) -> None:
    prompt = build(document, tokenizer)
    parts = [tokenizer.encode(text)[0] for text in prompt_text(document, tree_tokens=100)]
    head = tokenizer.encode_control("Head:\n", at_start=True)
    assert np.array_equal(prompt.ids, np.concatenate([head, *parts]))
    assert prompt.ids.dtype == np.int32
    assert prompt.head_len == head.size
    contents, _ = tokenizer.encode(contents_text(document, tree_tokens=100))
    assert prompt.ids.size - prompt.contents_start == contents.size
    bounds = [prompt.map.section_range(n) for n in range(len(document.sections))]
    assert bounds[0][0] == prompt.head_len
    assert bounds[-1][1] == prompt.contents_start
    assert all(one[1] == other[0] for one, other in pairwise(bounds))


@shared_tokenizer
@given(document=documents(), other=texts)
def test_ids_of_a_section_do_not_depend_on_its_neighbours(
    tokenizer: TextTokenizer, document: Document, other: str
) -> None:
    section = document.sections[0]
    changed = Document(
        name="other",
        files=document.files,
        sections=(
            Section(file=0, titles=(), text=other, first_line=None),
            section,
            Section(file=0, titles=("x",), text=other, first_line=None),
        ),
    )
    one, two = build(document, tokenizer), build(changed, tokenizer)
    assert np.array_equal(
        one.ids[slice(*one.map.section_range(0))], two.ids[slice(*two.map.section_range(1))]
    )


@shared_tokenizer
@given(document=documents())
def test_places_are_those_of_the_document(tokenizer: TextTokenizer, document: Document) -> None:
    prompt = build(document, tokenizer)
    for number, section in enumerate(document.sections):
        for offset in range(len(section.text)):
            assert prompt.map.locate(number, offset) == document.locate(number, offset)
        for token in range(*prompt.map.section_range(number)):
            place = prompt.map.place(token)
            spans = prompt.map.spans(token, token + 1)
            assert place is not None
            assert place.file == document.files[section.file].name
            if spans:
                assert place == document.locate(number, spans[0].start)


def test_head_and_contents_have_no_place(byte_level: TextTokenizer) -> None:
    prompt = build(make_document(["a", "b"]), byte_level)
    nowhere = [*range(prompt.head_len), *range(prompt.contents_start, prompt.ids.size)]
    assert len(nowhere) > prompt.head_len
    assert {prompt.map.place(token) for token in [*nowhere, -1, prompt.ids.size]} == {None}
    assert prompt.map.spans(0, prompt.head_len) == []


def test_tokens_know_their_page_and_line(byte_level: TextTokenizer) -> None:
    text = "one\ntwo\nthree"
    pages = (PageStart(start=0, number=4, label="iv"), PageStart(start=8, number=5))
    document = Document(
        name="made",
        files=(SourceFile(name="b.pdf", path=None, kind="pdf", num_bytes=1, sha256=""),),
        sections=(Section(file=0, titles=("T",), text=text, first_line=11, pages=pages),),
    )
    prompt = build(document, byte_level)
    places = [prompt.map.place(token) for token in range(*prompt.map.section_range(0))]
    assert str(places[0]) == "b.pdf p. 4 (printed iv)"
    assert places[0] is not None
    assert places[0].line == 11
    assert str(places[-1]) == "b.pdf p. 5"
    assert places[-1] is not None
    assert places[-1].line == 13


def test_a_document_without_sections_is_only_a_head(byte_level: TextTokenizer) -> None:
    prompt = build(make_document([]), byte_level)
    assert prompt.ids.size == prompt.head_len == prompt.contents_start
    assert prompt.map.text(0, prompt.ids.size) == ""


def test_progress_ends_with_all_characters(
    byte_level: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tsdoc.prompt.tokenizer._BATCH_CHARS", 100)
    seen: list[tuple[int, int]] = []
    rendered = RenderedTemplate(head="", tail="", turn=None, has_template=True)
    build_prompt(
        make_document(["a" * 100, "", "c" * 200]),
        byte_level,
        ChatTemplate(rendered, byte_level),
        tree_tokens=0,
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1] == (300, 300)

"""Passages are short, whole, apart, and where the evidence is, in any text."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.prompt.strategies import documents, make_document
from tests.prompt.test_tokenmap import build
from tsdoc.evidence import find_evidence
from tsdoc.evidence.passages import MAX_TOKENS, cut_passages
from tsdoc.ingest.document import Document, PageStart, Section, SourceFile
from tsdoc.prompt.assemble import Prompt
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.prompt.tokenmap import Span

PROSE = " ".join(
    f"Sentence number {n} of this paragraph says that box {n} holds item {n * 7}."
    for n in range(60)
)


def scores_for(prompt: Prompt, quote: str, *, low: float = 0.01) -> np.ndarray:
    """Little evidence everywhere and much at the tokens of `quote`."""
    first, last = prompt.head_len, prompt.contents_start
    scores = np.full(last - first, low, dtype=np.float32)
    begin = prompt.map.document.sections[0].text.index(quote)
    span = Span(section=0, start=begin, end=begin + len(quote))
    start, end = prompt.map.tokens(span)
    scores[start - first : end - first] = 1.0
    return scores / scores.sum()  # one nat in all


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=20,
    deadline=None,
)
@given(document=documents(), data=st.data())
def test_any_evidence_in_any_document_gives_passages_of_its_text(
    byte_level: TextTokenizer, document: Document, data: st.DataObject
) -> None:
    prompt = build(document, byte_level)
    count = prompt.contents_start - prompt.head_len
    seed = data.draw(st.integers(0, 99))
    scores = np.random.default_rng(seed).random(count, dtype=np.float32) ** 8
    cuts = cut_passages(scores, prompt.head_len, prompt.map, count=3)
    for cut in cuts:
        text = document.sections[cut.span.section].text[cut.span.start : cut.span.end]
        assert text.strip()
        assert cut.end - cut.start <= MAX_TOKENS
        assert text in prompt.map.text(cut.start, cut.end)
    for one, other in combinations(cuts, 2):
        assert one.end <= other.start or other.end <= one.start
    assert [c.peak for c in cuts] == sorted((c.peak for c in cuts), reverse=True)


@pytest.mark.parametrize("number", [0, 31, 59])
def test_the_sentence_that_draws_most_is_the_first_passage(
    byte_level: TextTokenizer, number: int
) -> None:
    prompt = build(make_document([PROSE]), byte_level)
    quote = f"box {number} holds item {number * 7}."
    scores = scores_for(prompt, quote)
    evidence = find_evidence(scores, scores, prompt.head_len, prompt.map, count=3)
    best = evidence.passages[0]
    assert quote in best.text
    assert best.text.startswith("Sentence number ")
    assert best.text.endswith(".")
    assert evidence.stands_out
    assert 0 < best.share < 1
    assert abs(best.position - (number + 0.5) / 60) < 0.05


def test_even_evidence_does_not_stand_out(byte_level: TextTokenizer) -> None:
    prompt = build(make_document([PROSE]), byte_level)
    count = prompt.contents_start - prompt.head_len
    even = np.full(count, 0.2 / count, dtype=np.float32)  # nats
    assert not find_evidence(even, even, prompt.head_len, prompt.map, count=3).stands_out
    nothing = find_evidence(even * 0, even, prompt.head_len, prompt.map, count=3)
    assert nothing.passages == ()
    assert not nothing.stands_out


def test_a_line_without_end_is_cut_to_size(byte_level: TextTokenizer) -> None:
    prompt = build(make_document(["word " * 2000]), byte_level)
    scores = np.ones(prompt.contents_start - prompt.head_len, dtype=np.float32)
    (cut,) = cut_passages(scores, prompt.head_len, prompt.map, count=1)
    assert MAX_TOKENS // 2 < cut.end - cut.start <= MAX_TOKENS


def _words_of(document: Document, words: str) -> Span:
    start = document.sections[0].text.index(words)
    return Span(section=0, start=start, end=start + len(words))


def test_coverage_counts_the_fewest_pages_that_hold_most(byte_level: TextTokenizer) -> None:
    pages = [f"Page {n} says this and that about things. " for n in range(10)]
    starts = np.cumsum([0, *map(len, pages)])[:-1]
    document = Document(
        name="made",
        files=(SourceFile(name="a.pdf", path=None, kind="pdf", num_bytes=1, sha256="0"),),
        sections=(
            Section(
                file=0,
                titles=(),
                text="".join(pages),
                first_line=None,
                pages=tuple(PageStart(start=int(s), number=n + 1) for n, s in enumerate(starts)),
            ),
        ),
    )
    prompt = build(document, byte_level)
    attention = np.full(prompt.contents_start - prompt.head_len, 1e-6, dtype=np.float32)
    start, end = (at - prompt.head_len for at in prompt.map.tokens(_words_of(document, "Page 9")))
    attention[start:end] = 1
    evidence = find_evidence(attention, attention, prompt.head_len, prompt.map, count=1)
    assert evidence.coverage is not None
    assert (evidence.coverage.unit, evidence.coverage.total) == ("page", 10)
    assert evidence.coverage.holding == 1
    assert evidence.passages[0].first.page == 10
    even = np.ones_like(attention)
    spread = find_evidence(even, even, prompt.head_len, prompt.map, count=1).coverage
    assert spread is not None
    assert spread.holding >= 8


def test_coverage_of_files_with_pages_and_files_without_counts_both(
    byte_level: TextTokenizer,
) -> None:
    text = "This and that about things. " * 4
    sections = [
        Section(
            file=0,
            titles=(),
            text=text,
            first_line=None,
            pages=(PageStart(start=0, number=1), PageStart(start=56, number=2)),
        ),
        # Of a file with pages; it counts as part of the last of them.
        Section(file=0, titles=("Empty",), text="", first_line=None),
        *(Section(file=n, titles=(), text=text, first_line=1) for n in (1, 2, 2)),
    ]
    files = (("a.pdf", "pdf"), ("b.txt", "text"), ("c.txt", "text"))
    document = Document(
        name="made",
        files=tuple(
            SourceFile(name=name, path=None, kind=kind, num_bytes=1, sha256="0")
            for name, kind in files
        ),
        sections=tuple(sections),
    )
    prompt = build(document, byte_level)
    even = np.ones(prompt.contents_start - prompt.head_len, dtype=np.float32)
    coverage = find_evidence(even, even, prompt.head_len, prompt.map, count=1).coverage
    assert coverage is not None
    assert (coverage.unit, coverage.total) == ("page_or_file", 4)

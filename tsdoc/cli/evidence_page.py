"""The page of `--html`: answers, their passages in context, and the document as a strip."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tsdoc.cli.evidence import coverage_text, place_text, section_text
from tsdoc.report import render_page
from tsdoc.report.numbers import percent_text

if TYPE_CHECKING:
    from tsdoc.evidence import Evidence, Passage
    from tsdoc.ingest.document import Document
    from tsdoc.prompt.tokenmap import TokenMap
    from tsdoc.session import Answer, Session

CONTEXT = 400  # characters shown before and behind a passage
MAX_PARTS = 60  # files or sections marked on a strip; more would be a grey bar
ENDINGS = {"length": "cut for its length", "loop": "ended where it began to repeat itself"}
WIDTH, HEIGHT = 1000.0, 60.0


def answers_page(session: Session, answers: Sequence[Answer]) -> str:
    """Returns a self-contained page about answers that were given with evidence."""
    document = session.document
    parts = _parts(session.prompt.map)
    data = {
        "document": document.name,
        "model": session.model.name,
        "tokens": len(session.prompt.ids),
        "answers": [_answer(document, number, answer) for number, answer in enumerate(answers, 1)],
    }
    strips = [_strip(answer.evidence) for answer in answers]
    title = f"{document.name}: where the answer comes from"
    return render_page(
        "evidence",
        title=title,
        data=data,
        strips=strips,
        parts=parts,
        width=WIDTH,
        height=HEIGHT,
    )


def _answer(document: Document, number: int, answer: Answer) -> dict[str, Any]:
    evidence = answer.evidence
    passages = () if evidence is None else evidence.passages
    return {
        "id": f"a{number}",
        "question": answer.question,
        "text": answer.text,
        "ended": ENDINGS.get(answer.finish_reason),
        "stands_out": evidence is not None and evidence.stands_out,
        "coverage": coverage_text(evidence.coverage if evidence is not None else None),
        "passages": [
            {"id": f"a{number}p{rank}", "rank": rank, **_passage(document, passage)}
            for rank, passage in enumerate(passages, 1)
        ],
    }


def _passage(document: Document, passage: Passage) -> dict[str, Any]:
    text = document.sections[passage.section].text
    before = text[max(passage.start - CONTEXT, 0) : passage.start]
    if passage.start > CONTEXT:
        before = "…" + before[before.find(" ") + 1 :]
    after = text[passage.end : passage.end + CONTEXT]
    if passage.end + CONTEXT < len(text):
        after = (after.rpartition(" ")[0] or after) + "…"
    return {
        "place": place_text(passage),
        "section": section_text(passage),
        "before": before,
        "text": passage.text,
        "after": after,
        "attention": percent_text(passage.attention),
        "x": round(passage.position * WIDTH, 1),
    }


def _strip(evidence: Evidence | None) -> list[dict[str, float]]:
    """Bars of a strip; what is too low to be seen is left out."""
    values = () if evidence is None else evidence.strip
    step = WIDTH / max(len(values), 1)
    return [
        {"x": round(at * step, 2), "width": round(step, 2), "height": round(value * HEIGHT, 1)}
        for at, value in enumerate(values)
        if value * HEIGHT >= 0.2
    ]


def _parts(token_map: TokenMap) -> list[dict[str, Any]]:
    """Where the files, or the chapters of a single one, lie on a strip."""
    document = token_map.document
    names: list[tuple[str, int]] = []
    for number, section in enumerate(document.sections):
        one_file = len(document.files) == 1
        name = " › ".join(section.titles[:1]) if one_file else document.files[section.file].name
        if not names or names[-1][0] != name:
            names.append((name, token_map.section_range(number)[0]))
    if not 2 <= len(names) <= MAX_PARTS:
        return []
    bounds = token_map.arrays.section_tokens
    first, last = int(bounds[0]), int(bounds[-1])
    ends = [start for _, start in names[1:]] + [last]
    scale = WIDTH / max(last - first, 1)
    return [
        {
            "name": name or document.name,
            "x": round((start - first) * scale, 1),
            "width": round((end - start) * scale, 1),
        }
        for (name, start), end in zip(names, ends, strict=True)
    ]

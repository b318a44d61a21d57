"""Summaries: of a whole document, of its parts one by one, and of those summaries.

The summary of a part selects among the part's own tokens alone; the first tokens and the local
window stay attended, as for every question. Finished parts are kept, so that an interrupted run
goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from tsdoc.errors import ResourceError, StoreError
from tsdoc.ingest.document import Place
from tsdoc.session.anchors import Anchors
from tsdoc.session.kept import digest_of
from tsdoc.session.kept_summaries import KeptSummaries
from tsdoc.session.parts import Part
from tsdoc.session.resolving import index_kind
from tsdoc.session.results import Answer
from tsdoc.session.sentences import Repetitions, Sentences
from tsdoc.session.session import Session
from tsdoc.session.transcript import StopAnswer

Length = Literal["short", "medium", "long"]

PROMPT_VERSION = 1
"""Part of every kept summary's key; raise it when a prompt below or the cutting changes."""

SENTENCES_OF_PART: dict[Length, str] = {"short": "two", "medium": "four", "long": "eight"}
WORDS_OF_PART: dict[Length, int] = {"short": 40, "medium": 80, "long": 160}
WORDS_OF_WHOLE: dict[Length, int] = {"short": 100, "medium": 250, "long": 600}
TOKENS_PER_WORD = 2  # room for languages and models that need more tokens than English text

WHOLE = (
    "Summarise the whole document in about {words} words. Say what kind of document it is and what "
    "it is about, then its main people, parts or claims in the order of the document, and how it "
    "ends or what it concludes. Use only what the document says."
)
PART = "What happens or is said in {title}, and to whom? Answer in {sentences} sentences."
OF_SUMMARIES = (
    "These are summaries of the document's parts, in order:\n\n{summaries}\n\nSummarise the whole "
    "document from them in about {words} words: what it is about, its main people or claims, and "
    "how it ends."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CitedSentence:
    """A sentence and where the document says it; None where no place is close."""

    text: str
    place: Place | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A summary, sentence by sentence.

    Attributes:
        finish_reason: "stop", "length" (cut, back to the last whole sentence) or "loop" (ended
            before it repeated itself).
        nearest: The place that is closest to the whole of it, close or not; where no sentence has a
            place, one can at least begin to read there. None when it shares no word with the text.
        generated_tokens: Tokens that were generated for it, by this or an earlier process.
        answer: What the session says of it; None for one that was kept.
    """

    sentences: tuple[CitedSentence, ...]
    nearest: Place | None
    finish_reason: str
    generated_tokens: int
    answer: Answer | None

    @property
    def text(self) -> str:
        """Its sentences alone."""
        return "".join(separator(s.text) + s.text for s in self.sentences).strip()


class Summarizer:
    """Summarises one session's document.

    Args:
        session: The document and the model.
        length: How long summaries are.
        max_new_tokens: Of each; None allows what the length needs.

    Attributes:
        keeps: Whether summaries of parts are kept; not any more once that has failed.
    """

    def __init__(self, session: Session, length: Length, *, max_new_tokens: int | None) -> None:
        self._session = session
        self._length = length
        self._limit = max_new_tokens
        self._kept = KeptSummaries(home=session.home, record=session.record)
        self._reads = self.keeps = session.settings.store.enabled

    def whole(self, on_sentence: Callable[[CitedSentence], None]) -> Summary:
        """Summarises the whole document; `on_sentence` receives the sentences as they come."""
        anchors = self._anchors((0, len(self._session.document.sections)))
        words = WORDS_OF_WHOLE[self._length]
        return self._ask(WHOLE.format(words=words), words, anchors, None, on_sentence)

    def kept_part(self, part: Part) -> Summary | None:
        """Returns the summary of a part that an earlier run has made, None where there is none."""
        value = self._kept.load(self._key(part)) if self._reads else None
        if value is None:
            return None
        return self._cited(
            value["sentences"],
            self._anchors(part.sections),
            finish_reason=value["finish_reason"],
            generated_tokens=value["generated_tokens"],
        )

    def part(self, part: Part) -> Summary:
        """Summarises one part and keeps the result, where that is possible."""
        words = WORDS_OF_PART[self._length]
        anchors = self._anchors(part.sections)
        summary = self._ask(self._part_question(part), words, anchors, [part.tokens], _ignore)
        if self.keeps:
            self._keep(part, summary)
        return summary

    def _keep(self, part: Part, summary: Summary) -> None:
        value = {
            "sentences": [sentence.text for sentence in summary.sentences],
            "finish_reason": summary.finish_reason,
            "generated_tokens": summary.generated_tokens,
        }
        try:
            self._kept.save(self._key(part), value)
        except (ResourceError, StoreError) as error:
            message = f"{error.message}; summaries of parts are not kept"
            self._session.reporter.warn("not_kept", error.where or "", message)
            self.keeps = False  # it is said once

    def of_summaries(
        self, parts: Sequence[tuple[Part, Summary]], on_sentence: Callable[[CitedSentence], None]
    ) -> Summary:
        """Summarises the document from the summaries of its parts alone; see `whole`."""
        words = WORDS_OF_WHOLE[self._length]
        lines = [f"{part.title}: {summary.text}" for part, summary in parts]
        question = OF_SUMMARIES.format(summaries="\n\n".join(lines), words=words)
        anchors = self._anchors((0, len(self._session.document.sections)))
        return self._ask(question, words, anchors, [], on_sentence)

    def _anchors(self, sections: tuple[int, int]) -> Anchors:
        return Anchors(self._session.document, self._session.prompt.map, sections)

    def _ask(
        self,
        question: str,
        words: int,
        anchors: Anchors,
        allowed: Sequence[tuple[int, int]] | None,
        on_sentence: Callable[[CitedSentence], None],
    ) -> Summary:
        cited: list[CitedSentence] = []

        def cite(text: str) -> None:
            cited.append(CitedSentence(text=text, place=anchors.find(text)))
            on_sentence(cited[-1])

        sentences = Sentences(cite)

        def on_text(text: str) -> None:
            sentences.add(text)
            if sentences.looped:
                raise StopAnswer

        answer = self._session.ask(
            question,
            on_text,
            allowed=allowed,
            max_new_tokens=self._max_new_tokens(words),
            reread=False,
        )
        sentences.finish(cut=answer.finish_reason != "stop")
        return Summary(
            sentences=tuple(cited),
            nearest=anchors.nearest(" ".join(sentences.said)),
            finish_reason="loop" if sentences.looped else answer.finish_reason,
            generated_tokens=answer.generated_tokens,
            answer=answer,
        )

    def _cited(
        self,
        sentences: Sequence[str],
        anchors: Anchors,
        *,
        finish_reason: str,
        generated_tokens: int,
    ) -> Summary:
        return Summary(
            sentences=tuple(CitedSentence(text=s, place=anchors.find(s)) for s in sentences),
            nearest=anchors.nearest(" ".join(sentences)),
            finish_reason=finish_reason,
            generated_tokens=generated_tokens,
            answer=None,
        )

    def _part_question(self, part: Part) -> str:
        return PART.format(title=part.title, sentences=SENTENCES_OF_PART[self._length])

    def _max_new_tokens(self, words: int) -> int:
        return self._limit or TOKENS_PER_WORD * words

    def _key(self, part: Part) -> str:
        """Digest of everything that a part's summary depends on."""
        session = self._session
        decides = {
            "version": PROMPT_VERSION,
            "prompt": digest_of(session.prompt.ids),
            "model": session.model_key.digest,
            "template": session.template.fingerprint,
            "part": part.tokens,
            "question": self._part_question(part),
            "answer": session.settings.answer.model_dump(exclude={"evidence"}),
            "max_new_tokens": self._max_new_tokens(WORDS_OF_PART[self._length]),
            "theta": session.settings.engine.theta,
            "question_chunk_size": session.settings.engine.question_chunk_size,
            "index": index_kind(session.settings.engine, session.device),
            "index_candidates": session.settings.engine.index_candidates,
        }
        text = json.dumps(decides, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def without_repetitions(summaries: Sequence[Summary]) -> list[tuple[CitedSentence, ...]]:
    """Returns the sentences of summaries that stand in one text, none with a run said twice before.

    A summary of which nothing would be left keeps its first sentence.
    """
    repetitions = Repetitions()
    result = []
    for summary in summaries:
        admitted = repetitions.admit([sentence.text for sentence in summary.sentences])
        kept = tuple(summary.sentences[number] for number in admitted)
        result.append(kept or summary.sentences[:1])
    return result


def separator(sentence: str) -> str:
    """Returns what stands before a sentence: items of a list have lines of their own."""
    is_item = sentence.startswith(("- ", "* ", "• ")) or sentence.split(". ")[0].isdigit()
    return "\n" if is_item else " "


def _ignore(sentence: CitedSentence) -> None:
    """Takes sentences that are shown later."""

"""What of an answer is shown, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tsdoc.session.transcript import Transcript


class Words:
    """A tokenizer whose tokens are words: each is its number in `words`."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def stream_decoder(self) -> SimpleNamespace:
        return SimpleNamespace(push=lambda token: self.words[token])


def run(text: str, *, stop_loops: bool = True) -> tuple[Transcript, list[str]]:
    """Feeds words to a transcript until it finds a loop; returns it and what it passed on."""
    pieces = [piece if at == 0 else f" {piece}" for at, piece in enumerate(text.split(" "))]
    words = sorted(set(pieces))
    shown: list[str] = []
    tokenizer: Any = Words(words)
    transcript = Transcript(tokenizer, shown.append, stop_loops=stop_loops)
    for count, piece in enumerate(pieces, 1):
        transcript.add(count, words.index(piece))
        if transcript.looped:
            break
    transcript.finish()
    assert "".join(shown) == transcript.text
    return transcript, shown


SENTENCE = "the mill is owned by the man and it is a part of one more estate of the same name."


@pytest.mark.parametrize(
    "begin",
    [
        "It runs.",
        # The stretch that comes again begins inside a sentence, and ends there.
        "It is not new and it is a part of one more estate of the same name.",
    ],
)
def test_a_loop_ends_with_a_whole_sentence(begin: str) -> None:
    transcript, _ = run(" ".join([begin, *[SENTENCE] * 9]))
    assert transcript.looped
    assert transcript.text == " ".join([begin, *[SENTENCE] * 2])


def test_a_loop_without_sentences_ends_after_its_second_time() -> None:
    line = "| a | b | c | d | e | f | g | h"
    transcript, _ = run(" ".join(["Table", *[line] * 20]))
    assert transcript.text == " ".join(["Table", *[line] * 2])


def test_what_comes_again_and_then_ends_is_shown_whole() -> None:
    text = " ".join([*[SENTENCE] * 3, "And then it ends."])
    transcript, shown = run(text)
    assert transcript.text == text
    assert "" not in shown
    assert len(shown) < len(text.split())  # some of it at once


def test_nothing_is_held_back_where_loops_may_go_on() -> None:
    text = " ".join([SENTENCE] * 9)
    transcript, shown = run(text, stop_loops=False)
    assert transcript.text == text
    assert len(shown) == len(text.split())


def test_tokens_that_come_again_after_a_repair_are_passed_over() -> None:
    transcript, shown = run(SENTENCE)
    before = len(shown)
    for count in range(1, before + 1):
        transcript.add(count, 0)
    assert len(shown) == before
    assert transcript.num_tokens == before

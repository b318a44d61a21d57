"""Sentences of a growing text, and the end of one that repeats itself."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tsdoc.session.sentences import RUN, Repetitions, Sentences, runs_of, words_of


def read(text: str, *, step: int = 3, cut: bool = False) -> Sentences:
    said: list[str] = []
    sentences = Sentences(said.append)
    for start in range(0, len(text), step):
        sentences.add(text[start : start + step])
    sentences.finish(cut=cut)
    assert said == sentences.said
    return sentences


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One is here. Two follows! Is three?", ["One is here.", "Two follows!", "Is three?"]),
        ("Mr. Allen met A. Thorpe, i.e. her. Yes.", ["Mr. Allen met A. Thorpe, i.e. her.", "Yes."]),
        ('He said "Go." Then he left.', ['He said "Go."', "Then he left."]),
        ("It costs 3.50 in v1.2 today.", ["It costs 3.50 in v1.2 today."]),
        ("1. First item\n2. Second item\n", ["1. First item", "2. Second item"]),
        ("猫は二階に住む。本は多い。", ["猫は二階に住む。", "本は多い。"]),
        ("", []),
        ("\n\n", []),
    ],
)  # fmt: skip
def test_sentences_are_passed_on_whole(text: str, expected: list[str], step: int) -> None:
    assert read(text, step=step).said == expected


def test_the_rest_of_a_cut_answer_is_dropped_unless_it_is_all_there_is() -> None:
    assert read("It is whole. It is c", cut=True).said == ["It is whole."]
    assert read("It is c", cut=True).said == ["It is c …"]
    assert read("It is whole. It is c").said == ["It is whole.", "It is c"]


LOOP = "She looks forward to seeing the company in a beautiful way. "


@pytest.mark.parametrize("step", [1, 5, 400])
def test_a_loop_ends_before_its_second_round(step: int) -> None:
    sentences = read(f"Catherine goes to Bath. {LOOP * 5}And more.", step=step)
    assert sentences.looped
    assert sentences.said == ["Catherine goes to Bath.", LOOP.strip()]


def test_a_loop_inside_one_sentence_is_never_passed_on() -> None:
    sentences = read("It begins. " + "and the cat sat on the mat by the door " * 4)
    assert sentences.looped
    assert sentences.said == ["It begins."]


def test_a_list_without_end_is_a_loop() -> None:
    assert read("It lists " + ", ".join(f"item{n}" for n in range(400))).looped


@given(st.lists(st.sampled_from("abcd"), max_size=120), st.integers(1, 9))
def test_no_run_is_ever_passed_on_twice(letters: list[str], step: int) -> None:
    text = " ".join(f"{letter}." if n % 5 == 4 else letter for n, letter in enumerate(letters))
    words = words_of(" ".join(read(text, step=step).said))
    assert all(count == 1 for count in Counter(runs_of(words)).values())


@given(st.lists(st.lists(st.text("ab ", min_size=1, max_size=40), max_size=4), max_size=6))
def test_no_run_is_admitted_three_times(summaries: list[list[str]]) -> None:
    repetitions = Repetitions()
    counts: Counter[tuple[str, ...]] = Counter()
    for sentences in summaries:
        said = [sentences[number] for number in repetitions.admit(sentences)]
        counts.update(set(runs_of(words_of(" ".join(said)))))
    assert all(count <= 2 for count in counts.values())


def test_repetitions_drop_the_third_sentence_alone() -> None:
    repetitions = Repetitions()
    same = "The chapter begins with the arrival of Catherine Morland in Bath."
    assert len(words_of(same)) > RUN
    admitted = [repetitions.admit([same, f"Then comes number {n}."]) for n in range(3)]
    assert admitted == [[0, 1], [0, 1], [1]]

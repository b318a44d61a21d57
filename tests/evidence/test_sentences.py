from __future__ import annotations

import pytest

from tsdoc.evidence.sentences import lines, paragraph_around, sentences


def split(text: str) -> list[str]:
    return [text[a:b] for a, b in sentences(text, 0, len(text))]


def test_sentences_end_at_marks_before_a_new_beginning() -> None:
    text = (
        "She walked to the mill by the river. It was shut! “Why is it shut today?” he asked me.\n"
        "Version 2.5 of it costs 3.50 in e.g. two towns. 12 men came."
    )
    assert split(text) == [
        "She walked to the mill by the river.",
        "It was shut! “Why is it shut today?” he asked me.",  # what is short joins what follows
        "Version 2.5 of it costs 3.50 in e.g. two towns.",
        "12 men came.",
    ]


@pytest.mark.parametrize("name", ["Mr. Allen", "Mrs. Thorpe", "Dr. J. H. Watson", "St. Simon"])
def test_names_do_not_end_sentences(name: str) -> None:
    text = f"In the evening of that day {name} came to see us. He stayed."
    assert split(text)[0].endswith("came to see us.")


def test_sentences_without_spaces_between_them_are_told_apart() -> None:
    first, second = (
        "猫は二階に住んでいて、毎日窓から外を静かに眺めている。",
        "本は多いので、誰も読まない！",
    )
    assert split(first + second) == [first, second]


def test_a_paragraph_ends_at_empty_lines() -> None:
    text = "First one.\n \nSecond one,\nits second line.\n\n\nThird."
    for offset in range(len(text)):
        start, end = paragraph_around(text, offset, reach=1000)
        assert start <= offset < max(end, offset + 1)
        assert "\n\n" not in text[start:end].strip()
    start, end = paragraph_around(text, text.index("its"), reach=1000)
    assert text[start:end] == "Second one,\nits second line."
    start, end = paragraph_around("x" * 5000, 2500, reach=100)
    assert (start, end) == (2400, 2600)


def test_lines_are_found_without_the_empty_ones() -> None:
    text = "a\n\n  b\nc\n"
    assert [text[a:b] for a, b in lines(text, 0, len(text))] == ["a", "b", "c"]

"""Each task holds what its published definition says, in haystacks of the length asked for."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import pytest

from tsdoc.errors import UsageError
from tsdoc.eval.haystack import Haystack
from tsdoc.eval.plan import Plan
from tsdoc.eval.tasks import TASKS, find_task
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import TextTokenizer

DOCUMENT = tuple(
    f"Paragraph {i}: it was a dark and stormy night, number {i}.\n\n" for i in range(90)
)


def make_plan(task: str, length: int = 6000, items: int = 4, **changes: object) -> Plan:
    plan = Plan(
        tasks=(find_task(task),),
        lengths=(length,),
        items=items,
        haystacks=1,
        seed=0,
        backgrounds=(),
        document=(),
    )
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def build(plan: Plan, tokenizer: TextTokenizer, template: ChatTemplate) -> Haystack:
    return plan.jobs()[0].build(tokenizer, template)


@pytest.mark.parametrize("task", TASKS)
def test_prompt_question_and_answer_together_have_the_length(
    task: str, tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan(task, 9000, 2), tokenizer, template)
    longest = max(
        ids.size + q.max_new_tokens
        for ids, q in zip(haystack.question_ids, haystack.questions, strict=True)
    )
    assert 8700 < haystack.ids.size + longest <= 9000


@pytest.mark.parametrize("task", TASKS)
def test_every_answer_stands_in_the_text(
    task: str, tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan(task), tokenizer, template)
    text = tokenizer.decode(haystack.ids)
    for question in haystack.questions:
        assert all(answer in text for answer in question.answers)


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_repeats_its_items_and_another_makes_others(
    task: str, tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    plan = make_plan(task)
    first, again = (build(plan, tokenizer, template) for _ in range(2))
    other = build(dataclasses.replace(plan, seed=1), tokenizer, template)
    assert first.questions == again.questions
    assert (first.ids == again.ids).all()
    assert first.questions != other.questions


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_3", "kv_retrieval", "passkey"])
def test_needles_lie_at_the_depths_that_their_questions_name(
    task: str, tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan(task), tokenizer, template)
    text = tokenizer.decode(haystack.ids)
    begin = len(tokenizer.decode(template.head_ids))
    for question in haystack.questions:
        at = (text.index(question.answers[0]) - begin) / (len(text) - begin)
        assert at == pytest.approx(question.depth, abs=0.06)


def facts(text: str) -> list[tuple[str, str, str]]:
    """Kind, key and value of every needle."""
    return re.findall(r"The ([a-z ]+ of the [a-z]+) (\S+) is ([0-9a-f-]+)\.", text)


def test_a_single_needle_is_the_only_one_of_its_kind(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    text = tokenizer.decode(build(make_plan("niah_single_2"), tokenizer, template).ids)
    assert sorted(Counter(kind for kind, _, _ in facts(text)).values()) == [1, 1, 1, 1]


def test_multikey_needles_have_three_look_alikes(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan("niah_multikey_1", items=6), tokenizer, template)
    found = facts(tokenizer.decode(haystack.ids))
    assert sorted(Counter(kind for kind, _, _ in found).values()) == [4, 4]
    assert len({key for _, key, _ in found}) == 8
    assert len({question.text for question in haystack.questions}) == 6


def test_multikey_2_and_3_are_needles_and_nothing_else(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    for task in ("niah_multikey_2", "niah_multikey_3"):
        haystack = build(make_plan(task), tokenizer, template)
        text = tokenizer.decode(haystack.ids)
        found = facts(text)
        assert len({kind for kind, _, _ in found}) == 1
        assert len({key for _, key, _ in found}) == len(found) > 30
        lines = text.split("asked for.\n\n")[1].strip().splitlines()
        assert len(lines) == len(found)


def test_multivalue_asks_for_four_values_of_one_key(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan("niah_multivalue", items=1), tokenizer, template)
    found = facts(tokenizer.decode(haystack.ids))
    assert len({(kind, key) for kind, key, _ in found}) == 1
    assert {value for _, _, value in found} == set(haystack.questions[0].answers)


def test_multiquery_asks_for_four_keys(tokenizer: TextTokenizer, template: ChatTemplate) -> None:
    haystack = build(make_plan("niah_multiquery", items=1), tokenizer, template)
    found = facts(tokenizer.decode(haystack.ids))
    assert all(key in haystack.questions[0].text for _, key, _ in found)
    assert {value for _, _, value in found} == set(haystack.questions[0].answers)


def test_variables_are_chained_in_the_order_of_the_text(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan("vt", items=2), tokenizer, template)
    assigned = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\n", tokenizer.decode(haystack.ids))
    assert len(assigned) == 10
    for question in haystack.questions:
        held = re.findall(r"value (\d+)", question.text)[:1]
        for name, source in assigned:
            if source in held:
                held.append(name)
        assert held[1:] == list(question.answers)


def test_common_words_stand_thirty_times_and_others_three_times(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan("cwe", 12_000), tokenizer, template)
    listed = tokenizer.decode(haystack.ids).split("than others.\n\n")[1].split()
    counts = Counter(listed)
    common = {word for word, count in counts.items() if count == 30}
    assert common == set(haystack.questions[0].answers)
    assert max(count for word, count in counts.items() if word not in common) == 3


def test_frequent_words_are_the_most_frequent_after_the_dots(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan("fwe"), tokenizer, template)
    counts = Counter(tokenizer.decode(haystack.ids).split("matters.\n\n")[1].split())
    assert [word for word, _ in counts.most_common(4)] == ["…", *haystack.questions[0].answers]


def test_math_find_is_right_about_its_numbers(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    haystack = build(make_plan("math_find", items=6), tokenizer, template)
    listed = tokenizer.decode(haystack.ids).split("A list of numbers: ")[1]
    numbers = sorted({int(part) for part in listed.rstrip(", ").split(", ")})
    right = {
        "largest": numbers[-1], "second largest": numbers[-2], "third largest": numbers[-3],
        "smallest": numbers[0], "second smallest": numbers[1], "third smallest": numbers[2],
    }  # fmt: skip
    for question in haystack.questions:
        (name,) = re.findall(r"the (\w+(?: \w+)?) number in", question.text)
        assert question.answers == (str(right[name]),)


def test_a_number_string_repeats_digits(tokenizer: TextTokenizer, template: ChatTemplate) -> None:
    plans = [make_plan("number_string", seed=seed) for seed in range(8)]
    strings = [build(plan, tokenizer, template).questions[0].answers[0] for plan in plans]
    assert all(len(string) == 10 and string.isdecimal() for string in strings)
    assert any(re.search(r"(.)\1", string) for string in strings)


def test_a_document_is_the_haystack(tokenizer: TextTokenizer, template: ChatTemplate) -> None:
    plan = make_plan("niah_single_2", 1800, 2, backgrounds=("document",), document=DOCUMENT)
    text = tokenizer.decode(build(plan, tokenizer, template).ids)
    assert text.count("stormy night") > 10
    assert "the miller" not in text


def test_backgrounds_take_turns(tokenizer: TextTokenizer, template: ChatTemplate) -> None:
    plan = make_plan(
        "niah_single_2", 1800, 3, backgrounds=("document", "noise"), document=DOCUMENT, haystacks=3
    )
    texts = [tokenizer.decode(job.build(tokenizer, template).ids) for job in plan.jobs()]
    assert ["stormy night" in text for text in texts] == [True, False, True]


def test_a_document_that_is_too_short_is_refused(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    plan = make_plan("niah_single_2", 90_000, 2, backgrounds=("document",), document=DOCUMENT)
    with pytest.raises(UsageError, match="fewer than a length of 90,000"):
        build(plan, tokenizer, template)


def test_a_length_that_cannot_hold_the_task_is_refused(
    tokenizer: TextTokenizer, template: ChatTemplate
) -> None:
    with pytest.raises(UsageError, match="does not hold"):
        build(make_plan("niah_multikey_1", 600, 40), tokenizer, template)


def test_questions_are_shared_among_as_few_haystacks_as_allowed() -> None:
    plan = make_plan("niah_multikey_1", items=11, haystacks=3)
    assert [job.num_questions for job in plan.jobs()] == [4, 4, 3]
    single = make_plan("passkey", items=11, haystacks=3)
    assert [job.num_questions for job in single.jobs()] == [1, 1, 1]


def test_an_unknown_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no task needle") as caught:
        find_task("needle")
    assert "niah_single_1" in str(caught.value)

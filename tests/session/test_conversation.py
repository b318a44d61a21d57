"""Conversations: turns behind one another, kept, taken up again, stopped, and their limits."""

from __future__ import annotations

import dataclasses
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from tests.session.conftest import TEXT, Recorder
from tsdoc.errors import ResourceError, StoreError, UsageError
from tsdoc.home import Home
from tsdoc.prompt.files import read_checked, write_checked
from tsdoc.session import Conversation, Session
from tsdoc.session.kept import (
    conversation_path,
    forget_conversation,
    list_conversations,
    load_conversation,
    save_conversation,
)

Start = Callable[..., Session]
FIRST, SECOND = "What does locker 7 hold?", "And the one after it?"
SHORT = "".join(TEXT.splitlines(keepends=True)[:40])
# A budget that covers all of it: then it makes no difference how K and V were computed.
FULL = {
    "selection": {"top_k": 3200},
    "engine": {"kv_dtype": "float32", "compute_dtype": "float32"},
}


def ignore(text: str) -> None:
    pass


def talk(session: Session, *questions: str, name: str | None = None) -> list[str]:
    with session, Conversation(session=session, name=name) as conversation:
        return [conversation.ask(question, ignore).text for question in questions]


def test_a_question_stands_behind_the_turns_before(start: Start) -> None:
    with start(**FULL) as session, Conversation(session=session) as conversation:
        first = conversation.ask(FIRST, ignore)
        before = conversation.num_tokens
        second = conversation.ask(SECOND, ignore)
        alone = session.ask(SECOND, ignore)
    assert before == first.prompt_tokens - len(session.prompt.ids) + first.generated_tokens
    turn = session.template.turn_ids(SECOND).size
    assert second.prompt_tokens == len(session.prompt.ids) + before + turn
    # All but the new question and perhaps the last token of the answer was in memory.
    assert second.prompt_tokens - second.reused_tokens in (turn, turn + 1)
    assert alone.prompt_tokens < second.prompt_tokens


def test_a_kept_conversation_goes_on_as_if_it_had_never_stopped(
    start: Start, document: Path
) -> None:
    document.write_text(SHORT, encoding="utf-8")
    whole = talk(start(**FULL), FIRST, SECOND, FIRST)
    assert talk(start(**FULL), FIRST, name="lockers") == whole[:1]
    with start(**FULL) as session, Conversation(session=session, name="lockers") as again:
        assert [turn.question for turn in again.turns] == [FIRST]
        assert again.num_pending == again.num_tokens > 0
        assert again.ask(SECOND, ignore).text == whole[1]
        assert again.num_pending <= 1
        assert again.ask(FIRST, ignore).text == whole[2]


def test_what_is_kept_is_private_and_holds_the_tokens_as_generated(
    start: Start, home: Home
) -> None:
    talk(start(), FIRST, SECOND, name="lockers")
    path = conversation_path(home, "lockers")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    kept = load_conversation(path)
    assert kept is not None
    assert [turn.question for turn in kept.turns] == [FIRST, SECOND]
    session = start()
    assert list(kept.turns[0].ids[:4]) == session.template.question_ids(FIRST)[:4].tolist()
    assert list(list_conversations(home)) == ["lockers"]
    forget_conversation(home, "lockers")
    assert list_conversations(home) == {}
    with pytest.raises(UsageError, match="no conversation"):
        forget_conversation(home, "lockers")


def test_evidence_is_kept_with_its_turn(start: Start, home: Home) -> None:
    with start() as session, Conversation(session=session, name="lockers") as conversation:
        answer = conversation.ask(FIRST, ignore, keep_queries=True)
        explained = conversation.find_evidence(answer, count=2)
        conversation.ask(SECOND, ignore)
    assert explained.evidence is not None
    assert len(explained.evidence.passages) == 2
    kept = load_conversation(conversation_path(home, "lockers"))
    assert kept is not None
    assert [turn.evidence for turn in kept.turns] == [explained.evidence, None]


def stopping(after: int) -> Callable[[str], None]:
    """Receives text until Ctrl-C comes."""
    count = 0

    def on_text(text: str) -> None:
        nonlocal count
        count += 1
        if count > after:
            raise KeyboardInterrupt

    return on_text


def test_ctrl_c_leaves_the_answer_as_it_is_and_the_conversation_goes_on(
    start: Start, home: Home, document: Path
) -> None:
    document.write_text(SHORT, encoding="utf-8")
    with start(**FULL) as session, Conversation(session=session, name="cut") as conversation:
        cut = conversation.ask(FIRST, stopping(after=3))
        kept = load_conversation(conversation_path(home, "cut"))
        second = conversation.ask(SECOND, ignore)
    assert (cut.finish_reason, cut.generated_tokens) == ("interrupted", 4)
    assert kept is not None
    assert [(turn.text, turn.finish_reason) for turn in kept.turns] == [(cut.text, "interrupted")]
    save_conversation(conversation_path(home, "cut"), kept)
    assert talk(start(**FULL), SECOND, name="cut") == [second.text]


class Scripted:
    """A sampler that takes the tokens it is told to, one answer after the other."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = iter(tokens)

    def __call__(self, logits: object) -> int:
        return next(self._tokens)


def test_an_answer_that_loops_ends_and_the_conversation_goes_on_without_the_loop(
    start: Start, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document.write_text(SHORT, encoding="utf-8")
    begin, again = list(range(40, 50)), list(range(60, 80))
    groups = {**FULL, "answer": {"max_new_tokens": 200}}
    with start(**groups) as session, Conversation(session=session, name="loop") as conversation:
        with monkeypatch.context() as patch:
            patch.setattr("tsdoc.engine.generate.Sampler", lambda _: Scripted(begin + again * 9))
            shown: list[str] = []
            looped = conversation.ask(FIRST, shown.append)
        kept = list(conversation.turns[0].ids)
        second = conversation.ask(SECOND, ignore)
    assert (looped.finish_reason, looped.generated_tokens) == ("loop", len(begin + again * 4))
    assert "".join(shown) == looped.text == session.tokenizer.decode(begin + again * 2)
    assert kept[-len(begin + again * 2) :] == begin + again * 2
    # K and V in memory are those of the tokens that are kept.
    assert talk(start(**groups), name="loop") == []
    path = conversation_path(session.home, "loop")
    talked = load_conversation(path)
    assert talked is not None
    save_conversation(path, dataclasses.replace(talked, turns=talked.turns[:1]))
    assert talk(start(**groups), SECOND, name="loop") == [second.text]


def test_a_loop_goes_on_where_it_may(
    start: Start, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document.write_text(SHORT, encoding="utf-8")
    tokens = list(range(60, 80)) * 5
    monkeypatch.setattr("tsdoc.engine.generate.Sampler", lambda _: Scripted(tokens))
    with start(answer={"max_new_tokens": 100, "stop_loops": False}) as session:
        answer = session.ask(FIRST, ignore)
        assert (answer.finish_reason, answer.text) == ("length", session.tokenizer.decode(tokens))


def test_what_was_held_back_is_shown_when_it_was_no_loop(
    start: Start, document: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document.write_text(SHORT, encoding="utf-8")
    tokens = [*(list(range(60, 80)) * 3), *range(60, 70), *range(90, 100)]
    monkeypatch.setattr("tsdoc.engine.generate.Sampler", lambda _: Scripted(tokens * 2))
    for max_new_tokens, reason in ((70, "length"), (80, "length")):
        with start(answer={"max_new_tokens": max_new_tokens}) as session:
            shown: list[str] = []
            answer = session.ask(FIRST, shown.append)
            expected = session.tokenizer.decode(tokens[:max_new_tokens])
        assert answer.finish_reason == reason
        assert "".join(shown) == answer.text == expected


def test_ctrl_c_before_the_answer_drops_the_question(start: Start) -> None:
    with start() as session, Conversation(session=session) as conversation:
        session.prepare()
        engine = session._engines.make(4000)
        run = type(engine.runner).run_chunks

        def stop(*args: object, **options: object) -> None:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(engine.runner), "run_chunks", stop)
            with pytest.raises(KeyboardInterrupt):
                conversation.ask(FIRST, ignore)
        assert type(engine.runner).run_chunks is run
        assert conversation.num_tokens == 0
        assert conversation.turns == []
        assert conversation.ask(FIRST, ignore).text


def test_the_limit_is_an_error_that_leaves_the_conversation_alone(start: Start) -> None:
    with start() as probe:
        room = len(probe.prompt.ids) + probe.template.question_ids(FIRST).size + 12
    with (
        start(prompt={"max_prompt_tokens": room}) as session,
        Conversation(session=session) as conversation,
    ):
        conversation.ask(FIRST, ignore)
        before = conversation.num_tokens
        with pytest.raises(ResourceError, match="this conversation") as error:
            conversation.ask(SECOND, ignore)
        assert "new conversation" in (error.value.hint or "")
        assert conversation.num_tokens == before


def test_a_changed_document_is_said_and_the_conversation_goes_on(
    start: Start, document: Path
) -> None:
    talk(start(), FIRST, name="lockers")
    document.write_text(TEXT + "Fact 120: the last locker is empty.\n", encoding="utf-8")
    reporter = Recorder()
    with start(reporter) as session, Conversation(session=session, name="lockers") as again:
        assert [code for code, _, _ in reporter.warnings] == ["document_changed"]
        assert again.ask(SECOND, ignore).text
    again_reporter = Recorder()
    talk(start(again_reporter), FIRST, name="lockers")
    assert again_reporter.warnings == []


def test_another_document_is_refused(start: Start, tmp_path: Path) -> None:
    talk(start(), FIRST, name="lockers")
    other = tmp_path / "other.txt"
    other.write_text("Nothing about lockers.\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"about facts\.txt, not about other\.txt"):
        talk(start(sources=[str(other)]), FIRST, name="lockers")


def test_a_conversation_is_open_once(start: Start) -> None:
    with (
        start() as session,
        Conversation(session=session, name="lockers"),
        pytest.raises(StoreError, match="open in another tsdoc"),
        Conversation(session=session, name="lockers"),
    ):
        pass
    with start() as session, Conversation(session=session, name="lockers"):
        pass


def test_an_open_conversation_is_not_forgotten(start: Start, home: Home) -> None:
    with start() as session, Conversation(session=session, name="lockers") as conversation:
        for turns in range(2):
            with pytest.raises(StoreError, match="'lockers' is open in another tsdoc") as error:
                forget_conversation(home, "lockers")
            assert (error.value.exit_code, error.value.hint) == (5, "End that chat first.")
            assert len(list_conversations(home)) == turns
            conversation.ask(FIRST, ignore)
        with (
            pytest.raises(StoreError, match="open in another tsdoc"),
            Conversation(session=session, name="lockers"),
        ):
            pass
    forget_conversation(home, "lockers")
    assert list(home.conversations.iterdir()) == []
    with pytest.raises(UsageError, match="no conversation"):
        forget_conversation(home, "lockers")
    assert list(home.conversations.iterdir()) == []


def test_a_damaged_file_is_named_and_can_be_forgotten(start: Start, home: Home) -> None:
    talk(start(), FIRST, name="lockers")
    path = conversation_path(home, "lockers")
    path.write_bytes(path.read_bytes().replace(b"locker", b"looker"))
    assert list_conversations(home) == {"lockers": None}
    with pytest.raises(StoreError, match="damaged") as error:
        talk(start(), FIRST, name="lockers")
    assert "--forget lockers" in (error.value.hint or "")
    forget_conversation(home, "lockers")
    assert talk(start(), FIRST, name="lockers")


@pytest.mark.parametrize("where", ["turns", "evidence", "passages"])
def test_what_another_version_kept_is_named_whatever_it_holds(
    start: Start, home: Home, where: str
) -> None:
    talk(start(), FIRST, name="lockers")
    path = conversation_path(home, "lockers")
    value = read_checked(path)
    assert value is not None
    turn = value["turns"][0]
    if where == "turns":
        turn["mood"] = "cheerful"
    else:
        turn["evidence"] = {"passages": [{}] if where == "passages" else 3}
    write_checked(path, value)
    assert list_conversations(home) == {"lockers": None}
    with pytest.raises(StoreError, match="kept by another tsdoc") as error:
        load_conversation(path)
    assert "--forget lockers" in (error.value.hint or "")


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "x" * 65, "a b", "-x"])
def test_names_that_are_no_file_names_are_refused(home: Home, name: str) -> None:
    with pytest.raises(UsageError, match="no name for a conversation"):
        conversation_path(home, name)


def test_what_a_later_turn_reads_again_stands_inside_the_turn(start: Start) -> None:
    with start(engine={"reread_tokens": 128}) as session:
        with Conversation(session=session) as conversation:
            conversation.ask(FIRST, ignore)
            before = conversation.num_tokens
            second = conversation.ask(SECOND, ignore)
            ids = conversation._tail.ids[before:]
        turn = session.template.turn_ids(SECOND).tolist()
        lead = session.template.turn_lead
    assert second.reread_tokens > 64
    assert ids[:lead] == turn[:lead]
    assert ids[lead + second.reread_tokens :][: len(turn) - lead] == turn[lead:]
    assert len(ids) == len(turn) + second.reread_tokens + second.generated_tokens


def test_reading_again_leaves_earlier_turns_as_they_were(start: Start, document: Path) -> None:
    document.write_text(TEXT[:2500], encoding="utf-8")
    with start() as session:
        num_tokens = len(session.prompt.ids)
        budget = session.settings.selection
    # The prompt fits the budget, the prompt with a turn does not.
    top_k = num_tokens - budget.n_init - budget.n_local + 10
    engine = {"reread_tokens": 128, "kv_dtype": "float32"}
    with (
        start(selection={"top_k": top_k}, engine=engine) as session,
        Conversation(session=session) as conversation,
    ):
        conversation.ask(FIRST, ignore)
        turn = conversation._tail.pieces[0]
        before = turn.keys(1).copy()
        assert conversation.ask(SECOND, ignore).reread_tokens > 0
        assert (turn.keys(1) == before).all()


def test_a_conversation_taken_up_again_reads_again_what_it_would_have(start: Start) -> None:
    engine = {"reread_tokens": 128, "kv_dtype": "float32", "compute_dtype": "float32"}
    with start(engine=engine) as session:
        with Conversation(session=session, name="whole") as whole:
            whole.ask(FIRST, ignore)
            before = whole.num_tokens
            whole.ask(SECOND, ignore)
            expected = whole._tail.ids[before:]
        with Conversation(session=session, name="cut") as cut:
            cut.ask(FIRST, ignore)
    with start(engine=engine) as session, Conversation(session=session, name="cut") as again:
        asked = again.ask(SECOND, ignore)
        found = again._tail.ids[before:]
    assert asked.reread_tokens > 0
    lead = session.template.turn_lead
    assert found[: lead + asked.reread_tokens] == expected[: lead + asked.reread_tokens]

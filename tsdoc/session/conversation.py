"""A conversation about one document: every question is answered in sight of those before."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType

from tsdoc.errors import UsageError
from tsdoc.home import private_dir, write_error
from tsdoc.session.kept import (
    NOT_KEPT,
    KeptConversation,
    Turn,
    conversation_path,
    digest_of,
    load_conversation,
    lock_conversation,
    save_conversation,
)
from tsdoc.session.results import Answer
from tsdoc.session.session import Session
from tsdoc.session.tail import Tail
from tsdoc.store.locks import Lock


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A context manager: takes up the conversation kept under `name`, and lets go of it at the end.

    Entering it raises:
        UsageError: `name` cannot be given, or its conversation is about another document or was
            held with a model of another vocabulary.
        StoreError: it is open elsewhere, or damaged.

    Attributes:
        session: The document and the model.
        name: Under which it is kept after every turn; None keeps nothing.
        turns: All turns, those of earlier processes first.
    """

    session: Session
    name: str | None = None
    turns: list[Turn] = field(default_factory=list)
    _tail: Tail = field(default_factory=Tail, init=False)
    _path: Path | None = field(default=None, init=False)
    _lock: Lock | None = field(default=None, init=False)

    def __enter__(self) -> Conversation:
        if self.name is not None:
            self._resume(self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._lock is not None:
            self._lock.release()

    @property
    def num_tokens(self) -> int:
        """Tokens of all turns."""
        return len(self._tail.ids)

    @property
    def num_pending(self) -> int:
        """Of these, the ones that go through the model again with the next question."""
        return len(self._tail.ids) - self._tail.num_cached

    def ask(
        self, question: str, on_text: Callable[[str], None], *, keep_queries: bool = False
    ) -> Answer:
        """Answers the next question and keeps the turn; see `Session.ask`.

        Ctrl-C ends an answer that has begun, as it is: its finish_reason is "interrupted". Before
        that, the question is dropped and KeyboardInterrupt raised.

        Raises:
            ResourceError: the conversation is as long as max_prompt_tokens allows.
            StoreError: the turn cannot be kept; it was answered all the same.
        """
        before = len(self._tail.ids)
        answer = self.session.ask(question, on_text, tail=self._tail, keep_queries=keep_queries)
        self.turns.append(
            Turn(
                question=question,
                text=answer.text,
                finish_reason=answer.finish_reason,
                ids=tuple(self._tail.ids[before:]),
            )
        )
        self._save()
        return answer

    def find_evidence(self, answer: Answer, *, count: int) -> Answer:
        """Finds passages for the last answer and keeps them with it; see `Session.find_evidence`.

        Raises:
            StoreError: they cannot be kept.
        """
        answer = self.session.find_evidence(answer, count=count)
        self.turns[-1] = replace(self.turns[-1], evidence=answer.evidence)
        self._save()
        return answer

    def _save(self) -> None:
        if self._path is None:
            return
        session = self.session
        kept = KeptConversation(
            document=session.document.name,
            files=tuple(file.name for file in session.document.files),
            prompt=digest_of(session.prompt.ids),
            turn_format=session.template.turn_format,
            model=session.model.name,
            turns=tuple(self.turns),
            saved_at=time.time(),
        )
        save_conversation(self._path, kept)

    def _resume(self, name: str) -> None:
        home = self.session.home
        self._path = conversation_path(home, name)
        private_dir(home.conversations, hint=NOT_KEPT)
        try:
            self._lock = lock_conversation(self._path, hint="Give another --name.")
        except OSError as error:
            raise write_error(
                error, self._path, "keeping the conversation", hint=NOT_KEPT
            ) from error
        with contextlib.ExitStack() as failing:
            failing.callback(self._lock.release)
            kept = load_conversation(self._path)
            if kept is not None:
                self._check(kept, name)
            failing.pop_all()
        if kept is None:
            return
        self.turns = list(kept.turns)
        self._tail = Tail(ids=[token for turn in kept.turns for token in turn.ids])

    def _check(self, kept: KeptConversation, name: str) -> None:
        """Refuses what the turns do not fit, and says when their document has changed."""
        session = self.session
        files = {file.name for file in session.document.files}
        if files.isdisjoint(kept.files):
            raise UsageError(
                f"the conversation {name!r} is about {kept.document}, not about "
                f"{session.document.name}",
                hint="Give another --name.",
            )
        if kept.turn_format != session.template.turn_format:
            raise UsageError(
                f"the conversation {name!r} was held with {kept.model}, whose tokens mean nothing "
                f"to {session.model.name}",
                hint="Choose that model with --model or --profile, or give another --name.",
            )
        if kept.prompt != digest_of(session.prompt.ids):
            session.reporter.warn(
                "document_changed",
                kept.document,
                f"has changed since the conversation {name!r}, or another part of it is read: "
                "earlier answers are about the old text, the next ones about the new",
            )

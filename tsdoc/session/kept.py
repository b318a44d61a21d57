"""Conversations on disk: one checked file each, private to the user, written after every turn."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import StoreError, UsageError
from tsdoc.evidence.results import Evidence, evidence_from_json
from tsdoc.home import Home, private_dir, write_error
from tsdoc.prompt.files import read_checked, write_checked
from tsdoc.prompt.tokenizer import Ids
from tsdoc.store.locks import Lock, try_exclusive

VERSION = 1
NOT_KEPT = "Leave out --name, or point TSDOC_HOME to a directory you can write."
_NAME = re.compile(r"\w[\w.-]{0,63}")
_SUFFIX = ".json"
_LOCK_SUFFIX = ".lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and its answer.

    Attributes:
        text: The answer.
        finish_reason: "stop", "length", "loop" or "interrupted".
        ids: The turn's tokens as they stand behind those of the turns before.
        evidence: What the model looked at; None where it was not looked for.
    """

    question: str
    text: str
    finish_reason: str
    ids: tuple[int, ...]
    evidence: Evidence | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptConversation:
    """What is kept of a conversation.

    Attributes:
        document: Name of the document.
        files: Names of its files.
        prompt: Digest of the document's prompt.
        turn_format: Digest of what decides the turns' ids.
        model: Name of the model.
        turns: All turns so far.
        saved_at: Seconds since the epoch.
    """

    document: str
    files: tuple[str, ...]
    prompt: str
    turn_format: str
    model: str
    turns: tuple[Turn, ...]
    saved_at: float


def digest_of(ids: Ids) -> str:
    """Returns the digest under which a prompt is recognised."""
    return hashlib.sha256(ids.tobytes()).hexdigest()


def conversation_path(home: Home, name: str) -> Path:
    """Returns where the conversation `name` is kept.

    Raises:
        UsageError: no such name can be given.
    """
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"{name!r} is no name for a conversation",
            hint="Use up to 64 letters, digits, dots, dashes and underscores.",
        )
    return home.conversations / f"{name}{_SUFFIX}"


def lock_conversation(path: Path, *, hint: str) -> Lock:
    """Takes the conversation at `path` for this process alone.

    Args:
        path: Of its file; the directory has to be there.
        hint: What to do where somebody else has it.

    Raises:
        StoreError: it is open in another process.
        OSError: the lock cannot be made.
    """
    lock = try_exclusive(path.with_suffix(_LOCK_SUFFIX))
    if lock is None:
        raise StoreError(f"the conversation {path.stem!r} is open in another tsdoc", hint=hint)
    return lock


def save_conversation(path: Path, kept: KeptConversation) -> None:
    """Writes a conversation anew, atomically.

    Raises:
        StoreError: it cannot be written.
        ResourceError: the disk is full.
    """
    private_dir(path.parent, hint=NOT_KEPT)
    write_checked(path, {"version": VERSION, **asdict(kept)})


def load_conversation(path: Path) -> KeptConversation | None:
    """Returns the conversation at `path`, None where there is none.

    Raises:
        StoreError: it is damaged, a link, not the user's own, or of another version.
    """
    if not path.exists() and not path.is_symlink():
        return None
    value = read_checked(path)
    if value is None:
        raise _unusable(path, "is damaged or not yours")
    if value.get("version") != VERSION:
        raise _unusable(path, "was kept by another tsdoc")
    try:
        return _from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise _unusable(path, "was kept by another tsdoc") from error


def _unusable(path: Path, what: str) -> StoreError:
    return StoreError(
        f"the conversation {what}",
        where=str(path),
        hint=f"Give another --name, or remove it with `tsdoc chat --forget {path.stem}`.",
    )


def list_conversations(home: Home) -> dict[str, KeptConversation | None]:
    """Returns all conversations by name, the last used first; None for one that is damaged."""
    found: dict[str, KeptConversation | None] = {}
    for path in _files(home):
        try:
            found[path.stem] = load_conversation(path)
        except StoreError:
            found[path.stem] = None
    order = sorted(found.items(), key=lambda item: -(item[1].saved_at if item[1] else 0.0))
    return dict(order)


def forget_conversation(home: Home, name: str) -> None:
    """Removes a conversation.

    Raises:
        UsageError: there is none of this name.
        StoreError: it is open in another process, or cannot be removed.
    """
    path = conversation_path(home, name)
    try:
        with lock_conversation(path, hint="End that chat first."):
            try:
                path.unlink()
            finally:
                path.with_suffix(_LOCK_SUFFIX).unlink()
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no conversation {name!r}", hint="`tsdoc chat --list` shows them."
        ) from error
    except OSError as error:
        raise write_error(error, path, "removing the conversation") from error


def _files(home: Home) -> Iterable[Path]:
    if not home.conversations.is_dir():
        return []
    return [p for p in home.conversations.glob(f"*{_SUFFIX}") if not p.name.startswith(".")]


def _from_json(value: Mapping[str, Any]) -> KeptConversation:
    turns = tuple(_turn_from_json(turn) for turn in value["turns"])
    fields = {key: value[key] for key in KeptConversation.__slots__ if key in value}
    return KeptConversation(**{**fields, "files": tuple(value["files"]), "turns": turns})


def _turn_from_json(value: Mapping[str, Any]) -> Turn:
    evidence = value.get("evidence")
    found = None if evidence is None else evidence_from_json(evidence)
    return Turn(**{**value, "ids": tuple(value["ids"]), "evidence": found})

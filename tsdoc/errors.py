"""Every error tsdoc raises on purpose, and the exit code of each.

TsdocError
├── UsageError          2   the command line or a profile is wrong
├── InputError          3   a source cannot be read
├── ModelError          4   a model cannot be had, read or run
├── StoreError          5   the KV store is damaged, locked or not ours
│   ├── CorruptPageError    a KV page does not match its checksum
│   ├── DamagedStoreError   another file of the store is missing or not what was written
│   └── StoreFormatError    written by a newer or older tsdoc
├── ResourceError       6   memory, disk or the length limit
├── RankError           6   one of the processes that compute together has ended
├── PartialInputError   7   part of the input failed and --strict was given
└── InterruptedRunError 130 Ctrl-C

A message says what went wrong, where, why, and what to do next. Exceptions of other libraries are
mapped to this tree once, at the edge where they are raised (`raise … from …`).
"""

from __future__ import annotations


class TsdocError(Exception):
    """Base of all errors meant for the user.

    Args:
        message: What went wrong and why, one sentence without a final full stop.
        where: The path, page, line or key it concerns.
        hint: What the user can do next.
    """

    exit_code = 1
    code = "internal"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        end = "" if text.endswith("?") else "."
        return f"{text}{end} {self.hint}" if self.hint else text


class UsageError(TsdocError):
    """The command line, a setting or a profile is wrong."""

    exit_code = 2
    code = "usage"


class InputError(TsdocError):
    """A source is missing, unreadable or holds nothing to read."""

    exit_code = 3
    code = "input"


class ModelError(TsdocError):
    """A model cannot be had, is damaged, or is of a kind tsdoc does not run."""

    exit_code = 4
    code = "model"


class StoreError(TsdocError):
    """The KV store is damaged, locked, or does not belong to this user."""

    exit_code = 5
    code = "store"


class DamagedStoreError(StoreError):
    """A file of the store is missing, unreadable, or not what was written."""

    code = "damaged_store"


class StoreFormatError(StoreError):
    """A file of the store has the format `version` of another tsdoc."""

    code = "store_format"

    def __init__(self, message: str, *, where: str, version: int) -> None:
        super().__init__(message, where=where)
        self.version = version


class ResourceError(TsdocError):
    """Memory, disk or the prompt length limit does not suffice."""

    exit_code = 6
    code = "resources"


class DiskFullError(ResourceError):
    """The disk, or the store's budget, has no room for what is to be kept; memory may have."""


class RankError(TsdocError):
    """One of the processes that compute an answer together has ended or cannot be reached."""

    exit_code = 6
    code = "rank"


class PartialInputError(TsdocError):
    """Part of the input could not be read, and `--strict` asks to stop on that."""

    exit_code = 7
    code = "partial_input"


class InterruptedRunError(TsdocError):
    """The user stopped the command; what can be resumed was kept."""

    exit_code = 130
    code = "interrupted"


class CorruptPageError(StoreError):
    """KV pages do not match their checksums; `start` and `end` bound the tokens to recompute."""

    code = "corrupt_page"

    def __init__(self, message: str, *, where: str, start: int, end: int) -> None:
        super().__init__(
            message, where=where, hint=f"Tokens {start:,} to {end:,} have to be computed again."
        )
        self.start = start
        self.end = end


def reason_of(error: Exception) -> str:
    """Returns why reading data failed, for a message: "hidden_size is missing" for a KeyError.

    What names the file already needs no more of an OSError than what is wrong with it.
    """
    if isinstance(error, KeyError):
        return f"{error.args[0]} is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__

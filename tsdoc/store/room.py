"""Room for a new entry: within the store's budget, and on its disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tsdoc.errors import DiskFullError
from tsdoc.home import free_bytes
from tsdoc.store.eviction import choose, delete_all, tidy, trim_all, warn_of_loose
from tsdoc.store.files import no_room
from tsdoc.store.root import StoreRoot
from tsdoc.store.survey import survey
from tsdoc.store.uses import EntryUse, User
from tsdoc.terminal import format_bytes

DEFAULT_BYTES = 50_000_000_000
DEFAULT_RATIO = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the store may hold.

    Attributes:
        path: The store's directory.
        max_bytes: What the user allows: no entry is kept that takes more by itself. None is
            min(50 GB, 20 % of what the disk has free or the store holds), which an entry may exceed
            while it is the only one.
    """

    path: Path
    max_bytes: int | None

    def num_bytes(self, held_bytes: int) -> int:
        """Bytes that the store may hold, from those it holds."""
        if self.max_bytes is not None:
            return self.max_bytes
        room = free_bytes(self.path) + held_bytes
        return min(DEFAULT_BYTES, int(DEFAULT_RATIO * room))


def make_room(root: StoreRoot, budget: Budget, user: User, name: str, new_bytes: int) -> None:
    """Evicts what the budget demands before an entry gets a new segment; nothing if in vain.

    Call it under `StoreRoot.changing`.

    Args:
        root: The store.
        budget: What it may hold.
        user: The entry, whose manifest is written and whose locks the caller holds.
        name: The entry's, for messages.
        new_bytes: What its new segment will take.

    Raises:
        DiskFullError: the entry alone is beyond what the user allows, or beyond the disk.
    """
    state = survey(root.key_dirs())
    trim_all(state.segments, mine={user})  # room without any loss
    held = [s for e in state.entries if e.user == user for s in e.segments]
    entry_bytes = new_bytes + sum(s.bytes_up_to(s.users[user]) for s in held)
    limit = budget.num_bytes(state.num_bytes)
    is_beyond = entry_bytes > limit
    if is_beyond and budget.max_bytes is not None:
        raise DiskFullError(
            f"{name} needs {format_bytes(entry_bytes)} of the store, and store.max_bytes allows "
            f"{format_bytes(limit)}",
            where=str(root.path),
            hint="Raise store.max_bytes, with --set or in the settings.",
        )
    chosen, left = choose(state, limit - new_bytes, keep={user[1]}, mine={user})
    free = free_bytes(root.path)
    if free + state.num_bytes - left < new_bytes:
        raise no_room(root.path, new_bytes, free)
    if is_beyond:
        message = (
            f"{name} needs {format_bytes(entry_bytes)}, more than the {format_bytes(limit)} that "
            "are kept by default: the next document that needs room evicts it; "
            "store.max_bytes raises that"
        )
        root.warn("beyond_budget", str(root.path), message)
    touched = {root.path / user[0]}

    def on_delete(entry: EntryUse) -> None:
        touched.add(entry.directory.parent.parent)
        if entry.manifest is not None and entry.status != "stale":  # a loss
            message = f"{entry.manifest.name} was evicted to keep the store within its budget"
            root.warn("evicted", str(entry.directory), message)

    delete_all(chosen, on_delete, mine={user})
    for directory in touched:
        tidy(directory, mine={user})
    if chosen:
        warn_of_loose(survey(touched).segments, root.warn)

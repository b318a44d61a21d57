"""Opening what is kept for reading: a finished entry, or the token ids of a damaged one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tsdoc.errors import DamagedStoreError, StoreFormatError
from tsdoc.store.entry import Entry
from tsdoc.store.files import named_dirs, store_error
from tsdoc.store.key import Ids
from tsdoc.store.locks import Lock, lock_shared
from tsdoc.store.lookup import Lookup
from tsdoc.store.pages import Segment
from tsdoc.store.root import StoreRoot
from tsdoc.store.tokens import peek_tokens, read_all_ids


def open_entry(root: StoreRoot, path: Path, ids: Ids | None, *, is_use: bool) -> Entry | None:
    """Opens a finished entry, protected from eviction; None where it cannot be used.

    Args:
        root: Told of what is damaged.
        path: The entry's directory.
        ids: What it has to hold; None is whatever it holds.
        is_use: Eviction counts from now on.

    Raises:
        StoreError: it cannot be locked.
    """
    lock = _protect(path)
    if is_use:
        with contextlib.suppress(OSError):  # a read-only store
            os.utime(path / "use.lock", follow_symlinks=False)
    try:
        lookup = Lookup(root, path.parent.parent)
        manifest = lookup.manifest(path.name)
        if manifest is None or not manifest.complete:
            return None
        held = lookup.ids(manifest.parts[-1].segment_id)
        if ids is None and held is not None:
            ids = held[: manifest.num_tokens]
        files = lookup.usable(manifest, ids) if ids is not None else []
        if files and ids is not None:
            segments = [Segment(f, writable=False) for f in files]
            kept, lock = lock, None
            return Entry(directory=path, manifest=manifest, ids=ids, segments=segments, lock=kept)
        root.warn(
            "damaged_store",
            str(path),
            "cannot be used as it is; what is damaged of it is computed again when needed",
        )
    except (DamagedStoreError, StoreFormatError) as error:
        root.report(error)
    finally:
        if lock is not None:
            lock.release()
    return None


def find_ids(root: StoreRoot, directory: Path, entry_id: str) -> Ids | None:
    """Returns the token ids of an entry of the model key at `directory`; None if they are lost."""
    for segment in named_dirs(directory / "segments"):
        with contextlib.suppress(DamagedStoreError):
            peek = peek_tokens(segment)
            if peek.entry_id == entry_id:
                return read_all_ids(peek)
    lookup = Lookup(root, directory)
    with contextlib.suppress(StoreFormatError):
        manifest = lookup.manifest(entry_id)
        ids = lookup.ids(manifest.parts[-1].segment_id) if manifest is not None else None
        if manifest is not None and ids is not None:
            return ids[: manifest.num_tokens]
    return None


def _protect(path: Path) -> Lock | None:
    try:
        return lock_shared(path / "use.lock", create=(path / "manifest.json").exists())
    except OSError as error:
        raise store_error(error, path, "locking the entry") from error

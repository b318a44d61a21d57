"""The KV store: finds, opens, writes, repairs and bounds the KV pages of prompts."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from tsdoc.errors import CorruptPageError, StoreError, StoreFormatError
from tsdoc.store.begin import Beginning, OnWait
from tsdoc.store.entry import Entry
from tsdoc.store.eviction import choose, delete, delete_all, tidy, trim_all, warn_of_loose
from tsdoc.store.key import PAGE_SIZE, Ids, KVShape, ModelKey, as_ids
from tsdoc.store.listing import EntryInfo, describe, read_model
from tsdoc.store.lookup import Lookup, make_prompt
from tsdoc.store.opening import find_ids, open_entry
from tsdoc.store.repair import Holder, Repair
from tsdoc.store.room import Budget
from tsdoc.store.root import StoreRoot, Warn
from tsdoc.store.survey import survey
from tsdoc.store.uses import EntryUse
from tsdoc.store.writer import Writer

_META_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """What the store has of a prompt.

    Attributes:
        reused_tokens: Leading tokens that need not be computed.
        complete: All of them, as a finished entry.
        entry_id: The entry that the prompt has or would get.
    """

    reused_tokens: int
    complete: bool
    entry_id: str


class Store:
    """KV pages on disk under one directory, private to the user.

    Args:
        root: `Home.store`; it is created when something is first written.
        max_bytes: See `Budget`.
        on_warning: Receives (code, where, message) for files that are passed over because they
            are damaged or of another format, and for evictions.
    """

    def __init__(
        self, root: Path, *, max_bytes: int | None = None, on_warning: Warn | None = None
    ) -> None:
        self._root = StoreRoot(root, _ignore if on_warning is None else on_warning)
        self._budget = Budget(path=root, max_bytes=max_bytes)

    def find(self, key: ModelKey, ids: npt.ArrayLike) -> Match:
        """Tells how much of a prompt can be reused, without opening or changing anything.

        Raises:
            StoreError: the store is not ours to read.
        """
        prompt = make_prompt(key, as_ids(ids))
        nothing = Match(reused_tokens=0, complete=False, entry_id=prompt.entry_id)
        if not self._root.exists():
            return nothing
        try:
            plan = Lookup(self._root, self._root.key_dir(key)).plan(prompt)
        except StoreFormatError as error:
            self._root.report(error)
            return nothing
        return Match(reused_tokens=plan.reused, complete=plan.complete, entry_id=prompt.entry_id)

    def begin(
        self,
        key: ModelKey,
        shape: KVShape,
        ids: npt.ArrayLike,
        *,
        prefill_block: int,
        name: str,
        meta: Mapping[str, Any] | None = None,
        on_wait: OnWait | None = None,
    ) -> Writer:
        """Starts or resumes the prefill of a prompt behind the longest reusable prefix.

        One process writes an entry at a time; others wait and find it finished. Space for all
        tokens is reserved before this returns, and older entries are evicted for the budget.

        Args:
            key: The model key.
            shape: K and V per token; `kv_dtype` as in the key.
            ids: The prompt's token ids.
            prefill_block: Tokens per committed block, a multiple of chunk_size and page size.
            name: Shown by `cache list`.
            meta: JSON values to keep with the entry, such as `sources`.
            on_wait: Called about once a second while another process computes this prompt.

        Raises:
            DiskFullError: the disk or the budget has no room; the message has the numbers.
            StoreFormatError: a newer tsdoc wrote this entry; it is left alone.
            StoreError: the store cannot be written (read-only, foreign, without locks).
        """
        if prefill_block <= 0 or prefill_block % math.lcm(PAGE_SIZE, key.chunk_size):
            raise ValueError(
                f"prefill_block {prefill_block} is no multiple of {PAGE_SIZE} and {key.chunk_size}"
            )
        if shape.kv_dtype != key.kv_dtype:
            raise ValueError(f"kv_dtype {shape.kv_dtype} is not the model key's {key.kv_dtype}")
        if len(json.dumps(dict(meta or {}))) > _META_LIMIT:
            raise ValueError(f"meta is larger than {_META_LIMIT} bytes")
        beginning = Beginning(
            root=self._root,
            prompt=make_prompt(key, as_ids(ids)),
            shape=shape,
            prefill_block=prefill_block,
            name=name,
            meta=dict(meta or {}),
            budget=self._budget,
            on_wait=on_wait,
        )
        return beginning.run()

    def open(self, key: ModelKey, ids: npt.ArrayLike) -> Entry | None:
        """Opens the finished entry of exactly these ids; None where there is none (usable).

        Sizes, manifest, token ids and journal are checked now, KV pages when they are used.

        Raises:
            StoreError: the store is not ours to read.
        """
        prompt = make_prompt(key, as_ids(ids))
        directory = self._root.key_dir(key)
        if not self._root.exists() or not (directory / "entries" / prompt.entry_id).exists():
            return None
        path = directory / "entries" / prompt.entry_id
        return open_entry(self._root, path, prompt.ids, is_use=True)

    def load(self, entry_id: str) -> Entry:
        """Opens a finished entry by its id, under whatever model key; that is no use of it.

        Raises:
            StoreError: there is none, or it cannot be used.
        """
        for directory in self._root.key_dirs():
            if not (directory / "entries" / entry_id).exists():
                continue
            path = directory / "entries" / entry_id
            entry = open_entry(self._root, path, None, is_use=False)
            if entry is not None:
                return entry
        raise StoreError(f"there is no finished entry {entry_id}", where=str(self._root.path))

    def token_ids(self, entry_id: str) -> Ids | None:
        """Returns the token ids of an entry, whatever else of it is damaged; None if they are lost.

        That they are is no warning: who asks knows that something is damaged.

        Raises:
            StoreError: the store is not ours to read.
        """
        root = replace(self._root, warn=_ignore)
        found = (find_ids(root, place, entry_id) for place in self._root.key_dirs())
        return next((ids for ids in found if ids is not None), None)

    def repair(self, holder: Holder, start: int, end: int) -> Repair:
        """Starts to recompute the block [start, end) that a `CorruptPageError` named.

        Args:
            holder: The open entry, or the writer, whose piece raised it.
            start: The error's `start`.
            end: The error's `end`.

        Raises:
            ValueError: that is no range within one segment of the entry.
            StoreError: the store cannot be written.
        """
        return Repair(holder, start, end)

    def verify(
        self, entry: Entry, on_progress: Callable[[int, int], None] | None = None
    ) -> list[CorruptPageError]:
        """Reads every page of an entry, whether or not it was checked before.

        Args:
            entry: An open entry.
            on_progress: Receives (pages done, pages in all).

        Returns:
            One error per damaged block; `Store.repair` takes its `start` and `end`.
        """
        found: dict[tuple[str, int, int], CorruptPageError] = {}
        total = sum(segment.verified.size for segment in entry.segments)
        done = 0
        for segment in entry.segments:
            for error in segment.verify():
                if error is not None:
                    found.setdefault((error.where or "", error.start, error.end), error)
                    continue
                done += segment.num_pages
                if on_progress is not None:
                    on_progress(done, total)
        return list(found.values())

    def num_bytes(self) -> int:
        """Bytes that the store holds, shared segments counted once."""
        return survey(self._root.key_dirs()).num_bytes

    def shared_bytes(self) -> int:
        """Of these, the bytes that several entries share, each counted once."""
        return survey(self._root.key_dirs()).shared_bytes

    def budget(self) -> int:
        """Bytes that the store may hold."""
        return self._budget.num_bytes(self.num_bytes())

    def remove(self, entry_ids: Sequence[str]) -> int:
        """Deletes entries and what only they use; returns the bytes freed.

        Raises:
            StoreError: an entry does not exist, is in use, or is of a newer format.
        """
        freed = 0
        with self._changing():
            for entry_id in entry_ids:
                state = survey(self._root.key_dirs())
                entries = [e for e in state.entries if e.entry_id == entry_id]
                if not entries:
                    raise StoreError(f"there is no entry {entry_id}", where=str(self._root.path))
                freed += sum(delete(entry) for entry in entries)
        return freed

    def prune(
        self, max_bytes: int | None = None, keep: Collection[str] = ()
    ) -> tuple[list[EntryInfo], int]:
        """Deletes what was used longest ago until the store holds at most `max_bytes`.

        Things of no use go first: an older tsdoc's, damaged ones, segments without an entry.
        Entries in `keep`, in use, or of a newer tsdoc stay.

        Args:
            max_bytes: None is the budget.
            keep: Ids of entries to keep.

        Returns:
            What was deleted, and the bytes that were freed.
        """
        if not self._root.exists():
            return [], 0
        gone: list[EntryInfo] = []

        def note(entry: EntryUse) -> None:
            gone.append(described[id(entry)])

        with self._changing():
            state = survey(self._root.key_dirs())
            freed = trim_all(state.segments)  # room without any loss
            described = {id(e): describe(e, {}) for e in state.entries}
            target = self._budget.num_bytes(state.num_bytes) if max_bytes is None else max_bytes
            chosen, _ = choose(state, target, keep=keep)
            freed += delete_all(chosen, note)
        return gone, freed

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._root.changing():
            yield
            for directory in self._root.key_dirs():
                tidy(directory)
            warn_of_loose(survey(self._root.key_dirs()).segments, self._root.warn)

    def list(self) -> list[EntryInfo]:
        """Returns what is in the store, last used first."""
        if not self._root.exists():
            return []
        found: list[EntryInfo] = []
        for directory in self._root.key_dirs():
            model = read_model(directory)
            found += [describe(entry, model) for entry in survey([directory]).entries]
        return sorted(found, key=lambda e: (-e.last_used, e.entry_id))


def _ignore(code: str, where: str, message: str) -> None:
    """Takes warnings that nobody asked for."""

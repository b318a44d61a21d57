"""Beginning a prefill: one writer per prompt, reuse decided, space reserved, manifest published."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tsdoc.errors import StoreError
from tsdoc.home import private_dir
from tsdoc.store.entry import Entry
from tsdoc.store.eviction import delete, tidy
from tsdoc.store.files import delete_dir, fsync_dir, own_dir, store_error, write_json
from tsdoc.store.journal import least_bytes
from tsdoc.store.key import KVShape
from tsdoc.store.locks import Lock, lock_exclusive, lock_shared
from tsdoc.store.lookup import Lookup, Plan, Prompt
from tsdoc.store.manifest import ENTRY_FILES, Manifest, Part
from tsdoc.store.owned import OwnSegment
from tsdoc.store.pages import Segment
from tsdoc.store.room import Budget, make_room
from tsdoc.store.root import StoreRoot
from tsdoc.store.segment import SEGMENT_FILES, SegmentFiles, SegmentInfo, load_journal
from tsdoc.store.survey import is_blank, survey
from tsdoc.store.tokens import tokens_bytes, write_tokens
from tsdoc.store.writer import Writer

OnWait = Callable[[int], None]
"""Receives, about once a second, how many tokens another process has committed so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """A request to compute a prompt.

    Attributes:
        budget: What the store may hold.
    """

    root: StoreRoot
    prompt: Prompt
    shape: KVShape
    prefill_block: int
    name: str
    meta: Mapping[str, Any]
    budget: Budget
    on_wait: OnWait | None

    @property
    def directory(self) -> Path:
        """Directory of the model key."""
        return self.root.key_dir(self.prompt.key)

    @property
    def entry_dir(self) -> Path:
        """Directory of the entry."""
        return self.directory / "entries" / self.prompt.entry_id

    def run(self) -> Writer:
        """Waits for the entry's lock and returns a writer; see `Store.begin`."""
        locks = self._claim()
        try:
            with self.root.changing():
                plan = Lookup(self.root, self.directory).plan(self.prompt)
                if not plan.complete:
                    plan = self._prepare(plan)
            return self._open(plan, locks)
        except BaseException:
            try:
                self._abandon()
            finally:
                for lock in locks:
                    lock.release()
            raise

    def _claim(self) -> list[Lock]:
        """Takes the entry's writer lock, and protects the entry from eviction."""
        while True:
            with self.root.changing():
                self.root.make_key_dir(self.prompt.key)
                private_dir(self.entry_dir)
            path = self.entry_dir / "writer.lock"
            try:
                writer = lock_exclusive(path, on_wait=self._waiting())
            except FileNotFoundError:
                continue  # the entry was removed while we waited
            except OSError as error:
                raise store_error(error, path, "locking the entry") from error
            try:
                use = lock_shared(self.entry_dir / "use.lock", create=True)
            except OSError as error:
                writer.release()
                raise store_error(error, path, "locking the entry") from error
            except BaseException:
                writer.release()
                raise
            if use is not None:
                return [writer, use]
            writer.release()

    def _waiting(self) -> Callable[[], None] | None:
        if self.on_wait is None:
            return None
        tell, next_s = self.on_wait, time.monotonic()

        def on_wait() -> None:
            nonlocal next_s
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + 1
                tell(self._progress())

        return on_wait

    def _progress(self) -> int:
        """Tokens of this entry that are committed now, as far as can be told from outside."""
        quiet = Lookup(replace(self.root, warn=lambda *_: None), self.directory)
        try:
            manifest = quiet.manifest(self.prompt.entry_id)
        except StoreError:
            return 0
        return quiet.coverage(manifest.parts, self.prompt.ids) if manifest is not None else 0

    def _prepare(self, plan: Plan) -> Plan:
        """Publishes the entry as incomplete, with a new segment where tokens are to be computed."""
        prompt = self.prompt
        old = plan.manifest
        info: SegmentInfo | None = None
        if plan.own is None and plan.reused < len(prompt.ids):
            info = self._new_segment(plan)
            last = Part(segment_id=info.segment_id, start=info.start, end=info.end)
            plan = replace(plan, parts=(*plan.parts, last))
        manifest = Manifest(
            entry_id=prompt.entry_id,
            model_key=prompt.key.digest,
            name=self.name,
            num_tokens=len(prompt.ids),
            parts=plan.parts,
            complete=False,
            created=old.created if old is not None else time.time(),
            meta=self.meta,
        )
        try:
            if old is None or old != manifest:
                write_json(self.entry_dir / "manifest.json", "entry", manifest.to_json())
            self._clear_space(info)
            if info is not None:
                plan = replace(plan, own=self._create_segment(info))
        except OSError as error:
            raise store_error(error, self.entry_dir, "beginning the entry") from error
        return replace(plan, manifest=manifest)

    def _new_segment(self, plan: Plan) -> SegmentInfo:
        prompt = self.prompt
        return SegmentInfo(
            segment_id=secrets.token_hex(16),
            entry_id=prompt.entry_id,
            model_key=prompt.key.digest,
            name=self.name,
            start=plan.reused,
            end=len(prompt.ids),
            capacity=len(prompt.ids) - plan.reused,
            shape=self.shape,
            chunk_size=prompt.key.chunk_size,
            prefill_block=self.prefill_block,
            parts=plan.parts,
            created=time.time(),
        )

    def _clear_space(self, info: SegmentInfo | None) -> None:
        """Deletes what this entry replaces, and old entries where the budget demands it."""
        for entry in survey([self.directory]).entries:
            replaced = entry.entry_id == self.prompt.entry_id or entry.problem
            if entry.status == "orphan" and replaced:
                with contextlib.suppress(StoreError):
                    delete(entry)
        new_bytes = _segment_bytes(info) if info is not None else 0
        user = (self.prompt.key.digest, self.prompt.entry_id)
        make_room(self.root, self.budget, user, self.name, new_bytes)

    def _create_segment(self, info: SegmentInfo) -> SegmentFiles:
        directory = private_dir(self.directory / "segments") / info.segment_id
        private_dir(directory)
        prompt = self.prompt
        write_tokens(
            directory / "tokens.bin",
            segment_id=info.segment_id,
            entry_id=info.entry_id,
            ids=prompt.ids,
            hashes=prompt.hashes,
            chunk_size=info.chunk_size,
        )
        write_json(directory / "segment.json", "segment", info.to_json())
        fsync_dir(directory.parent)
        return SegmentFiles(
            directory=directory, info=info, journal=load_journal(directory, info), reserved=False
        )

    def _open(self, plan: Plan, locks: list[Lock]) -> Writer:
        lookup = Lookup(self.root, self.directory)  # what there is now: parents may have been cut
        own = OwnSegment(plan.own.directory) if plan.own is not None else None
        try:
            segments = []
            for part in plan.parts:
                if own is not None and own.segment.info.segment_id == part.segment_id:
                    segments.append(own.segment)
                    continue
                files = lookup.files(part.segment_id)
                if files is None or files.info.shape != self.shape:
                    path = self.directory / "segments" / part.segment_id
                    raise StoreError("does not fit the model", where=str(path))
                segments.append(Segment(files, writable=False))
        except BaseException:
            if own is not None:
                own.close()
            raise
        manifest = plan.manifest
        if manifest is None:
            raise StoreError("has no manifest", where=str(self.entry_dir))
        return Writer(
            entry_id=self.prompt.entry_id,
            ids=self.prompt.ids,
            parts=plan.parts,
            segments=segments,
            own=own,
            num_committed=own.segment.journal.committed if own is not None else plan.reused,
            complete=plan.complete,
            locks=locks,
            publish=lambda writer: self._publish(writer, manifest),
            abandon=self._abandon,
        )

    def _publish(self, writer: Writer, manifest: Manifest) -> Entry:
        if not writer.complete:
            manifest = replace(manifest, complete=True)
            path = self.entry_dir / "manifest.json"
            with self.root.changing():
                try:
                    write_json(path, "entry", manifest.to_json())
                except OSError as error:
                    raise store_error(error, path, "finishing the entry") from error
        return Entry(
            directory=self.entry_dir,
            manifest=manifest,
            ids=self.prompt.ids,
            segments=[_read_only(segment, writer) for segment in writer.segments],
            lock=lock_shared(self.entry_dir / "use.lock", create=True),
        )

    def _abandon(self) -> None:
        """Takes back an entry of which nothing was committed, while its locks are held."""
        with contextlib.suppress(OSError, StoreError), self.root.changing():
            manifest = Lookup(self.root, self.directory).manifest(self.prompt.entry_id)
            if manifest is not None and not manifest.complete:
                directory = self.directory / "segments" / manifest.parts[-1].segment_id
                if is_blank(directory):
                    if own_dir(directory):  # not where there was no room for it
                        delete_dir(directory, SEGMENT_FILES)
                    delete_dir(self.entry_dir, ENTRY_FILES)
            tidy(self.directory)


def _read_only(segment: Segment, writer: Writer) -> Segment:
    """Maps the writer's own segment anew for reading; what was checked stays checked."""
    if segment.info.segment_id not in writer.owned:
        return segment
    files = SegmentFiles(
        directory=segment.directory, info=segment.info, journal=segment.journal, reserved=True
    )
    fresh = Segment(files, writable=False)
    fresh.verified = segment.verified
    return fresh


def _segment_bytes(info: SegmentInfo) -> int:
    """What a segment's files will take, but for a kilobyte or two."""
    small = tokens_bytes(info.end, info.chunk_size)
    return info.kv_bytes + small + least_bytes(info.start, info.end, info.shape.num_layers)

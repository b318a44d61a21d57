"""Finding reusable tokens: which segments hold a prefix of a prompt."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tsdoc.errors import DamagedStoreError, StoreFormatError
from tsdoc.store.files import named_dirs
from tsdoc.store.key import FORMAT, Hashes, Ids, ModelKey, chunk_hashes, entry_id
from tsdoc.store.manifest import Manifest, Part, read_manifest
from tsdoc.store.root import StoreRoot
from tsdoc.store.segment import SegmentFiles, clip_parts, inspect_segment
from tsdoc.store.tokens import TokensHeader, first_hash, peek_tokens, read_header, read_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids under a model key, with what they are found by."""

    key: ModelKey
    ids: Ids
    hashes: Hashes
    entry_id: str


def make_prompt(key: ModelKey, ids: Ids) -> Prompt:
    """Computes the hashes of `ids` once for several lookups."""
    return Prompt(
        key=key, ids=ids, hashes=chunk_hashes(key, ids), entry_id=entry_id(key.digest, ids)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a prefill of a prompt can start from.

    Attributes:
        parts: Chain that covers [0, reused), and [0, num_tokens) where `own` or `complete`.
        own: The prompt's own segment that an earlier run left incomplete (or without manifest).
        reused: Tokens that need not be computed.
        complete: A manifest says so and everything it names is there.
        manifest: The manifest as it is now.
    """

    parts: tuple[Part, ...]
    own: SegmentFiles | None
    reused: int
    complete: bool
    manifest: Manifest | None


class Lookup:
    """One look at the segments of a model key; reads each of them at most once.

    Damaged and foreign files are reported once and passed over.
    """

    def __init__(self, root: StoreRoot, directory: Path) -> None:
        self._root = root
        self._directory = directory
        self._files: dict[str, SegmentFiles | None] = {}
        self._headers: dict[str, TokensHeader | None] = {}
        self._ids: dict[str, Ids | None] = {}

    def manifest(self, name: str) -> Manifest | None:
        """Reads an entry's manifest; None where it is missing, damaged or an older tsdoc's.

        Raises:
            StoreFormatError: a newer tsdoc wrote it.
        """
        try:
            return read_manifest(self._directory / "entries" / name)
        except DamagedStoreError as error:
            self._root.report(error)
        except StoreFormatError as error:
            if error.version > FORMAT:
                raise
            self._root.report(error)
        return None

    def files(self, segment_id: str) -> SegmentFiles | None:
        """Returns a segment's files, or None where they cannot be used."""
        if segment_id not in self._files:
            try:
                found = inspect_segment(self._directory / "segments" / segment_id)
            except (DamagedStoreError, StoreFormatError) as error:
                self._root.report(error)
                found = None
            self._files[segment_id] = found
        return self._files[segment_id]

    def header(self, segment_id: str) -> TokensHeader | None:
        """Returns the head of a segment's tokens.bin, or None where it cannot be used."""
        files = self.files(segment_id)
        if files is not None and segment_id not in self._headers:
            info = files.info
            try:
                self._headers[segment_id] = read_header(
                    files.directory,
                    entry_id=info.entry_id,
                    num_tokens=info.end,
                    chunk_size=info.chunk_size,
                )
            except DamagedStoreError as error:
                self._root.report(error)
                self._headers[segment_id] = None
        return self._headers.get(segment_id)

    def ids(self, segment_id: str) -> Ids | None:
        """Returns the token ids up to a segment's end, or None where they cannot be used."""
        header = self.header(segment_id)
        if header is not None and segment_id not in self._ids:
            try:
                self._ids[segment_id] = read_ids(header)
            except DamagedStoreError as error:
                self._root.report(error)
                self._ids[segment_id] = None
        return self._ids.get(segment_id)

    def chain(self, parts: tuple[Part, ...], ids: Ids) -> list[SegmentFiles]:
        """Returns the segments of `parts` as far as they are there and really hold `ids`."""
        found: list[SegmentFiles] = []
        for part in parts:
            files, held = self.files(part.segment_id), self.ids(part.segment_id)
            if files is None or held is None:
                break
            fits = files.info.start == part.start and part.end <= files.info.end
            if not fits or not np.array_equal(held[: part.end], ids[: part.end]):
                break
            found.append(files)
        return found

    def coverage(self, parts: tuple[Part, ...], ids: Ids) -> int:
        """Returns the position up to which a chain is committed without a gap."""
        end = 0
        for part, files in zip(parts, self.chain(parts, ids), strict=False):
            if files.committed < part.end:
                return max(part.start, files.committed)
            end = part.end
        return end

    def plan(self, prompt: Prompt) -> Plan:
        """Decides what can be reused.

        Raises:
            StoreFormatError: the entry's manifest was written by a newer tsdoc.
        """
        manifest = self.manifest(prompt.entry_id)
        if manifest is not None and manifest.complete and self.usable(manifest, prompt.ids):
            return Plan(
                parts=manifest.parts,
                own=None,
                reused=len(prompt.ids),
                complete=True,
                manifest=manifest,
            )
        related = self._related(prompt)
        parts, reused = self._best_prefix(prompt, related)
        plan = Plan(parts=parts, own=None, reused=reused, complete=False, manifest=manifest)
        for name in related:
            own = self.files(name)
            if own is None or own.info.entry_id != prompt.entry_id:
                continue
            last = Part(segment_id=name, start=own.info.start, end=own.info.end)
            chain = (*own.info.parts, last)
            if len(self.chain(chain, prompt.ids)) < len(chain):
                continue
            covered = self.coverage(chain, prompt.ids)
            better = covered > plan.reused or (plan.own is None and covered == plan.reused)
            if covered >= own.info.start and better:
                plan = replace(plan, parts=chain, own=own, reused=covered)
        return plan

    def usable(self, manifest: Manifest, ids: Ids) -> list[SegmentFiles]:
        """Returns the segments of an entry if all are there and hold exactly `ids`, else none."""
        if manifest.num_tokens != len(ids):
            return []
        found = self.chain(manifest.parts, ids)
        ready = len(found) == len(manifest.parts) and all(files.reserved for files in found)
        return found if ready else []

    def _related(self, prompt: Prompt) -> list[str]:
        """Returns the segments that share the first chunk with the prompt, or are its own."""
        found = []
        first = first_hash(prompt.hashes)
        for directory in named_dirs(self._directory / "segments"):
            if not any(os.path.lexists(directory / name) for name in ("segment.json", "kv.bin")):
                continue  # what a run left that died while it began
            try:
                peek = peek_tokens(directory)
            except DamagedStoreError as error:
                self._root.report(error)
                continue
            if peek.entry_id == prompt.entry_id or first == peek.first_hash != (0, 0):
                found.append(directory.name)
        return found

    def _best_prefix(self, prompt: Prompt, related: list[str]) -> tuple[tuple[Part, ...], int]:
        """Returns the chain that covers most whole chunks of the prompt, and how many tokens."""
        size = prompt.key.chunk_size
        candidates: list[tuple[int, int, tuple[Part, ...]]] = []
        for name in related:
            files, header = self.files(name), self.header(name)
            if files is None or header is None or files.info.chunk_size != size:
                continue
            common = _common_rows(header.hashes, prompt.hashes) * size
            last = Part(segment_id=name, start=files.info.start, end=files.info.end)
            parts = clip_parts((*files.info.parts, last), common)
            if parts:
                candidates.append((common, len(parts), parts))
        best: tuple[tuple[Part, ...], int] = ((), 0)
        for common, _, parts in sorted(
            candidates, key=lambda c: (-c[0], c[1], c[2][-1].segment_id)
        ):
            if common <= best[1]:
                break
            usable = self.coverage(parts, prompt.ids) // size * size
            if usable > best[1]:
                best = clip_parts(parts, usable), usable
        return best


def _common_rows(left: Hashes, right: Hashes) -> int:
    """Number of leading rows that are equal."""
    count = min(len(left), len(right))
    different = np.flatnonzero((left[:count] != right[:count]).any(axis=1))
    return int(different[0]) if len(different) else count

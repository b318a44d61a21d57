"""Finding reusable tokens: which segments hold a prefix of a prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tsdoc.errors import DamagedStoreError, StoreFormatError
from tsdoc.store.files import named_dirs
from tsdoc.store.key import Hashes, Ids, ModelKey, chunk_hashes, entry_id
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
    return Prompt(key=key, ids=ids, hashes=chunk_hashes(key, ids), entry_id=entry_id(key, ids))


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

    def manifest(self, name: str) -> Manifest | None:
        """Reads an entry's manifest; None where it is missing or damaged.

        Raises:
            StoreFormatError: a newer or older tsdoc wrote it.
        """
        try:
            return read_manifest(self._directory / "entries" / name)
        except DamagedStoreError as error:
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

    def chain(self, parts: tuple[Part, ...], hashes: Hashes) -> list[SegmentFiles]:
        """Returns the segments of `parts` as far as they are there and hold these tokens."""
        found: list[SegmentFiles] = []
        for part in parts:
            files, header = self.files(part.segment_id), self.header(part.segment_id)
            if files is None or header is None:
                break
            chunk = part.end // files.info.chunk_size
            if files.info.start != part.start or files.info.end < part.end:
                break
            if chunk and not np.array_equal(header.hashes[chunk - 1], hashes[chunk - 1]):
                break
            found.append(files)
        return found

    def coverage(self, parts: tuple[Part, ...], hashes: Hashes) -> int:
        """Returns the position up to which a chain is committed without a gap."""
        end = 0
        for part, files in zip(parts, self.chain(parts, hashes), strict=False):
            if files.committed < part.end:
                return max(part.start, files.committed)
            end = part.end
        return end

    def holds(self, segment_id: str, ids: Ids) -> bool:
        """Tells whether the tokens up to a segment's end really begin with `ids`."""
        header = self.header(segment_id)
        if header is None or header.num_tokens < len(ids):
            return False
        try:
            return np.array_equal(read_ids(header)[: len(ids)], ids)
        except DamagedStoreError as error:
            self._root.report(error)
            return False

    def plan(self, prompt: Prompt) -> Plan:
        """Decides what can be reused.

        Raises:
            StoreFormatError: the entry's manifest was written by a newer or older tsdoc.
        """
        manifest = self.manifest(prompt.entry_id)
        if (
            manifest is not None
            and manifest.complete
            and self.usable(manifest, prompt.ids, prompt.hashes)
        ):
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
            covered = self.coverage(chain, prompt.hashes)
            better = covered > plan.reused or (plan.own is None and covered == plan.reused)
            if covered >= own.info.start and better and self.holds(name, prompt.ids):
                plan = replace(plan, parts=chain, own=own, reused=covered)
        return plan

    def usable(self, manifest: Manifest, ids: Ids, hashes: Hashes) -> list[SegmentFiles]:
        """Returns the segments of an entry if all are there and hold exactly `ids`, else none."""
        parts = manifest.parts
        found = self.chain(parts, hashes)
        ready = len(found) == len(parts) and all(files.reserved for files in found)
        if not ready or manifest.num_tokens != len(ids):
            return []
        return found if self.holds(parts[-1].segment_id, ids) else []

    def _related(self, prompt: Prompt) -> list[str]:
        """Returns the segments that share the first chunk with the prompt, or are its own."""
        found = []
        first = first_hash(prompt.hashes)
        for directory in named_dirs(self._directory / "segments"):
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
            usable = self.coverage(parts, prompt.hashes) // size * size
            if usable > best[1]:
                chosen = clip_parts(parts, usable)
                if self.holds(chosen[-1].segment_id, prompt.ids[:usable]):
                    best = chosen, usable
        return best


def _common_rows(left: Hashes, right: Hashes) -> int:
    """Number of leading rows that are equal."""
    count = min(len(left), len(right))
    different = np.flatnonzero((left[:count] != right[:count]).any(axis=1))
    return int(different[0]) if len(different) else count

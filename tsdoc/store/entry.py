"""An entry that is open for reading."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from tsdoc.errors import StoreError
from tsdoc.kernels.kv import KVPiece
from tsdoc.page_tables import populate
from tsdoc.store.key import PAGE_SIZE, Ids
from tsdoc.store.locks import Lock
from tsdoc.store.manifest import Manifest, Part
from tsdoc.store.owned import OwnSegment
from tsdoc.store.pages import Segment
from tsdoc.store.piece import SegmentPiece
from tsdoc.store.votes_file import SHARES_FILE, VOTES_FILE, Votes, read_votes, write_votes

CHECK_BYTES = 16 << 20  # read at a time when checking ahead


class Entry:
    """K and V of a whole prompt, read-only and memory-mapped.

    Pages are checked when `check_range` and `check_rows` of a piece first meet them. While the
    entry is open nobody's eviction touches it; `close` (or leaving a `with` block) ends that.

    Attributes:
        ids: The prompt's token ids, int32 [num_tokens].
        parts: Which segment holds which positions.
        segments: The mapped segments, one per part.
        owned: Segments that this process is repairing, by id.
    """

    def __init__(
        self,
        *,
        directory: Path,
        manifest: Manifest,
        ids: Ids,
        segments: Sequence[Segment],
        lock: Lock | None,
    ) -> None:
        self._directory = directory
        self._manifest = manifest
        self._lock = lock
        self.ids = ids
        self.segments = list(segments)
        self.owned: dict[str, OwnSegment] = {}
        self._checking: threading.Thread | None = None
        self._closing = threading.Event()
        self._pieces = [
            SegmentPiece(segment, part.end)
            for segment, part in zip(segments, manifest.parts, strict=True)
        ]

    @property
    def entry_id(self) -> str:
        """32 hex digits."""
        return self._manifest.entry_id

    @property
    def name(self) -> str:
        """The name it was given; of foreign origin."""
        return self._manifest.name

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return self._manifest.num_tokens

    @property
    def meta(self) -> Mapping[str, Any]:
        """What was handed to `Store.begin`."""
        return self._manifest.meta

    @property
    def parts(self) -> tuple[Part, ...]:
        """The chain of segments."""
        return self._manifest.parts

    @property
    def pieces(self) -> list[KVPiece]:
        """Covers [0, num_tokens)."""
        return list(self._pieces)

    def read_votes(self, asked: bytes, shape: tuple[int, int]) -> Votes | None:
        """Returns what `keep_votes` kept under `asked`, [num_layers, num_positions]; or None."""
        return read_votes(self._directory / VOTES_FILE, self.entry_id, asked, shape)

    def keep_votes(self, asked: bytes, votes: Votes) -> None:
        """Keeps votes with the entry, where it can be written to; they can be found again."""
        with contextlib.suppress(OSError, StoreError):
            write_votes(self._directory / VOTES_FILE, self.entry_id, asked, votes)

    def read_shares(self, asked: bytes, num_layers: int) -> list[float] | None:
        """Returns what `keep_shares` kept under `asked`; or None."""
        path = self._directory / SHARES_FILE
        shares = read_votes(path, self.entry_id, asked, (num_layers, 1))
        return None if shares is None else shares[:, 0].tolist()

    def keep_shares(self, asked: bytes, shares: Sequence[float]) -> None:
        """Keeps a number per layer with the entry, where it can be written to."""
        rows = np.array(shares, dtype=np.float32)[:, None]
        with contextlib.suppress(OSError, StoreError):
            write_votes(self._directory / SHARES_FILE, self.entry_id, asked, rows)

    def check_ahead(self) -> None:
        """Begins to read and check all K and V in the background, and to fill page tables.

        What is damaged is left to those who use it.
        """
        if self._checking is None:
            self._checking = threading.Thread(target=self._check, name="tsdoc-check", daemon=True)
            self._checking.start()

    def _check(self) -> None:
        shape = self.segments[0].info.shape
        # In large parts, since whoever asks for the interpreter's lock often waits for it often.
        num_rows = -(-CHECK_BYTES // (shape.row_bytes * PAGE_SIZE)) * PAGE_SIZE
        rows = np.empty((num_rows, 2, shape.num_kv_heads, shape.head_dim), shape.dtype)
        for layer, piece in itertools.product(range(shape.num_layers), self._pieces):
            end = piece.start + piece.capacity
            kept = piece.rows(layer)
            populate([(kept.ctypes.data, kept.nbytes)])
            for first in range(piece.start, end, num_rows):
                if self._closing.is_set():
                    return
                with contextlib.suppress(StoreError):
                    piece.read(layer, first, rows[: end - first])

    def close(self) -> None:
        """Ends the protection from eviction; arrays that are still held stay readable."""
        self._closing.set()
        if self._checking is not None:
            self._checking.join()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Entry:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

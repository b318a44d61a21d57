"""An entry that is open for reading."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from tsdoc.errors import StoreError
from tsdoc.kernels.kv import KVPiece
from tsdoc.store.key import Ids
from tsdoc.store.locks import Lock
from tsdoc.store.manifest import Manifest, Part
from tsdoc.store.owned import OwnSegment
from tsdoc.store.pages import Segment
from tsdoc.store.piece import SegmentPiece

CHECK_TOKENS = 16_384  # looked at between two looks at whether the entry is closed


class Entry:
    """K and V of a whole prompt, read-only and memory-mapped.

    Pages are checked when `check_keys` and `check_values` of a piece first meet them. While the
    entry is open nobody's eviction touches it; `close` (or leaving a `with` block) ends that.

    Attributes:
        ids: The prompt's token ids, int32 [num_tokens].
        parts: Which segment holds which positions.
        segments: The mapped segments, one per part.
        owned: Segments that this process is repairing, by id.
    """

    def __init__(
        self, *, manifest: Manifest, ids: Ids, segments: Sequence[Segment], lock: Lock | None
    ) -> None:
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

    def check_ahead(self) -> None:
        """Begins to read and check all keys in the background: every question needs them all.

        What is damaged is left to those who use it.
        """
        if self._checking is None:
            self._checking = threading.Thread(
                target=self._check_keys, name="tsdoc-check", daemon=True
            )
            self._checking.start()

    def _check_keys(self) -> None:
        for layer in range(self.segments[0].info.shape.num_layers):
            for piece in self._pieces:
                for first in range(piece.start, piece.start + piece.capacity, CHECK_TOKENS):
                    if self._closing.is_set():
                        return
                    with contextlib.suppress(StoreError):
                        piece.check_keys(layer, first, first + CHECK_TOKENS)

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

"""Writing the K and V of one prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from tsdoc.kernels.kv import KVPiece
from tsdoc.store.entry import Entry
from tsdoc.store.key import Ids
from tsdoc.store.locks import Lock
from tsdoc.store.manifest import Part
from tsdoc.store.owned import OwnSegment, check_end
from tsdoc.store.pages import Segment
from tsdoc.store.piece import SegmentPiece


class Writer:
    """Prefill of one prompt: what is reused, and room for the rest.

    Leaving the `with` block without `finish` keeps what was committed for the next run.

    Attributes:
        entry_id: 32 hex digits.
        ids: The prompt's token ids.
        parts: Which segment holds which positions.
        segments: The mapped segments, one per part.
        owned: Those that this process may write, by id: the entry's own, and one being repaired.
        num_committed: Positions [0, num_committed) are valid: the prefill goes on from here.
        reused_tokens: num_committed at the beginning.
        complete: The entry was finished before, perhaps by another process meanwhile.
    """

    def __init__(
        self,
        *,
        entry_id: str,
        ids: Ids,
        parts: tuple[Part, ...],
        segments: Sequence[Segment],
        own: OwnSegment | None,
        num_committed: int,
        complete: bool,
        locks: Sequence[Lock],
        publish: Callable[[Writer], Entry],
        abandon: Callable[[], None],
    ) -> None:
        self.entry_id = entry_id
        self.ids = ids
        self.parts = parts
        self.segments = list(segments)
        self.num_committed = self.reused_tokens = num_committed
        self.complete = complete
        self._own = own
        self._locks = list(locks)
        self._publish = publish
        self._abandon = abandon
        self.owned: dict[str, OwnSegment] = {}
        if own is not None:
            self.owned[own.segment.info.segment_id] = own
            own.segment.writing = (num_committed, own.segment.info.end)

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.ids)

    @property
    def pieces(self) -> list[KVPiece]:
        """Covers [0, num_tokens): reused parts read-only, the entry's own writable."""
        return [
            SegmentPiece(segment, part.end)
            for segment, part in zip(self.segments, self.parts, strict=True)
        ]

    def commit(self, end: int) -> None:
        """Commits the block [num_committed, end), which the caller has written.

        Args:
            end: A multiple of page and chunk size, or the prompt's length.

        Raises:
            ValueError: `end` is no possible end of a block.
            DiskFullError: the disk is full; the block is not committed.
            StoreError: the disk failed.
        """
        own = self._own
        if own is None or not self.num_committed < end <= self.num_tokens:
            raise ValueError(f"no block of this entry ends at {end}")
        check_end(own.segment, end)
        own.commit(self.num_committed, end)
        self.num_committed = end
        own.segment.writing = (end, own.segment.info.end)

    def finish(self) -> Entry:
        """Writes the manifest and opens the entry; the writer is closed.

        Raises:
            ValueError: tokens are missing.
            StoreError: the manifest cannot be written.
        """
        if self.num_committed != self.num_tokens:
            raise ValueError(f"only {self.num_committed} of {self.num_tokens} tokens are committed")
        entry = self._publish(self)
        self.close()
        return entry

    def close(self) -> None:
        """Gives the locks back; an entry of which nothing was committed is removed again."""
        own, self._own = self._own, None
        locks, self._locks = self._locks, []
        try:
            if own is not None and not own.segment.journal.block_end.any():
                self._abandon()
        finally:
            if own is not None:
                own.close()
            for lock in locks:
                lock.release()

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

"""A committed range of a mapped segment as what the engine reads K and V from."""

from __future__ import annotations

import contextlib

import numpy as np
import numpy.typing as npt

from tsdoc.errors import DamagedStoreError
from tsdoc.kernels.kv import KVArray, KVFile, LayerIndex, PairedRows, UncheckedRows
from tsdoc.store.pages import Segment


class SegmentPiece(PairedRows):
    """Positions [start, end) of a segment as a `KVPiece`."""

    on_host = True

    def __init__(self, segment: Segment, end: int) -> None:
        self.segment = segment
        self.start = segment.info.start
        self.capacity = end - self.start

    @property
    def content(self) -> object:
        """See `KVPiece.content`: a segment's committed pages never change."""
        return self.segment.info.segment_id

    @property
    def file(self) -> KVFile:
        """See `KVPiece.file`."""
        segment, shape = self.segment, self.segment.info.shape
        return KVFile(
            path=str(segment.path),
            inode=segment.inode,
            content=segment.info.segment_id,
            start=self.start,
            capacity=self.capacity,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=shape.kv_dtype,
            region_bytes=segment.info.region_bytes,
            writable=bool(segment.rows(0).flags.writeable),
        )

    @property
    def unchecked(self) -> UncheckedRows:
        """See `KVPiece.unchecked`."""
        return self.segment

    def rows(self, layer: int) -> KVArray:
        """See `KVPiece.rows`."""
        return self.segment.rows(layer)[: self.capacity]

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """See `KVPiece.read`."""
        self.segment.read(layer, start, out)

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """See `KVPiece.write`."""
        self.segment.write(layer, start, rows)

    def check_range(self, layer: int, start: int, end: int) -> None:
        """See `KVPiece.check_range`."""
        start, end = max(start, self.start), min(end, self.start + self.capacity)
        if start < end:
            segment = self.segment
            segment.check_size()
            pages = segment.journal.pages(start, end)
            if not segment.verified[layer, pages].all():
                segment.check(layer, segment.is_checkable(start, end))

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """See `KVPiece.check_rows`."""
        first, last = np.searchsorted(positions, [self.start, self.start + self.capacity])
        if first < last:
            self.segment.check_size()
            self.segment.check_rows(layer, positions[first:last])

    def index(self, layer: int) -> LayerIndex | None:
        """See `KVPiece.index`: one that is damaged is as good as none here."""
        with contextlib.suppress(DamagedStoreError):
            layers = self.segment.index()
            return layers[layer] if layers is not None else None
        return None

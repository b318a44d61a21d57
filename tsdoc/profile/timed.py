"""Decoder, backend and cache with marks around every operation; the engine runs unchanged.

K and V stay where they were computed: what is profiled is all of one process, so nothing is loaded
from, or saved to, the pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tsdoc.engine.decoder import DecoderPart
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.interface import (
    Backend,
    DeviceCache,
    DeviceDecode,
    Pending,
    Ranges,
    Window,
)
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import ChunkRange, SelectionConfig
from tsdoc.kernels.timing import Timer
from tsdoc.kernels.torch_cache import Arrived


class Recorder:
    """Which stretches of the device's time went to which kind of work, and when blocks ended.

    Attributes:
        spans: (part, number of the block, mark at its begin, mark at its end).
        borders: (end of the block in tokens, mark), one per block.
    """

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.spans: list[tuple[str, int, object, object]] = []
        self.borders: list[tuple[int, object]] = []
        self._active = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records from here on, anew."""
        self.spans.clear()
        self.borders[:] = [(0, self.timer.mark())]
        self._active = True
        try:
            yield
        finally:
            self._active = False

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        """What is begun inside is work of the kind `part`."""
        if not self._active:
            yield
            return
        begin = self.timer.mark()
        yield
        self.spans.append((part, len(self.borders) - 1, begin, self.timer.mark()))

    def border(self, end: int) -> None:
        """A block ends at token `end`."""
        if self._active:
            self.borders.append((end, self.timer.mark()))


class TimedDecoder:
    """See `DecoderPart`."""

    def __init__(self, inner: DecoderPart, recorder: Recorder) -> None:
        self.config = inner.config
        self.dtype = inner.dtype
        self._inner = inner
        self._recorder = recorder

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """See `DecoderPart.embed`."""
        with self._recorder.span("linear"):
            return self._inner.embed(ids)

    def project(
        self, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DecoderPart.project`."""
        with self._recorder.span("linear"):
            return self._inner.project(layer, hidden)

    def finish_layer(
        self, layer: int, hidden: torch.Tensor, attention: torch.Tensor
    ) -> torch.Tensor:
        """See `DecoderPart.finish_layer`."""
        with self._recorder.span("linear"):
            return self._inner.finish_layer(layer, hidden, attention)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `DecoderPart.logits`."""
        with self._recorder.span("linear"):
            return self._inner.logits(hidden)


class TimedBackend:
    """See `Backend`."""

    def __init__(self, inner: Backend, recorder: Recorder) -> None:
        self.device = inner.device
        self.save_ahead = inner.save_ahead
        self._inner = inner
        self._recorder = recorder

    def cache(
        self,
        pieces: Sequence[KVPiece],
        rope: RopeTable,
        config: SelectionConfig,
        index: IndexWatch | None = None,
    ) -> TimedCache:
        """See `Backend.cache`."""
        return TimedCache(self._inner.cache(pieces, rope, config, index), self._recorder)


class TimedCache:
    """See `DeviceCache`."""

    def __init__(self, inner: DeviceCache, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def load(self, end: int) -> None:
        """K and V were computed in this process and are where they are needed."""

    def save(self, start: int, end: int, *, always: bool = False) -> Pending:
        """They stay there; a block has ended."""
        self._recorder.border(end)
        return Arrived()

    def write(self, layer: int, start: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """See `DeviceCache.write`."""
        with self._recorder.span("store"):
            self._inner.write(layer, start, k, v)

    def selection_queries(self, q: torch.Tensor, ranges: Sequence[ChunkRange]) -> torch.Tensor:
        """See `DeviceCache.selection_queries`."""
        with self._recorder.span("selection"):
            return self._inner.selection_queries(q, ranges)

    def select(
        self,
        layer: int,
        queries: torch.Tensor,
        ranges: Sequence[ChunkRange],
        allowed: Ranges | None = None,
    ) -> Sequence[torch.Tensor]:
        """See `DeviceCache.select`."""
        with self._recorder.span("selection"):
            return self._inner.select(layer, queries, ranges, allowed)

    def attend_chunks(
        self,
        layer: int,
        q: torch.Tensor,
        selected: Sequence[torch.Tensor],
        ranges: Sequence[ChunkRange],
    ) -> torch.Tensor:
        """See `DeviceCache.attend_chunks`."""
        with self._recorder.span("attention"):
            return self._inner.attend_chunks(layer, q, selected, ranges)

    def attend(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attend`."""
        with self._recorder.span("attention"):
            return self._inner.attend(layer, q, selected, around)

    def soft_votes(self, layer: int, q: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """See `DeviceCache.soft_votes`."""
        with self._recorder.span("selection"):
            return self._inner.soft_votes(layer, q, start, end)

    def attention_mass(
        self, layer: int, q: torch.Tensor, selected: torch.Tensor, around: ChunkRange
    ) -> torch.Tensor:
        """See `DeviceCache.attention_mass`."""
        with self._recorder.span("attention"):
            return self._inner.attention_mass(layer, q, selected, around)

    def open_window(self, layer: int, selected: torch.Tensor, around: ChunkRange) -> Window:
        """See `DeviceCache.open_window`."""
        return self._inner.open_window(layer, selected, around)

    def start_decode(
        self, position: int, *, theta: float | None, max_hits: int, allowed: Ranges | None
    ) -> DeviceDecode | None:
        """See `DeviceCache.start_decode`."""
        return self._inner.start_decode(position, theta=theta, max_hits=max_hits, allowed=allowed)

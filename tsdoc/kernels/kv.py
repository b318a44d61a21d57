"""Where K and V of a prompt live: pieces of consecutive tokens, in memory or memory-mapped.

A prompt's cache is a chain of pieces that cover [0, num_tokens) without gaps: segments of the
store (a parent's, then the entry's own) and a private one in memory for question and answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

KVArray = npt.NDArray[np.uint16] | npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerIndex:
    """The key index of one layer over consecutive tokens: see `tsdoc.kernels.index`.

    Attributes:
        centre: [num_kv_heads, head_dim] float32.
        axes: [num_kv_heads, head_dim, rank] float32.
        codes: [num_kv_heads, num_pages · 128, rank] uint8; pages are counted from the first token.
    """

    centre: npt.NDArray[np.float32]
    axes: npt.NDArray[np.float32]
    codes: npt.NDArray[np.uint8]


class KVPiece(Protocol):
    """K and V of consecutive tokens [start, start + capacity) for all layers.

    K and V of a token lie side by side, since what attends to it reads both. Keys are stored
    without RoPE. Arrays are numpy so that the store needs no torch: bfloat16 is held as uint16 bit
    patterns.
    """

    @property
    def start(self) -> int:
        """Position in the prompt of the first token."""

    @property
    def capacity(self) -> int:
        """Number of tokens there is room for."""

    @property
    def on_host(self) -> bool:
        """Whether there is memory behind it; without, K and V stay on the device."""

    @property
    def content(self) -> object:
        """Equal for pieces that hold the same K and V as far as both reach."""

    @property
    def file(self) -> KVFile | None:
        """Where other processes of this machine find the same memory; None where they cannot."""

    @property
    def unchecked(self) -> UncheckedRows | None:
        """Reads without checks; None where there is nothing to check."""

    def rows(self, layer: int) -> KVArray:
        """K and V of one layer, [capacity, 2 (K, V), num_kv_heads, head_dim].

        Writable while being written.
        """

    def keys(self, layer: int) -> KVArray:
        """K of one layer, [capacity, num_kv_heads, head_dim], a view of its rows."""

    def values(self, layer: int) -> KVArray:
        """V of one layer, likewise."""

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """Copies rows from position `start` on into `out`, checked.

        Args:
            layer: Which layer.
            start: First position.
            out: [num_tokens, 2, num_kv_heads, head_dim], contiguous.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """Takes rows from position `start` on; arguments as in `read`.

        Raises:
            TsdocError: they cannot be written.
        """

    def check_range(self, layer: int, start: int, end: int) -> None:
        """Checks the KV pages that hold positions [start, end), once per process.

        Pages that are being written are left out. That their memory is still there is looked at
        every time, so this comes before every use of a piece.

        Raises:
            CorruptPageError: a page does not match its checksum.
            DamagedStoreError: the file behind it was cut.
        """

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """Checks what holds `positions` (absolute, sorted), once per process.

        Raises:
            CorruptPageError: a page does not match its checksum.
            DamagedStoreError: the file behind it was cut.
        """

    def index(self, layer: int) -> LayerIndex | None:
        """The key index of one layer over all tokens of the piece; None where there is none."""


class UncheckedRows(Protocol):
    """Rows whose checksums can be compared later, by whoever finds them elsewhere sooner."""

    def copy(self, layer: int, start: int, out: KVArray) -> npt.NDArray[np.int64]:
        """Copies rows from position `start` on into `out`, as `KVPiece.read` does.

        Returns:
            First positions of whole KV pages in `out` that were not checked: `confirm` is for them.

        Raises:
            CorruptPageError: a page that is not whole in `out` does not match its checksum.
        """

    def confirm(
        self, layer: int, positions: npt.NDArray[np.int64], digests: npt.NDArray[np.uint64]
    ) -> None:
        """Compares checksums (XXH3-64 of their bytes) of the pages that begin at `positions`.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """


KV_DTYPES: dict[str, type[np.uint16] | type[np.float32]] = {
    "bfloat16": np.uint16,
    "float32": np.float32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVFile:
    """A file that holds the K and V of a piece, for other processes to map.

    Attributes:
        path: Of the file; of memory without a name, its place under /proc.
        inode: Tells the file from another one that has got its name meanwhile.
        content: Names the K and V, like `KVPiece.content`.
        start: Position in the prompt of the first token.
        capacity: Number of tokens there is room for.
        region_bytes: From one layer's rows to the next one's.
        writable: Whether the file may be written.
    """

    path: str
    inode: int
    content: str
    start: int
    capacity: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    region_bytes: int
    writable: bool


class PairedRows:
    """K and V where rows have both; see `KVPiece`."""

    def rows(self, layer: int) -> KVArray:
        """See `KVPiece.rows`."""
        raise NotImplementedError

    def keys(self, layer: int) -> KVArray:
        """See `KVPiece.keys`."""
        return self.rows(layer)[:, 0]

    def values(self, layer: int) -> KVArray:
        """See `KVPiece.values`."""
        return self.rows(layer)[:, 1]


class DevicePiece(PairedRows):
    """K and V that only the device holds which computes them: no host memory is taken.

    Args:
        start: Position in the prompt of the first token.
        capacity: Number of tokens there is room for.
    """

    on_host = False

    def __init__(self, *, start: int, capacity: int) -> None:
        self.start = start
        self.capacity = capacity

    @property
    def content(self) -> object:
        """See `KVPiece.content`."""
        return self

    @property
    def file(self) -> None:
        """See `KVPiece.file`: there is none."""

    @property
    def unchecked(self) -> None:
        """See `KVPiece.unchecked`."""

    def rows(self, layer: int) -> KVArray:
        """There are none here."""
        raise RuntimeError(f"K and V of layer {layer} are on the device alone")

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """There is nothing here."""
        raise RuntimeError(f"K and V of layer {layer} are on the device alone")

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """There is no room here."""
        raise RuntimeError(f"K and V of layer {layer} are on the device alone")

    def check_range(self, layer: int, start: int, end: int) -> None:
        """The device's memory is trusted."""

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """The device's memory is trusted."""

    def index(self, layer: int) -> None:
        """The device makes its own."""


class MemoryPiece(PairedRows):
    """K and V in memory: the question and answer of one turn, or a run without a store.

    Args:
        start: Position in the prompt of the first token.
        capacity: Number of tokens there is room for.
        num_layers: Layers of the model.
        num_kv_heads: Heads of K and V.
        head_dim: Numbers per head.
        kv_dtype: "bfloat16" or "float32".
    """

    on_host = True

    def __init__(
        self,
        *,
        start: int,
        capacity: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        kv_dtype: str,
    ) -> None:
        self.start = start
        self.capacity = capacity
        # [layer][token][K|V][kv_head][head_dim], as in a segment; untouched rows cost nothing.
        self._data = np.zeros(
            (num_layers, capacity, 2, num_kv_heads, head_dim), dtype=KV_DTYPES[kv_dtype]
        )
        self._layers: tuple[LayerIndex, ...] = ()

    @property
    def content(self) -> object:
        """See `KVPiece.content`."""
        return self

    @property
    def file(self) -> KVFile | None:
        """See `KVPiece.file`: this memory is the process's own."""
        return None

    @property
    def unchecked(self) -> None:
        """See `KVPiece.unchecked`."""

    def rows(self, layer: int) -> KVArray:
        """See `KVPiece.rows`."""
        rows: KVArray = self._data[layer]
        return rows

    def shorten(self, capacity: int) -> None:
        """Gives up the room behind the first `capacity` tokens, so that a piece can follow."""
        self.capacity = capacity
        self._data = self._data[:, :capacity]

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """See `KVPiece.read`."""
        first = start - self.start
        np.copyto(out, self._data[layer, first : first + len(out)])

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """See `KVPiece.write`."""
        first = start - self.start
        self._data[layer, first : first + len(rows)] = rows

    def check_range(self, layer: int, start: int, end: int) -> None:
        """Memory is trusted."""

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """Memory is trusted."""

    def set_index(self, layers: Sequence[LayerIndex]) -> None:
        """Takes the key index of all layers, over all tokens, which change no more."""
        self._layers = tuple(layers)

    def index(self, layer: int) -> LayerIndex | None:
        """See `KVPiece.index`."""
        return self._layers[layer] if self._layers else None

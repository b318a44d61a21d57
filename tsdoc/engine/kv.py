"""Where K and V of a prompt live: pieces of consecutive tokens, in memory or memory-mapped.

A prompt's cache is a chain of pieces that cover [0, num_tokens) without gaps: segments of the
store (a parent's, then the entry's own) and a private one in memory for question and answer.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class KVPiece(Protocol):
    """K and V of consecutive tokens [start, start + capacity) for all layers.

    Keys are stored without RoPE. Arrays are numpy so that the store needs no torch: bfloat16 is
    held as uint16 bit patterns.
    """

    @property
    def start(self) -> int:
        """Position in the prompt of the first token."""

    @property
    def capacity(self) -> int:
        """Number of tokens there is room for."""

    def keys(self, layer: int) -> npt.NDArray[np.uint16] | npt.NDArray[np.float32]:
        """K of one layer, [capacity, num_kv_heads, head_dim]; writable while being written."""

    def values(self, layer: int) -> npt.NDArray[np.uint16] | npt.NDArray[np.float32]:
        """V of one layer, same shape."""

    def check_keys(self, layer: int, start: int, end: int) -> None:
        """Checks the KV pages of K that hold positions [start, end), once per process.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """

    def check_values(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """Checks the KV pages of V that hold `positions` (absolute, sorted), once per process."""

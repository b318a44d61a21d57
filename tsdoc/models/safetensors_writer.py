"""Writes a .safetensors file tensor by tensor, so that the whole model is never in memory.

Layout: u64 length of the header, the header (JSON, padded with spaces), the tensors without gaps.
The header is padded so that the data begins at a multiple of 64 bytes; float32 rows of a decoder
are multiples of 64 bytes, so every tensor is aligned for the memory-mapped reader.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

ALIGNMENT = 64
_FLOAT32_BYTES = 4


class SafetensorsWriter:
    """Creates `path` with float32 tensors of the given shapes, to be written in their order.

    Args:
        path: Must not exist.
        shapes: Shape of every tensor, by name.
    """

    def __init__(self, path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            start, end = end, end + math.prod(shape) * _FLOAT32_BYTES
            header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        self._length = 8 + len(text) + end
        self._file = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def write(self, rows: npt.NDArray[np.float32]) -> None:
        """Appends the next numbers, in C order; a tensor may come in several slices."""
        self._file.write(np.ascontiguousarray(rows, dtype="<f4").data)

    def finish(self) -> None:
        """Closes the file; checks that exactly the announced tensors were written.

        Raises:
            ValueError: bytes are missing or too many.
        """
        written = self._file.tell()
        self._file.close()
        if written != self._length:
            raise ValueError(f"wrote {written} bytes of {self._length}")

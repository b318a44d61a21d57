"""index.bin: the key index of a segment (see `tsdoc.kernels.index`), made from its keys.

It is read whole and checked when a segment's keys are first selected from, and made again where it
is missing or damaged: nothing else depends on it. Layout: see FORMAT.md.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.errors import DamagedStoreError
from tsdoc.kernels.kv import LayerIndex
from tsdoc.store.files import open_file
from tsdoc.store.segment import ALIGNMENT, SegmentInfo

INDEX_FILE = "index.bin"
VERSION = 2
RANK = 32
_MAGIC = int.from_bytes(b"TSDOCIDX", "little")
_FIXED_WORDS = 6
_HALF_PAGE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexLayout:
    """Where things lie in a segment's index.bin."""

    info: SegmentInfo

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], Any], ...]:
        """Shape and type of a layer's centre, axes and codes."""
        kv, dim = self.info.shape.num_kv_heads, self.info.shape.head_dim
        pages = -(-(self.info.end - self.info.start) // (2 * _HALF_PAGE))
        return (
            ((kv, dim), np.dtype("<f4")),
            ((kv, dim, RANK), np.dtype("<f4")),
            ((kv, pages * _HALF_PAGE, RANK), np.dtype("u1")),
        )

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer, padded."""
        size = sum(math.prod(shape) * int(dtype.itemsize) for shape, dtype in self.shapes)
        return -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def header_bytes(self) -> int:
        """Bytes of the header, padded."""
        words = _FIXED_WORDS + self.info.shape.num_layers + 1
        return -(-8 * words // ALIGNMENT) * ALIGNMENT

    @property
    def num_bytes(self) -> int:
        """Exact size of the file."""
        return self.header_bytes + self.info.shape.num_layers * self.layer_bytes

    def header(self, checksums: list[int]) -> bytes:
        """The first bytes, from the layers' checksums."""
        info = self.info
        halves = [int(info.segment_id[:16], 16), int(info.segment_id[16:], 16)]
        words = [_MAGIC, VERSION, *halves, info.end - info.start, RANK, *checksums]
        data = np.array(words, dtype="<u8").tobytes()
        data += int(xxhash.xxh3_64_intdigest(data)).to_bytes(8, "little")
        return data.ljust(self.header_bytes, b"\0")

    def pack(self, layer: LayerIndex) -> bytes:
        """A layer's bytes."""
        arrays = (layer.centre, layer.axes, layer.codes)
        data = b"".join(
            np.ascontiguousarray(array, dtype=dtype).reshape(shape).tobytes()
            for array, (shape, dtype) in zip(arrays, self.shapes, strict=True)
        )
        return data.ljust(self.layer_bytes, b"\0")

    def unpack(self, data: memoryview | mmap.mmap, number: int) -> LayerIndex:
        """A layer's arrays, on the memory of the file."""
        at = self.header_bytes + number * self.layer_bytes
        arrays: list[npt.NDArray[Any]] = []
        for shape, dtype in self.shapes:
            count = math.prod(shape)
            arrays.append(np.frombuffer(data, dtype, count, at).reshape(shape))
            at += count * dtype.itemsize
        centre, axes, codes = arrays
        return LayerIndex(centre=centre, axes=axes, codes=codes)


def read_index(directory: Path, info: SegmentInfo) -> tuple[LayerIndex, ...] | None:
    """Maps and checks a segment's index; None where there is none, or one of another version.

    Raises:
        DamagedStoreError: it is not this segment's, or does not match its checksums.
    """
    path = directory / INDEX_FILE
    layout = IndexLayout(info=info)
    try:
        fd = open_file(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DamagedStoreError(f"cannot be read ({error.strerror})", where=str(path)) from error
    try:
        start = np.frombuffer(os.pread(fd, 16, 0).ljust(16, b"\0"), "<u8").tolist()
        if start[0] == _MAGIC and start[1] != VERSION:
            return None
        if os.fstat(fd).st_size != layout.num_bytes:
            raise DamagedStoreError("has another size than its segment needs", where=str(path))
        checksums = [
            _checksum(fd, layout, number) for number in range(info.shape.num_layers)
        ]  # with pread, which can fail in good order
        if os.pread(fd, layout.header_bytes, 0) != layout.header(checksums):
            raise DamagedStoreError("does not match its checksum", where=str(path))
        mapped = mmap.mmap(fd, layout.num_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise DamagedStoreError(f"cannot be read ({error})", where=str(path)) from error
    finally:
        os.close(fd)
    return tuple(layout.unpack(mapped, number) for number in range(info.shape.num_layers))


def _checksum(fd: int, layout: IndexLayout, number: int) -> int:
    offset = layout.header_bytes + number * layout.layer_bytes
    return int(xxhash.xxh3_64_intdigest(os.pread(fd, layout.layer_bytes, offset)))


def write_index(fd: int, info: SegmentInfo, make_layer: Callable[[int], LayerIndex]) -> None:
    """Writes an index into an empty file, one layer after the other, the header last.

    Raises:
        OSError: for the caller to map.
    """
    layout = IndexLayout(info=info)
    checksums: list[int] = []
    for number in range(info.shape.num_layers):
        data = layout.pack(make_layer(number))
        checksums.append(int(xxhash.xxh3_64_intdigest(data)))
        _write(fd, data, layout.header_bytes + number * layout.layer_bytes)
    _write(fd, layout.header(checksums), 0)


def _write(fd: int, data: bytes, offset: int) -> None:
    rest = memoryview(data)
    while rest:
        written = os.pwrite(fd, rest, offset + len(data) - len(rest))
        rest = rest[written:]

"""K and V in memory that several processes of one machine map, and one rank's heads of them."""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from tsdoc.errors import ResourceError
from tsdoc.kernels.kv import (
    KV_DTYPES,
    DevicePiece,
    KVArray,
    KVFile,
    KVPiece,
    MemoryPiece,
    PairedRows,
)


class FilePiece(PairedRows):
    """See `KVPiece`: K and V in a file that another process keeps, and checks.

    Args:
        file: Where they are.

    Raises:
        ResourceError: it is not there (any more).
    """

    on_host = True

    def __init__(self, file: KVFile) -> None:
        self.file = file
        self.start = file.start
        self.capacity = file.capacity
        self._map = _map(file)

    @property
    def content(self) -> object:
        """See `KVPiece.content`."""
        return self.file.content

    @property
    def unchecked(self) -> None:
        """See `KVPiece.unchecked`: what is read here is left to the process that keeps it."""

    def rows(self, layer: int) -> KVArray:
        """See `KVPiece.rows`."""
        file = self.file
        dtype: Any = KV_DTYPES[file.kv_dtype]
        row = (2, file.num_kv_heads, file.head_dim)
        count = self.capacity * math.prod(row)
        flat: KVArray = np.frombuffer(self._map, dtype, count, layer * file.region_bytes)
        return flat.reshape(-1, *row)

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """See `KVPiece.read`."""
        first = start - self.start
        np.copyto(out, self.rows(layer)[first : first + len(out)])

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """See `KVPiece.write`."""
        first = start - self.start
        self.rows(layer)[first : first + len(rows)] = rows

    def check_range(self, layer: int, start: int, end: int) -> None:
        """Left to the process that keeps them, which uses the same pages in the same step."""

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """As `check_range`."""

    def index(self, layer: int) -> None:
        """Ranks read all keys."""


class SharedPiece(FilePiece):
    """See `KVPiece`: memory that other processes of this machine can map; it has no name.

    Args:
        start: Position in the prompt of the first token.
        capacity: Number of tokens there is room for.
        num_layers: Layers of the model.
        num_kv_heads: Heads of K and V.
        head_dim: Numbers per head.
        kv_dtype: "bfloat16" or "float32".

    Raises:
        ResourceError: there is no such memory.
    """

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
        row_bytes = 2 * num_kv_heads * head_dim * np.dtype(KV_DTYPES[kv_dtype]).itemsize
        region = -(-capacity * row_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            self._fd = os.memfd_create("tsdoc-kv")  # gone with the last process that maps it
            os.ftruncate(self._fd, num_layers * region)
        except OSError as error:
            raise ResourceError(f"no memory to share ({error.strerror})") from error
        inode = os.fstat(self._fd).st_ino
        file = KVFile(
            path=f"/proc/{os.getpid()}/fd/{self._fd}",
            inode=inode,
            content=f"memory {os.getpid()} {inode}",
            start=start,
            capacity=capacity,
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            kv_dtype=kv_dtype,
            region_bytes=region,
            writable=True,
        )
        super().__init__(file)

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def shorten(self, capacity: int) -> None:
        """Gives up the room behind the first `capacity` tokens, so that a piece can follow."""
        self.capacity = capacity
        self.file = replace(self.file, capacity=capacity)


HostPiece = MemoryPiece | SharedPiece
"""In memory, and can be shortened."""


def make_piece(
    device: str,
    *,
    start: int,
    capacity: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str,
    num_ranks: int = 1,
) -> KVPiece:
    """Room for K and V that are kept nowhere: the CPU reads them in memory, a GPU holds them."""
    if device != "cpu":
        return DevicePiece(start=start, capacity=capacity)
    return make_host_piece(
        start=start,
        capacity=capacity,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
        num_ranks=num_ranks,
    )


def make_host_piece(
    *,
    start: int,
    capacity: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    kv_dtype: str,
    num_ranks: int = 1,
) -> HostPiece:
    """Room in the machine's memory, which several ranks share."""
    kind = MemoryPiece if num_ranks == 1 else SharedPiece
    return kind(
        start=start,
        capacity=capacity,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_dtype=kv_dtype,
    )


def _map(file: KVFile) -> mmap.mmap:
    num_bytes = file.num_layers * file.region_bytes
    flags = os.O_RDWR if file.writable else os.O_RDONLY
    try:
        fd = os.open(file.path, flags | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_ino != file.inode:
                raise ResourceError("is another file meanwhile", where=file.path)
            access = mmap.ACCESS_WRITE if file.writable else mmap.ACCESS_READ
            return mmap.mmap(fd, num_bytes, access=access)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise ResourceError(f"cannot be mapped ({error})", where=file.path) from error


class HeadPiece(PairedRows):
    """See `KVPiece`: the KV heads of one rank, in a piece that holds those of all.

    Args:
        whole: The piece; its memory is shared with the other ranks, or on a device.
        heads: The KV heads [first, last).
        written: Those of them that `write` keeps; None is all.
    """

    def __init__(
        self, whole: KVPiece, heads: tuple[int, int], written: tuple[int, int] | None = None
    ) -> None:
        self._whole = whole
        self._heads = slice(*heads)
        first, last = written or heads
        self._written = slice(first, last)
        self._kept = slice(first - heads[0], last - heads[0])

    @property
    def start(self) -> int:
        """See `KVPiece.start`."""
        return self._whole.start

    @property
    def capacity(self) -> int:
        """See `KVPiece.capacity`."""
        return self._whole.capacity

    @property
    def on_host(self) -> bool:
        """See `KVPiece.on_host`."""
        return self._whole.on_host

    @property
    def content(self) -> object:
        """See `KVPiece.content`."""
        return self._whole.content

    @property
    def file(self) -> KVFile | None:
        """See `KVPiece.file`: that of all heads."""
        return self._whole.file

    @property
    def unchecked(self) -> None:
        """See `KVPiece.unchecked`: checksums are of all heads, and some are read."""

    def rows(self, layer: int) -> KVArray:
        """See `KVPiece.rows`."""
        return self._whole.rows(layer)[:, :, self._heads]

    def read(self, layer: int, start: int, out: KVArray) -> None:
        """See `KVPiece.read`; whole pages are read, since checksums are of all heads."""
        one = self._whole.rows(layer)
        rows = np.empty((len(out), *one.shape[1:]), dtype=one.dtype)
        self._whole.read(layer, start, rows)
        np.copyto(out, rows[:, :, self._heads])

    def write(self, layer: int, start: int, rows: KVArray) -> None:
        """See `KVPiece.write`."""
        whole = self._whole
        whole.check_range(layer, start, start + len(rows))  # that the room is still there
        first = start - whole.start
        room = whole.rows(layer)[first : first + len(rows)]
        room[:, :, self._written] = rows[:, :, self._kept]

    def check_range(self, layer: int, start: int, end: int) -> None:
        """See `KVPiece.check_range`."""
        self._whole.check_range(layer, start, end)

    def check_rows(self, layer: int, positions: npt.NDArray[np.int64]) -> None:
        """See `KVPiece.check_rows`."""
        self._whole.check_rows(layer, positions)

    def index(self, layer: int) -> None:
        """Ranks read all keys."""

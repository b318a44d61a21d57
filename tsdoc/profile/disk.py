"""What the disk under the store does by itself: rates to compare with, and an empty page cache."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tsdoc.errors import StoreError

LEAST_PROBE, MOST_PROBE = 256 << 20, 2 << 30  # bytes that are written
MOST_READ = 16 << 30  # bytes that are read
PROBE_LIMIT_S = 4.0
PROBE_PART = 32 << 20
READERS = 8  # requests under way, as when the store is read
SAMPLES = 64  # places of a file that are looked at
CACHED_RATIO = 0.05  # of them that may still be in the page cache


def write_rate(directory: Path, num_bytes: int) -> float:
    """Bytes per second that the disk takes, fsync included: noise into one plain file.

    Raises:
        StoreError: it cannot be written.
    """
    wanted = min(max(num_bytes, LEAST_PROBE), MOST_PROBE)
    part = np.random.default_rng(0).integers(0, 255, PROBE_PART, dtype=np.uint8).tobytes()
    path = directory / "probe"
    written = 0
    begun = time.perf_counter()
    try:
        with path.open("wb", buffering=0) as file:
            while written < wanted and time.perf_counter() - begun < PROBE_LIMIT_S:
                written += file.write(part)
            os.fsync(file.fileno())
        return written / (time.perf_counter() - begun)
    except OSError as error:
        raise StoreError(f"cannot be written ({error.strerror})", where=str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def read_rate(path: Path) -> float:
    """Bytes per second that come from a file which is not in the page cache.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file, ThreadPoolExecutor(READERS) as readers:
            fd, size = file.fileno(), min(os.fstat(file.fileno()).st_size, MOST_READ)
            begun = time.perf_counter()

            def read(offset: int) -> int:
                if time.perf_counter() - begun > PROBE_LIMIT_S:
                    return 0
                return len(os.pread(fd, PROBE_PART, offset))

            total = sum(readers.map(read, range(0, size, PROBE_PART)))
            return total / (time.perf_counter() - begun)
    except OSError as error:
        raise StoreError(f"cannot be read ({error.strerror})", where=str(path)) from error


def leave_page_cache(directory: Path) -> bool:
    """Asks the system to forget what it caches of the files below; returns whether it did.

    Only Linux can be asked both.

    Raises:
        StoreError: a file cannot be read, or not be written to the disk.
    """
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        for path in _files(directory):
            with path.open("rb", buffering=0) as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return all(_cached_ratio(path) <= CACHED_RATIO for path in _files(directory))
    except OSError as error:
        raise StoreError(f"cannot be read ({error.strerror})", where=str(directory)) from error


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _cached_ratio(path: Path) -> float:
    """Share of some places of a large file that can be read without the disk."""
    size = path.stat().st_size
    if size < SAMPLES * (1 << 20):  # what is read ahead of one place would be others
        return 0.0
    cached = 0
    with path.open("rb", buffering=0) as file:
        for offset in range(0, size, size // SAMPLES):
            try:
                cached += os.preadv(file.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) > 0
            except BlockingIOError:
                continue
            except OSError:  # this file system cannot say
                return 1.0
    return cached / SAMPLES

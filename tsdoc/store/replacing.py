"""Files that are written while others may clean up: replaced as a whole, locked until then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tsdoc.store.files import fsync_dir, open_file, temporaries, temporary_name
from tsdoc.store.locks import try_exclusive


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[int]:
    """Yields a descriptor to write a file by that takes the place of `path` at the end.

    Until then it has a temporary name, under which `drop_temporary` leaves it alone. It is gone
    when the `with` block is left by an exception.

    Raises:
        StoreError: the file system has no locks.
        OSError: it cannot be written.
    """
    lock = None
    while lock is None:  # somebody who cleans up can come between its creation and its lock
        temporary = temporary_name(path)
        lock = try_exclusive(temporary)
    with lock:
        try:
            fd = open_file(temporary, os.O_WRONLY)
            try:
                yield fd
                os.fsync(fd)
            finally:
                os.close(fd)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    fsync_dir(path.parent)


def drop_temporary(directory: Path) -> None:
    """Deletes the temporary files that nobody is writing.

    Raises:
        StoreError: the file system has no locks, or one is no file of ours.
        OSError: one cannot be deleted.
    """
    for path in temporaries(directory):
        lock = try_exclusive(path)
        if lock is not None:
            with lock, contextlib.suppress(FileNotFoundError):
                path.unlink()


def write_all(fd: int, *parts: bytes | memoryview) -> None:
    """Writes all bytes of all parts, in order."""
    for part in parts:
        rest = memoryview(part)
        while rest:
            rest = rest[os.write(fd, rest) :]

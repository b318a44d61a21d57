"""Advisory locks that die with their owner, on files that may be deleted while one waits."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tsdoc.errors import StoreError
from tsdoc.home import READ_ONLY
from tsdoc.store.files import open_file

_BUSY = frozenset({errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK})
_POLL_S = 0.05
_SHARED_WAIT_S = 10.0


class Lock:
    """A held lock; released by `release`, by leaving a `with` block, or by the process's death."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def release(self) -> None:
        """Gives the lock back; a second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def lock_exclusive(path: Path, *, on_wait: Callable[[], None] | None = None) -> Lock:
    """Waits for the exclusive lock of `path`, creating the file.

    `on_wait` is called about every 50 ms while another process holds it.

    Raises:
        FileNotFoundError: the directory is gone.
        StoreError: the file system has no locks, or the file is not ours.
    """
    while True:
        lock = try_exclusive(path)
        if lock is not None:
            return lock
        if on_wait is not None:
            on_wait()
        time.sleep(_POLL_S)


def try_exclusive(path: Path) -> Lock | None:
    """Takes the exclusive lock of `path` if nobody holds it, else returns None."""
    while True:
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        if not _take(fd, path, shared=False):
            return None
        if _is_still(fd, path):
            return Lock(fd)
        os.close(fd)


def is_held(path: Path) -> bool:
    """Tells whether somebody holds the lock of `path`, shared or not; makes no file.

    Raises:
        StoreError: the file system has no locks, or the file is not ours.
        OSError: it cannot be opened.
    """
    try:
        fd = _open_for_sharing(path, create=False)
    except FileNotFoundError:
        return False
    if not _take(fd, path, shared=False):
        return True
    os.close(fd)
    return False


def lock_shared(path: Path, *, create: bool) -> Lock | None:
    """Takes a shared lock: it keeps others from the exclusive one, who never hold it for long.

    Returns:
        None where there is no such file and none is to be made (a read-only store has no need of
        protection from deletion).

    Raises:
        StoreError: the file system has no locks, or somebody does not let go.
    """
    deadline = time.monotonic() + _SHARED_WAIT_S
    while True:
        try:
            fd = _open_for_sharing(path, create=create)
        except FileNotFoundError:
            return None
        if _take(fd, path, shared=True):
            if _is_still(fd, path):
                return Lock(fd)
            os.close(fd)
        elif time.monotonic() > deadline:
            raise StoreError("is being deleted by another process", where=str(path))
        else:
            time.sleep(_POLL_S / 10)


def _open_for_sharing(path: Path, *, create: bool) -> int:
    try:
        return open_file(path, os.O_RDWR | (os.O_CREAT if create else 0))
    except OSError as error:
        if error.errno not in READ_ONLY:
            raise
    return open_file(path, os.O_RDONLY)


def _take(fd: int, path: Path, *, shared: bool) -> bool:
    """Locks `fd` without waiting; closes it and returns False when somebody else holds it."""
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in _BUSY:
            return False
        raise StoreError(
            f"the file system offers no locks ({error.strerror})",
            where=str(path),
            hint="Point TSDOC_HOME to a local disk.",
        ) from error
    return True


def _is_still(fd: int, path: Path) -> bool:
    """Tells whether `path` still names the locked file; its owner may have deleted it meanwhile."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False

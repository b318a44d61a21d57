"""TSDOC_HOME: where models, KV entries and records live, private to the user."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from tsdoc.errors import DiskFullError, StoreError, UsageError
from tsdoc.terminal import format_bytes

READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
"""What writing fails with where this user may only read."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What writing fails with where there is no room."""

NOT_WRITABLE = "Point TSDOC_HOME to a directory you can write."
TOO_LARGE = "files may not get that large here"
LARGER_FILES = "Raise `ulimit -f`, or point TSDOC_HOME to another file system."
MORE_SPACE = "Free space, `tsdoc cache prune`, or point TSDOC_HOME to another disk."


@dataclass(frozen=True, slots=True)
class Home:
    """Paths under TSDOC_HOME. Sub-directories are created, mode 0700, by `private_dir`."""

    root: Path

    @property
    def models(self) -> Path:
        """Converted models, one directory each."""
        return self.root / "models"

    @property
    def store(self) -> Path:
        """KV segments and entries."""
        return self.root / "store"

    @property
    def records(self) -> Path:
        """Source records."""
        return self.root / "records"

    @property
    def conversations(self) -> Path:
        """Conversations that were given a name."""
        return self.root / "conversations"

    @property
    def evals(self) -> Path:
        """Results of `tsdoc eval`."""
        return self.root / "evals"


def find_home() -> Home:
    """Returns the home that `TSDOC_HOME` names, or the platform's user data directory.

    The home itself may be reached through a link, which is the user's own choice, as long as the
    directory behind it is the user's; links inside it are never followed.

    Raises:
        UsageError: TSDOC_HOME is not an absolute path, or no directory.
        StoreError: it belongs to another user, or cannot be reached.
    """
    value = os.environ.get("TSDOC_HOME")
    if value:
        if not Path(value).is_absolute():
            raise UsageError("TSDOC_HOME must be an absolute path", where=value)
        root = Path(value)
        try:
            exists = root.exists()
        except OSError as error:
            raise write_error(error, root, "looking into the directory") from error
        if exists and not root.is_dir():
            raise UsageError(
                "TSDOC_HOME is a file where a directory is needed", where=value, hint=NOT_WRITABLE
            )
        if exists and hasattr(os, "getuid") and root.stat().st_uid != os.getuid():
            raise StoreError(
                "belongs to another user", where=value, hint="Point TSDOC_HOME elsewhere."
            )
        return Home(root.resolve())
    import platformdirs

    return Home(Path(platformdirs.user_data_dir("tsdoc", appauthor=False)))


def write_error(
    error: OSError, path: Path, doing: str, *, hint: str = NOT_WRITABLE
) -> StoreError | DiskFullError:
    """Maps what writing below the home fails with to the error of tsdoc that the user sees.

    Args:
        error: What the operating system said.
        path: What was to be written.
        doing: What failed, as the beginning of a sentence.
        hint: What to do where this user may only read.
    """
    if error.errno == errno.EFBIG:
        return DiskFullError(f"{doing} failed: {TOO_LARGE}", where=str(path), hint=LARGER_FILES)
    if error.errno in FULL:
        return DiskFullError(
            f"{doing} failed: the disk is full ({format_bytes(free_bytes(path))} free)",
            where=str(path),
            hint=MORE_SPACE,
        )
    return StoreError(
        f"{doing} failed ({error.strerror or error})",
        where=str(path),
        hint=hint if error.errno in READ_ONLY else None,
    )


def free_bytes(path: Path) -> int:
    """Bytes that this user may still write on the disk of `path` (or of its nearest parent)."""
    while not path.exists() and path != path.parent:
        path = path.parent
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def private_dir(path: Path, *, hint: str = NOT_WRITABLE) -> Path:
    """Creates `path` (and parents) readable by the user alone, and returns it.

    Args:
        path: A directory below the home, or the home itself.
        hint: What to do where it cannot be made.

    Raises:
        StoreError: it is a link, not a directory, owned by somebody else, or cannot be made.
        DiskFullError: the disk is full.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        if error.errno in FULL:
            raise write_error(error, path, "making the directory") from error
        raise StoreError(
            f"directory cannot be made ({error.strerror})", where=str(path), hint=hint
        ) from error
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError("is a link or a file where a directory is needed", where=str(path))
    if hasattr(os, "getuid") and info.st_uid != os.getuid():
        raise StoreError(
            "belongs to another user", where=str(path), hint="Point TSDOC_HOME elsewhere."
        )
    if info.st_mode & 0o077:
        try:
            path.chmod(0o700)
        except OSError as error:
            raise StoreError(
                f"is open to other users and cannot be closed ({error.strerror})",
                where=str(path),
                hint=hint,
            ) from error
    return path

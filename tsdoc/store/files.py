"""Careful file access: private files, no links, no foreign owners, checked JSON, reserved space."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from tsdoc.errors import DamagedStoreError, DiskFullError, StoreError, StoreFormatError
from tsdoc.home import FULL, MORE_SPACE, free_bytes, write_error
from tsdoc.store.key import FORMAT
from tsdoc.terminal import format_bytes

JSON_LIMIT = 4 << 20
"""Largest JSON file that is read, in bytes."""

PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE

HEX_NAME = re.compile(r"[0-9a-f]{32}")
_TEMP_NAME = re.compile(r"\.tmp-[0-9a-f]{16}")
STORE_NOT_WRITABLE = (
    "Point TSDOC_HOME to a directory you can write, or keep nothing with --no-store."
)
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def store_error(error: OSError, path: Path, doing: str) -> StoreError | DiskFullError:
    """Maps an OSError to the error of tsdoc that the user sees."""
    return write_error(error, path, doing, hint=STORE_NOT_WRITABLE)


def open_file(path: Path, flags: int) -> int:
    """Opens one of the store's own files, mode 0600, and returns the descriptor.

    Raises:
        DamagedStoreError: it is a link, not a regular file, or belongs to another user.
        OSError: anything else, for the caller to map.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedStoreError(
                "is a link, and links are not followed", where=str(path)
            ) from None
        raise
    info = os.fstat(fd)
    if is_own_file(info):
        return fd
    os.close(fd)
    what = "belongs to another user" if stat.S_ISREG(info.st_mode) else "is not a regular file"
    raise DamagedStoreError(what, where=str(path))


def is_own_file(info: os.stat_result) -> bool:
    """Tells whether that is a regular file (no link) of this user."""
    return stat.S_ISREG(info.st_mode) and info.st_uid == os.getuid()


def own_dir(path: Path) -> bool:
    """Tells whether `path` is a directory (no link) of this user; False where nothing is.

    Raises:
        StoreError: something else is there.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise store_error(error, path, "reading the directory") from error
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError("is a link or a file where a directory is needed", where=str(path))
    if info.st_uid != os.getuid():
        raise StoreError("belongs to another user", where=str(path))
    return True


def named_dirs(path: Path) -> Iterator[Path]:
    """Yields the sub-directories of `path` whose names are of our format, sorted by name.

    Raises:
        StoreError: `path` is not ours, or cannot be read.
    """
    if not own_dir(path):
        return
    try:
        children = sorted(path.iterdir())
    except FileNotFoundError:  # deleted meanwhile
        return
    except OSError as error:
        raise store_error(error, path, "reading the directory") from error
    for child in children:
        if HEX_NAME.fullmatch(child.name):
            with contextlib.suppress(StoreError):
                if own_dir(child):
                    yield child


def read_file(path: Path, limit: int) -> bytes:
    """Reads a whole file of at most `limit` bytes.

    Raises:
        DamagedStoreError: it is missing, unreadable or larger.
    """
    try:
        fd = open_file(path, os.O_RDONLY)
    except OSError as error:
        raise DamagedStoreError(f"cannot be read ({error.strerror})", where=str(path)) from error
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        if size > limit:
            raise DamagedStoreError(f"is {size:,} bytes, more than {limit:,}", where=str(path))
        try:
            return file.read(limit)
        except OSError as error:
            raise DamagedStoreError(f"cannot be read ({error})", where=str(path)) from error


def _digest(payload: Mapping[str, Any]) -> str:
    text = json.dumps(payload, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def read_json(path: Path, kind: str, *, oldest: int = FORMAT) -> dict[str, Any]:
    """Reads a JSON file of the store and checks its kind, format and checksum.

    Raises:
        StoreFormatError: a format version before `oldest`, or a newer one than ours, wrote it.
        DamagedStoreError: it is missing, no such file, or does not match its checksum.
    """
    data = read_file(path, JSON_LIMIT)
    try:
        payload = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError("is not valid JSON", where=str(path)) from error
    if not isinstance(payload, dict) or payload.get("kind") != kind:
        raise DamagedStoreError(f"is not a tsdoc {kind} file", where=str(path))
    version = payload.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        raise DamagedStoreError("has no format version", where=str(path))
    if not oldest <= version <= FORMAT:
        age = "a newer" if version > FORMAT else "an older"
        raise StoreFormatError(
            f"has format {version} of {age} tsdoc (this one writes {FORMAT})",
            where=str(path),
            version=version,
        )
    if payload.pop("checksum", None) != _digest(payload):
        raise DamagedStoreError("does not match its checksum", where=str(path))
    return payload


def write_json(path: Path, kind: str, payload: Mapping[str, Any]) -> None:
    """Writes a JSON file as `replace_file` does.

    Raises:
        OSError: for the caller to map.
    """
    full = {**payload, "kind": kind, "format": FORMAT}
    full["checksum"] = _digest(full)
    replace_file(path, json.dumps(full, indent=1, sort_keys=True).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Writes a file atomically: temporary file, fsync, rename, fsync of the directory.

    Raises:
        OSError: for the caller to map.
    """
    temporary = temporary_name(path)
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def write_new(path: Path, *parts: bytes | memoryview) -> None:
    """Creates a file that must not exist, writes `parts` and fsyncs it."""
    with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def fsync_dir(path: Path) -> None:
    """Makes creations, renames and deletions in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def reserve(fd: int, num_bytes: int, path: Path) -> None:
    """Gives the file its full size with every block allocated, so that mapped writes cannot fail.

    Raises:
        DiskFullError: there is no room; the file is left empty.
        OSError: anything else, for the caller to map.
    """
    free = free_bytes(path) + os.fstat(fd).st_blocks * 512
    try:
        if free < num_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        _allocate(fd, num_bytes)
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.ftruncate(fd, 0)
        raise no_room(path, num_bytes, free) from error
    os.fsync(fd)


def no_room(path: Path, num_bytes: int, free: int) -> DiskFullError:
    """The error that the user sees where the disk of `path` cannot take K and V."""
    return DiskFullError(
        f"the KV pages need {format_bytes(num_bytes)} of disk and {format_bytes(free)} are free",
        where=str(path),
        hint=MORE_SPACE,
    )


def release(fd: int, offset: int, num_bytes: int) -> None:
    """Gives the disk back what holds these bytes of a file, which are zeros then.

    Where the file system cannot do that, zeros are written.

    Raises:
        OSError: nor can they.
    """
    if sys.platform == "linux":
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
        if fallocate(fd, PUNCH_HOLE, offset, num_bytes) == 0:
            return
    zeros = bytes(1 << 20)
    end = offset + num_bytes
    while offset < end:
        offset += os.pwrite(fd, zeros[: end - offset], offset)


def _allocate(fd: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    zeros = bytes(1 << 20)
    offset = os.fstat(fd).st_size
    while offset < num_bytes:
        offset += os.pwrite(fd, zeros[: num_bytes - offset], offset)


def temporary_name(path: Path) -> Path:
    """A name beside `path`, for what will replace it."""
    return path.with_name(f".tmp-{secrets.token_hex(8)}")


def temporaries(directory: Path) -> list[Path]:
    """What is called like a temporary file of ours.

    Raises:
        OSError: the directory cannot be read.
    """
    return [path for path in directory.iterdir() if _TEMP_NAME.fullmatch(path.name)]


def has_ours(path: Path, names: tuple[str, ...]) -> bool:
    """Tells whether a directory is empty or holds a file of these names or a temporary one."""
    try:
        children = [child.name for child in path.iterdir()]
    except OSError:  # deleted meanwhile, or not to be read
        return False
    return not children or any(n in names or _TEMP_NAME.fullmatch(n) for n in children)


def delete_dir(path: Path, names: tuple[str, ...]) -> bool:
    """Deletes the files `names` in that order, our temporary files, and the emptied directory.

    Anything else in the directory stays, and so does the directory then.

    Returns:
        Whether the directory is gone.
    """
    for name in (*names, *(temporary.name for temporary in temporaries(path))):
        with contextlib.suppress(FileNotFoundError):
            (path / name).unlink()
    try:
        path.rmdir()
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True

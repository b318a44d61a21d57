"""Private files that carry their own checksum."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from tsdoc.home import write_error
from tsdoc.regular import read_own


def write_checked(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object under the SHA-256 of its bytes, readable by the user alone, atomically.

    Raises:
        StoreError: it cannot be written.
        ResourceError: the disk is full.
    """
    # Escapes keep lone surrogates (undecodable file names) writable.
    body = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    data = hashlib.sha256(body).hexdigest().encode("ascii") + b"\n" + body
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        write_private(temporary, data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where one may only read, it says so again
            temporary.unlink()
        raise write_error(error, path, "writing it") from error


def read_checked(path: Path) -> dict[str, Any] | None:
    """Returns what `write_checked` wrote; None when it is missing, damaged, a link or foreign."""
    try:
        info = path.lstat()
        if _is_ours(info):
            checksum, _, body = read_own(path).partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode("ascii") == checksum:
                value = json.loads(body)
                return value if isinstance(value, dict) else None
    except OSError:
        return None
    return None


def write_private(path: Path, data: bytes) -> None:
    """Writes a new file with mode 0600.

    It is not synced: what a power cut leaves of it does not match its checksum.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _is_ours(info: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or info.st_uid == os.getuid()

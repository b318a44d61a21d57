"""votes.bin and shares.bin: what was found out about an entry, so that it is once. See FORMAT.md.

Nothing depends on it but time: whatever is wrong with it, it is as if it were missing.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from tsdoc.errors import DamagedStoreError
from tsdoc.store.files import open_file
from tsdoc.store.replacing import replacing, write_all

VOTES_FILE = "votes.bin"  # what any question looks at
SHARES_FILE = "shares.bin"  # how well the key index selects
VERSION = 1
_MAGIC = int.from_bytes(b"TSDOCVOT", "little")
_WORDS = 8

Votes = npt.NDArray[np.float32]


def read_votes(path: Path, entry_id: str, asked: bytes, shape: tuple[int, int]) -> Votes | None:
    """Returns the votes, or shares, kept in an entry's directory.

    Args:
        path: Of the file.
        entry_id: Of the entry.
        asked: Stands for what was asked, and how.
        shape: [num_layers, num_positions].

    Returns:
        float32, read-only; None where there are none for `asked`, or they are damaged.
    """
    size = 4 * shape[0] * shape[1]
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            data = file.read(8 * _WORDS + size + 1)
    except (OSError, DamagedStoreError):
        return None
    body = memoryview(data)[8 * _WORDS :]
    if len(body) != size or data[: 8 * _WORDS] != _header(entry_id, asked, shape, body):
        return None
    return np.frombuffer(body, "<f4").reshape(shape)


def write_votes(path: Path, entry_id: str, asked: bytes, votes: Votes) -> None:
    """Keeps votes [num_layers, num_positions] with an entry, instead of what was kept before.

    Raises:
        OSError: they cannot be written.
        StoreError: the file system has no locks.
    """
    body = memoryview(np.ascontiguousarray(votes, dtype="<f4").tobytes())
    with replacing(path) as fd:
        write_all(fd, _header(entry_id, asked, votes.shape, body), body)


def _header(entry_id: str, asked: bytes, shape: tuple[int, ...], body: memoryview) -> bytes:
    words = [
        _MAGIC,
        VERSION,
        int(entry_id[:16], 16),
        int(entry_id[16:], 16),
        *shape,
        xxhash.xxh3_64_intdigest(asked),
        xxhash.xxh3_64_intdigest(body),
    ]
    return np.array(words, dtype="<u8").tobytes()

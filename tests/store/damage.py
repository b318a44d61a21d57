"""Ways to damage a store, and what a session does about it."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.store.synthetic import (
    BLOCK,
    KEY,
    SHAPE,
    expected,
    heal,
    make_ids,
    make_key,
    prefill,
    read,
)
from tsdoc.store import Store
from tsdoc.store.files import write_json
from tsdoc.store.key import Ids

IDS = make_ids(1900)
ReadAt = Callable[[int, Any, int], Any]
"""`os.pread`, or `os.preadv`: into buffers instead of a number of bytes."""

OLD_KEY = make_key(layout=1)
"""A model key of version 1, which names that version."""


def find(root: Path, name: str) -> Path:
    return next(root.rglob(name))


def flip(path: Path, offset: int, bit: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= bit
    path.write_bytes(bytes(data))


def rewrite_as_version_1(root: Path) -> None:
    """Makes what was built under OLD_KEY what version 1 wrote, but for kv.bin and journal.bin."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr("tsdoc.store.files.FORMAT", 1)
        for path in (root / OLD_KEY.digest).rglob("*.json"):
            payload = json.loads(path.read_text())
            kind = payload["kind"]
            own = {k: v for k, v in payload.items() if k not in ("kind", "format", "checksum")}
            write_json(path, kind, own)


def ask(store: Store, ids: Ids = IDS) -> list[tuple[int, int]]:
    """What a session does: open or prefill, and repair what turns out to be damaged."""
    entry = store.open(KEY, ids)
    if entry is None:
        with store.begin(KEY, SHAPE, ids, prefill_block=BLOCK, name="doc") as writer:
            prefill(writer, ids)
            entry = writer.finish()
    with entry:
        repaired = heal(store, entry)
        assert np.array_equal(entry.ids, ids)
        assert np.array_equal(read(entry), expected(ids))
    return repaired


def failing_at(bad: set[int], real: ReadAt) -> ReadAt:
    """`os.pread` or `os.preadv` of a disk that cannot read the offsets `bad`."""

    def read_at(fd: int, target: Any, offset: int) -> Any:
        size = target if isinstance(target, int) else sum(map(len, target))
        if bad & set(range(offset, offset + size)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, target, offset)

    return read_at

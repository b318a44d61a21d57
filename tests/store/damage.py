"""Ways to damage a store, and what a session does about it."""

import errno

import numpy as np

from tests.store.synthetic import BLOCK, KEY, SHAPE, expected, heal, make_ids, prefill, read

IDS = make_ids(1900)


def find(root, name):
    return next(root.rglob(name))


def flip(path, offset, bit=1):
    data = bytearray(path.read_bytes())
    data[offset % len(data)] ^= bit
    path.write_bytes(bytes(data))


def ask(store, ids=IDS):
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


def failing_at(bad, real):
    """`os.pread` or `os.preadv` of a disk that cannot read the offsets `bad`."""

    def read_at(fd, target, offset):
        size = target if isinstance(target, int) else sum(map(len, target))
        if bad & set(range(offset, offset + size)):
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, target, offset)

    return read_at

"""tokens.bin: the token ids that a segment and its parents hold, and their chunk hashes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tsdoc.errors import DamagedStoreError
from tsdoc.store.files import open_file, write_new
from tsdoc.store.key import FORMAT, Hashes, Ids

_MAGIC = int.from_bytes(b"TSDOCTOK", "little")
_WORDS = 9
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensHeader:
    """The beginning of tokens.bin.

    Attributes:
        hashes: Rolling hash after every whole chunk, [num_tokens // chunk_size, 2].
    """

    path: Path
    num_tokens: int
    hashes: Hashes
    ids_digest: int
    ids_offset: int


def write_tokens(path: Path, segment_id: str, ids: Ids, hashes: Hashes, chunk_size: int) -> None:
    """Writes tokens.bin, which must not exist.

    Raises:
        OSError: for the caller to map.
    """
    words = [
        _MAGIC,
        FORMAT,
        int(segment_id[:16], 16),
        int(segment_id[16:], 16),
        len(ids),
        chunk_size,
        xxhash.xxh3_64_intdigest(hashes.tobytes()),
        xxhash.xxh3_64_intdigest(ids.data.cast("B")),
    ]
    head = np.array(words, dtype="<u8").tobytes()
    head += int(xxhash.xxh3_64_intdigest(head)).to_bytes(8, "little")
    write_new(path, head, hashes.astype("<u8").tobytes(), ids.data.cast("B"))


def read_header(path: Path, *, segment_id: str, num_tokens: int, chunk_size: int) -> TokensHeader:
    """Reads header and chunk hashes, and checks them against what segment.json says.

    Raises:
        DamagedStoreError: missing, of the wrong size, damaged, or of another segment.
    """
    num_chunks = num_tokens // chunk_size
    offset = 8 * _WORDS + 16 * num_chunks
    data = _read(path, 0, offset, total=offset + 4 * num_tokens)
    words = [int(word) for word in np.frombuffer(data, dtype="<u8", count=_WORDS)]
    expected = [
        _MAGIC,
        FORMAT,
        int(segment_id[:16], 16),
        int(segment_id[16:], 16),
        num_tokens,
        chunk_size,
    ]
    body = data[8 * _WORDS :]
    seal = xxhash.xxh3_64_intdigest(data[: 8 * (_WORDS - 1)])
    if words[:6] != expected or words[8] != seal or words[6] != xxhash.xxh3_64_intdigest(body):
        raise DamagedStoreError("is damaged or of another segment", where=str(path))
    return TokensHeader(
        path=path,
        num_tokens=num_tokens,
        hashes=np.frombuffer(body, dtype="<u8").reshape(-1, 2),
        ids_digest=words[7],
        ids_offset=offset,
    )


def read_ids(header: TokensHeader) -> Ids:
    """Reads all token ids, int32 [num_tokens].

    Raises:
        DamagedStoreError: they do not match their checksum.
    """
    size = 4 * header.num_tokens
    data = _read(header.path, header.ids_offset, size, total=header.ids_offset + size)
    if xxhash.xxh3_64_intdigest(data) != header.ids_digest:
        raise DamagedStoreError("does not match its checksum", where=str(header.path))
    return np.frombuffer(data, dtype="<i4")


def _read(path: Path, offset: int, size: int, *, total: int) -> bytes:
    if total > 24 * _MAX_TOKENS:
        raise DamagedStoreError("would be impossibly large", where=str(path))
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != total:
                raise DamagedStoreError(
                    f"has {found:,} bytes instead of {total:,}", where=str(path)
                )
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise DamagedStoreError(f"cannot be read ({error.strerror})", where=str(path)) from error
    if len(data) != size:
        raise DamagedStoreError("was cut short while it was read", where=str(path))
    return data

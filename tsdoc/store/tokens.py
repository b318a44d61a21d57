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
_WORDS = 13
_MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensPeek:
    """The first bytes of tokens.bin: enough to pass over segments of other prompts.

    Attributes:
        first_hash: Hash of the first chunk (two words), zeros where there is no whole chunk.
    """

    path: Path
    num_tokens: int
    chunk_size: int
    entry_id: str
    first_hash: tuple[int, int]
    hashes_digest: int
    ids_digest: int

    @property
    def ids_offset(self) -> int:
        """Where the ids begin."""
        return tokens_bytes(self.num_tokens, self.chunk_size) - 4 * self.num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensHeader:
    """The beginning of tokens.bin.

    Attributes:
        num_tokens: Number of ids that the segment holds.
        hashes: Rolling hash after every whole chunk, [num_tokens // chunk_size, 2].
    """

    peek: TokensPeek
    num_tokens: int
    hashes: Hashes


def tokens_bytes(num_tokens: int, chunk_size: int) -> int:
    """Exact size of tokens.bin."""
    return 8 * _WORDS + 16 * (num_tokens // chunk_size) + 4 * num_tokens


def first_hash(hashes: Hashes) -> tuple[int, int]:
    """Hash of the first chunk, zeros where there is none."""
    return (int(hashes[0, 0]), int(hashes[0, 1])) if len(hashes) else (0, 0)


def _halves(name: str) -> list[int]:
    return [int(name[:16], 16), int(name[16:], 16)]


def write_tokens(
    path: Path, *, segment_id: str, entry_id: str, ids: Ids, hashes: Hashes, chunk_size: int
) -> None:
    """Writes tokens.bin, which must not exist.

    Raises:
        OSError: for the caller to map.
    """
    words = [
        _MAGIC,
        FORMAT,
        *_halves(segment_id),
        *_halves(entry_id),
        len(ids),
        chunk_size,
        *first_hash(hashes),
        xxhash.xxh3_64_intdigest(hashes.tobytes()),
        xxhash.xxh3_64_intdigest(ids.data.cast("B")),
    ]
    head = np.array(words, dtype="<u8").tobytes()
    head += int(xxhash.xxh3_64_intdigest(head)).to_bytes(8, "little")
    write_new(path, head, hashes.astype("<u8").tobytes(), ids.data.cast("B"))


def peek_tokens(directory: Path) -> TokensPeek:
    """Reads the first bytes of a segment's tokens.bin.

    Raises:
        DamagedStoreError: missing, damaged, or of another segment.
    """
    path = directory / "tokens.bin"
    data = _read(path, 0, 8 * _WORDS)
    words = [int(word) for word in np.frombuffer(data, dtype="<u8")]
    seal = xxhash.xxh3_64_intdigest(data[: 8 * (_WORDS - 1)])
    expected = [_MAGIC, FORMAT, *_halves(directory.name)]
    sane = 0 < words[6] <= _MAX_TOKENS and 0 < words[7] <= _MAX_TOKENS
    if words[-1] != seal or words[:4] != expected or not sane:
        raise DamagedStoreError("is damaged or of another segment", where=str(path))
    return TokensPeek(
        path=path,
        entry_id=f"{words[4]:016x}{words[5]:016x}",
        num_tokens=words[6],
        chunk_size=words[7],
        first_hash=(words[8], words[9]),
        hashes_digest=words[10],
        ids_digest=words[11],
    )


def read_header(
    directory: Path, *, entry_id: str, num_tokens: int, chunk_size: int
) -> TokensHeader:
    """Reads header and chunk hashes, and checks them against what segment.json says.

    The file may hold more: the segment was cut, and what did it was killed before it came to this.

    Raises:
        DamagedStoreError: missing, of the wrong size, damaged, or of another segment.
    """
    peek = peek_tokens(directory)
    is_longer = peek.num_tokens > num_tokens
    fits = is_longer or (peek.entry_id, peek.num_tokens) == (entry_id, num_tokens)
    if not fits or peek.chunk_size != chunk_size:
        raise DamagedStoreError("does not fit segment.json", where=str(peek.path))
    total = tokens_bytes(peek.num_tokens, chunk_size)
    body = _read(peek.path, 8 * _WORDS, peek.ids_offset - 8 * _WORDS, total=total)
    if xxhash.xxh3_64_intdigest(body) != peek.hashes_digest:
        raise DamagedStoreError("does not match its checksum", where=str(peek.path))
    hashes = np.frombuffer(body, dtype="<u8").reshape(-1, 2)[: num_tokens // chunk_size]
    return TokensHeader(peek=peek, num_tokens=num_tokens, hashes=hashes)


def read_ids(header: TokensHeader) -> Ids:
    """Reads the segment's token ids, int32 [num_tokens]; see `read_all_ids`."""
    return read_all_ids(header.peek)[: header.num_tokens]


def read_all_ids(peek: TokensPeek) -> Ids:
    """Reads all token ids, int32 [num_tokens].

    Raises:
        DamagedStoreError: they do not match their checksum.
    """
    data = _read(peek.path, peek.ids_offset, 4 * peek.num_tokens)
    if xxhash.xxh3_64_intdigest(data) != peek.ids_digest:
        raise DamagedStoreError("does not match its checksum", where=str(peek.path))
    return np.frombuffer(data, dtype="<i4")


def _read(path: Path, offset: int, size: int, *, total: int | None = None) -> bytes:
    try:
        with os.fdopen(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
            found = os.fstat(file.fileno()).st_size
            if found != total and (total is not None or found < offset + size):
                wanted = total if total is not None else offset + size
                raise DamagedStoreError(
                    f"has {found:,} bytes instead of {wanted:,}", where=str(path)
                )
            file.seek(offset)
            data = file.read(size)
    except OSError as error:
        raise DamagedStoreError(f"cannot be read ({error.strerror})", where=str(path)) from error
    if len(data) != size:
        raise DamagedStoreError("was cut short while it was read", where=str(path))
    return data

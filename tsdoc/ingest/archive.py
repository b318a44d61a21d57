"""Members of a zip archive, read in memory under limits; nothing is ever extracted by name."""

from __future__ import annotations

import posixpath
import zipfile
import zlib
from pathlib import Path

from tsdoc.errors import InputError
from tsdoc.ingest.options import MIB, Limits

_BLOCK = 1 << 16


class Archive:
    """An opened archive.

    Raises:
        InputError: not a zip archive, or one with too many members.
    """

    def __init__(self, path: Path, limits: Limits) -> None:
        self._limits = limits
        self._inflated = 0
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise InputError(f"is not a readable archive ({error})") from error
        members = self._zip.infolist()
        if len(members) > limits.num_members:
            raise InputError(f"holds {len(members):,} members; the limit is {limits.num_members:,}")
        # A name may occur twice; as in other tools, the later one counts.
        self._members = {_plain(member.filename): member for member in members}

    def names(self) -> frozenset[str]:
        """Returns the names of all members, normalised."""
        return frozenset(self._members)

    def __contains__(self, name: str) -> bool:
        return _plain(name) in self._members

    def read(self, name: str) -> bytes:
        """Returns the content of a member.

        Raises:
            InputError: no such member, damaged, encrypted, or too large when decompressed.
        """
        member = self._members.get(_plain(name))
        if member is None:
            raise InputError(f"{name} is missing from the archive")
        if member.flag_bits & 1:
            raise InputError(f"{name} is encrypted")
        blocks: list[bytes] = []
        size = 0
        try:
            with self._zip.open(member) as file:
                while block := file.read(_BLOCK):
                    blocks.append(block)
                    size += len(block)
                    self._inflated += len(block)
                    self._check(name, size, max(1, member.compress_size))
        except (
            zipfile.BadZipFile,
            zlib.error,
            OSError,
            EOFError,
            ValueError,
            RuntimeError,
            NotImplementedError,
        ) as error:
            raise InputError(f"{name} is damaged ({error})") from error
        return b"".join(blocks)

    def _check(self, name: str, size: int, packed: int) -> None:
        limits = self._limits
        too_dense = size > MIB and size > packed * limits.inflate_ratio
        if too_dense or size > limits.member_bytes or self._inflated > limits.inflated_bytes:
            raise InputError(f"{name} is too large when decompressed")


def _plain(name: str) -> str:
    return posixpath.normpath(name.replace("\\", "/")).lstrip("/")

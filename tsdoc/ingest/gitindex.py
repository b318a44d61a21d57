"""The names in a git index (`.git/index`, versions 2 to 4), read without git.

The file is foreign data: whatever does not parse gives an empty answer.
"""

from __future__ import annotations

from pathlib import Path

_FIXED_BYTES = 62
_EXTENDED = 0x4000
_LARGEST = 256 * 1024 * 1024


def read_index(root: Path) -> frozenset[str]:
    """Returns the paths that the index of the work tree `root` holds; empty if there is none."""
    path = find_git_folder(root) / "index"
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST:
            return frozenset()
        return frozenset(_parse(path.read_bytes()))
    except (OSError, ValueError, IndexError):
        return frozenset()


def find_git_folder(root: Path) -> Path:
    """Returns the repository's own folder; in a submodule or linked tree `.git` names it."""
    path = root / ".git"
    try:
        if path.is_file() and path.stat().st_size < 4096:
            text = path.read_text("utf-8", "surrogateescape")
            if text.startswith("gitdir:"):
                return root / text.removeprefix("gitdir:").strip()
    except OSError:
        pass
    return path


def _parse(data: bytes) -> list[str]:
    version = int.from_bytes(data[4:8], "big")
    if data[:4] != b"DIRC" or version not in (2, 3, 4):
        return []
    names: list[str] = []
    at, previous = 12, b""
    for _ in range(int.from_bytes(data[8:12], "big")):
        start = at
        flags = int.from_bytes(data[at + 60 : at + 62], "big")
        at += _FIXED_BYTES + (2 if flags & _EXTENDED else 0)
        if version == 4:
            drop, at = _varint(data, at)
            end = data.index(b"\0", at)
            previous = previous[: len(previous) - drop] + data[at:end]
            at = end + 1
        else:
            end = data.index(b"\0", at)
            previous = data[at:end]
            at = start + (end - start + 8) // 8 * 8
        names.append(previous.decode("utf-8", "surrogateescape"))
    return names


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads an offset-encoded number as git's pack format writes it."""
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = ((value + 1) << 7) | (data[at] & 0x7F)
    return value, at + 1

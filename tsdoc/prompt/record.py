"""Source records: a document that was read and tokenised before, opened in an instant.

A record is a directory `records/sources/KEY`. KEY covers the content of every source, the ingest
options, the tokenizer, the template and the layout, so a record that is found is right. It holds

    record.json         files, sections without their text, warnings, skipped files; the SHA-256 of
                        every other file; its own SHA-256 on the first line
    text.utf8           the texts of all sections, one after the other
    ids.npy             the prompt's ids; the arrays of the token map, one file each

and is written under another name, then renamed. Whatever is damaged in one, all of it is ignored:
the sources are still there to be read again.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from tsdoc.home import Home, private_dir, write_error
from tsdoc.ingest.document import Document
from tsdoc.prompt.assemble import Prompt
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.files import read_checked, write_checked, write_private
from tsdoc.prompt.layout import LAYOUT_VERSION
from tsdoc.prompt.recordtable import document_from_table, document_table
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.prompt.tokenmap import MapArrays, TokenMap, array_bytes, open_array

RECORD_VERSION = 2
"""Part of every record's key; raise it when the files of a record change their meaning."""

MAX_RECORD_BYTES = 2 << 30
"""Records that were not used for longest are removed beyond this, all records together."""

_TABLE, _TEXT, _IDS = "record.json", "text.utf8", "ids.npy"
_ABANDONED_S = 1.0  # between making a directory and locking it


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """What a record gives back, as if the sources had been read and tokenised."""

    document: Document
    prompt: Prompt


def record_key(
    fingerprint: str, tokenizer: TextTokenizer, template: ChatTemplate, *, tree_tokens: int
) -> str:
    """Returns the key of a record.

    Args:
        fingerprint: `SourceFingerprint.digest`: content of the sources, options, reader version.
        tokenizer: Decides the ids.
        template: Decides the head.
        tree_tokens: Decides the contents.
    """
    parts = (
        f"record {RECORD_VERSION} layout {LAYOUT_VERSION} tree {tree_tokens}",
        fingerprint,
        tokenizer.fingerprint,
        template.fingerprint,
    )
    return hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def save_record(home: Home, key: str, document: Document, prompt: Prompt) -> None:
    """Keeps a document and its prompt under `key`, and removes the oldest records if need be.

    Raises:
        StoreError: it cannot be written.
        ResourceError: the disk is full.
    """
    private_dir(home.records)
    records = private_dir(home.records / "sources")
    temporary = records / f".{key}.{secrets.token_hex(8)}"
    try:
        temporary.mkdir(mode=0o700)
        with _locked(temporary):
            _write(temporary, document, prompt)
            _put_in_place(temporary, records / key)
        prune_records(home, max_bytes=MAX_RECORD_BYTES)
    except OSError as error:
        raise write_error(error, records, "keeping what was read") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_record(home: Home, key: str) -> SourceRecord | None:
    """Returns the record under `key`; None when there is none, or a damaged or foreign one.

    Every byte is checked against its SHA-256. Arrays are memory-mapped.
    """
    directory = home.records / "sources" / key
    try:
        if not _is_private(home.records / "sources") or not _is_private(directory):
            return None
        table = read_checked(directory / _TABLE)
        if table is None or not _files_are_whole(directory, table["sha256"]):
            return None
        document = document_from_table(table["document"], (directory / _TEXT).read_bytes())
        arrays = MapArrays.load(directory)
        prompt = Prompt(ids=open_array(directory / _IDS), map=TokenMap(document, arrays))
        with contextlib.suppress(OSError):  # where one may only read, nothing is pruned either
            os.utime(directory)  # for `prune_records`
    except (OSError, KeyError, IndexError, TypeError, ValueError):
        return None
    return SourceRecord(document=document, prompt=prompt)


def prune_records(home: Home, *, max_bytes: int, keep: Collection[str] | None = None) -> int:
    """Removes the records used least recently until the rest take `max_bytes` at most.

    Also removes what interrupted commands left behind.

    Args:
        home: Where they lie.
        max_bytes: What they may take together.
        keep: Keys of the records that are still wanted; None is all.

    Returns:
        The number of records removed.
    """
    found = []
    for directory in _directories(home.records / "sources"):
        with contextlib.suppress(FileNotFoundError):  # another process may remove some as well
            last_used = directory.lstat().st_mtime
            if not directory.name.startswith("."):
                size = sum(file.lstat().st_size for file in directory.iterdir())
                unwanted = keep is not None and directory.name not in keep
                found.append((not unwanted, last_used, size, directory))
            elif time.time() - last_used > _ABANDONED_S and _is_abandoned(directory):
                shutil.rmtree(directory, ignore_errors=True)
    total = sum(size for _, _, size, _ in found)
    num_removed = 0
    for wanted, _, size, directory in sorted(found):
        if wanted and total <= max_bytes:
            break
        shutil.rmtree(directory, ignore_errors=True)
        total -= size
        num_removed += 1
    return num_removed


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Marks a directory as being written; the mark dies with its process.

    Yields whether it is this process's: False where another one holds it.
    """
    import fcntl

    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _is_abandoned(directory: Path) -> bool:
    with _locked(directory) as free:
        return free


def _write(directory: Path, document: Document, prompt: Prompt) -> None:
    contents = {
        _TEXT: "".join(s.text for s in document.sections).encode("utf-8", "surrogatepass"),
        _IDS: array_bytes(prompt.ids),
        **prompt.map.arrays.files(),
    }
    for name, data in contents.items():
        write_private(directory / name, data)
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    write_checked(directory / _TABLE, {"sha256": sums, "document": document_table(document)})


def _put_in_place(temporary: Path, final: Path) -> None:
    """Renames a finished record; what is there already is damaged, or the same."""
    discarded = final.with_name(f".{final.name}.{secrets.token_hex(8)}")
    with contextlib.suppress(FileNotFoundError):
        final.rename(discarded)
    try:
        temporary.rename(final)
    except OSError as error:
        # Another process has put the same record there meanwhile.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
    if discarded.is_dir() and not discarded.is_symlink():
        shutil.rmtree(discarded, ignore_errors=True)
    else:
        discarded.unlink(missing_ok=True)


def _files_are_whole(directory: Path, sums: dict[str, str]) -> bool:
    return all(
        not (directory / name).is_symlink() and _sha256(directory / name) == expected
        for name, expected in sums.items()
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_private(directory: Path) -> bool:
    info = directory.lstat()
    ours = not hasattr(os, "getuid") or info.st_uid == os.getuid()
    return stat.S_ISDIR(info.st_mode) and ours and not info.st_mode & 0o077


def _directories(parent: Path) -> list[Path]:
    if not parent.is_dir():
        return []
    return [path for path in parent.iterdir() if path.is_dir() and not path.is_symlink()]

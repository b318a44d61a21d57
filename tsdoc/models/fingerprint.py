"""Fingerprints of models: hex digests over the content of their files.

Hashing gigabytes takes seconds, so the hash of a big file is remembered together with the file's
device, inode, size, mtime and ctime. Equal size and mtime alone prove nothing; a ctime cannot be
set back by a program, and a file changed within the clock's grain is not remembered at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path

from tsdoc.errors import ModelError, ResourceError, StoreError
from tsdoc.home import Home, private_dir
from tsdoc.models.config import CONFIG_FILES
from tsdoc.models.weights import INDEX_FILE, weight_files
from tsdoc.regular import open_regular, read_own

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
OnProgress = Callable[[int, int], None]
OnRead = Callable[[int], None]
_NUM_READERS = 4
_PART_BYTES = 1 << 20
_SHOWN_S = 0.2
_SHA256 = re.compile("[0-9a-f]{64}")
_CACHE_NAME = "content-hashes.json"
_GRAIN_NS = 100_000_000
_MAX_ENTRIES = 1000


def model_fingerprint(
    directory: Path, home: Home, on_progress: OnProgress = lambda done, total: None
) -> str:
    """Returns the hex digest over weights, tokenizer, template and configuration.

    Args:
        directory: The model's.
        home: Where hashes of weights are remembered.
        on_progress: As of `content_hashes`.

    Raises:
        ModelError: a file is missing or cannot be read.
    """
    paths = weight_files(directory)
    digests = content_hashes(paths, home, on_progress)
    weights = [(path.name, digest) for path, digest in zip(paths, digests, strict=True)]
    return _combine(
        weights + _small_files(directory, (INDEX_FILE, *CONFIG_FILES, *TOKENIZER_FILES))
    )


def tokenizer_fingerprint(directory: Path) -> str:
    """Returns the hex digest over what decides token ids: tokenizer and chat template."""
    return _combine(_small_files(directory, TOKENIZER_FILES))


def content_hash(path: Path, home: Home) -> str:
    """Returns the SHA-256 of one file; see `content_hashes`."""
    return content_hashes([path], home)[0]


def content_hashes(
    paths: Sequence[Path], home: Home, on_progress: OnProgress = lambda done, total: None
) -> list[str]:
    """Returns the SHA-256 of each file, from the cache under `home.models` where that is safe.

    Args:
        paths: The files. Several are read at a time: a core hashes slower than disks read.
        home: Where hashes are remembered.
        on_progress: Called with bytes read and bytes in all, if any have to be read.

    Raises:
        ModelError: one cannot be read, or changes while it is read.
    """
    cache_path = _cache_path(home)
    cache = _read_cache(cache_path) if cache_path is not None else {}
    keys = [str(path.resolve()) for path in paths]
    known = {
        key: str(entry[1])
        for path, key in zip(paths, keys, strict=True)
        if isinstance(entry := cache.get(key), list)
        and len(entry) == 2
        and entry[0] == _identity(path)
        and _SHA256.fullmatch(str(entry[1]))
    }
    unknown = {key: path for path, key in zip(paths, keys, strict=True) if key not in known}
    if unknown:
        hashed = _hash_all(list(unknown.values()), on_progress)
        for key, (digest, identity) in zip(unknown, hashed, strict=True):
            known[key] = digest
            if identity is not None:
                cache.pop(key, None)
                cache[key] = [identity, digest]
        if cache_path is not None and any(identity is not None for _, identity in hashed):
            _write_cache(cache_path, dict(list(cache.items())[-_MAX_ENTRIES:]))
    return [known[key] for key in keys]


def _hash_all(paths: Sequence[Path], on_progress: OnProgress) -> list[tuple[str, list[int] | None]]:
    """What `_hash_unchanged` returns of each; ends at once if this is interrupted."""
    total = sum(_identity(path)[2] for path in paths)
    read = [0] * len(paths)
    ended = threading.Event()

    def hash_one(number: int) -> tuple[str, list[int] | None]:
        def on_read(count: int) -> None:
            if ended.is_set():
                raise CancelledError
            read[number] = count

        return _hash_unchanged(paths[number], on_read)

    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="tsdoc-hash") as readers:
        tasks = [readers.submit(hash_one, number) for number in range(len(paths))]
        try:
            while (state := wait(tasks, _SHOWN_S, FIRST_EXCEPTION)).not_done:
                for task in state.done:
                    task.result()  # raises what it raised
                on_progress(sum(read), total)
            return [task.result() for task in tasks]
        finally:
            ended.set()
            readers.shutdown(cancel_futures=True)


def _hash_unchanged(path: Path, on_read: OnRead) -> tuple[str, list[int] | None]:
    """Returns the SHA-256 of a file to which nobody writes, and what to remember it with.

    Where ctime alone changes meanwhile, a hard link to the file was made or removed, or somebody
    wrote and set mtime back. So the file is read again: it has to stay as it is now, or to have the
    same content, which is not remembered then.
    """
    earlier = None
    while True:
        started_ns = time.time_ns()
        before = _identity(path)
        digest = file_sha256(path, on_read)
        after = _identity(path)
        if after == before:
            return digest, before if started_ns - before[-1] > _GRAIN_NS else None
        if after[:-1] != before[:-1] or earlier not in (None, digest):
            raise ModelError("the file changes while it is read", where=str(path))
        if digest == earlier:
            return digest, None
        earlier = digest


def file_sha256(path: Path, on_read: OnRead = lambda count: None) -> str:
    """Returns the SHA-256 of a file's content as hex.

    Args:
        path: The file.
        on_read: Called with the bytes that have been read, again and again.

    Raises:
        ModelError: it cannot be read.
    """
    digest, part, count = hashlib.sha256(), memoryview(bytearray(_PART_BYTES)), 0
    try:
        with open_regular(path) as file:
            while size := file.readinto(part):
                digest.update(part[:size])
                count += size
                on_read(count)
            return digest.hexdigest()
    except OSError as error:
        raise ModelError(f"cannot be read ({error.strerror})", where=str(path)) from error


def _identity(path: Path) -> list[int]:
    try:
        info = path.stat()
    except OSError as error:
        raise ModelError(f"cannot be read ({error.strerror})", where=str(path)) from error
    return [info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _small_files(directory: Path, names: tuple[str, ...]) -> list[tuple[str, str]]:
    present = [name for name in names if (directory / name).is_file()]
    return [(name, file_sha256(directory / name)) for name in present]


def _combine(files: list[tuple[str, str]]) -> str:
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(files))
    return hashlib.sha256(text.encode()).hexdigest()


def _cache_path(home: Home) -> Path | None:
    """Where hashes are remembered; None where that cannot be made, or may be somebody else's."""
    try:
        return private_dir(home.models) / _CACHE_NAME
    except (ResourceError, StoreError):
        return None


def _read_cache(path: Path) -> dict[str, object]:
    # A damaged cache only costs hashing again.
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = json.loads(read_own(path))
        if isinstance(value, dict):
            return value
    return {}


def _write_cache(path: Path, cache: dict[str, object]) -> None:
    # Two processes may write at once; the last one wins whole, which only costs hashing again.
    with contextlib.suppress(OSError):
        handle, name = tempfile.mkstemp(prefix=".content-hashes-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(cache, file)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise

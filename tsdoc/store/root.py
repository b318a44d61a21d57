"""The store's directory tree, its one lock for changes, and how trouble is reported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from tsdoc.errors import DamagedStoreError, StoreFormatError
from tsdoc.home import private_dir
from tsdoc.store.files import named_dirs, own_dir, read_json, store_error, write_json
from tsdoc.store.key import FORMAT, ModelKey
from tsdoc.store.locks import lock_exclusive

Warn = Callable[[str, str, str], None]
"""Receives (code, where, message), like `Reporter.warn`."""


@dataclass(frozen=True, slots=True)
class StoreRoot:
    """Paths below the store's directory.

    Files are created, renamed and deleted only under `changing`; K, V and journal records are
    written outside it, under the segment's own lock.
    """

    path: Path
    warn: Warn

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Holds the store's lock for a change; waits for it, which takes moments.

        Raises:
            StoreError: the store cannot be written.
        """
        path = private_dir(self.path) / "store.lock"
        try:
            lock = lock_exclusive(path)
        except OSError as error:
            raise store_error(error, path, "locking the store") from error
        with lock:
            yield

    def key_dir(self, key: ModelKey) -> Path:
        """Directory of a model key, which may not exist."""
        return self.path / key.digest

    def make_key_dir(self, key: ModelKey) -> Path:
        """Creates the directory of a model key with its parts. Call it under `changing`."""
        directory = private_dir(self.path) / key.digest
        for part in (directory, directory / "entries", directory / "segments"):
            private_dir(part)
        path = directory / "model.json"
        try:
            read_json(path, "model")
        except DamagedStoreError:
            try:
                write_json(path, "model", {"model_key": key.digest, "fields": asdict(key)})
            except OSError as error:
                raise store_error(error, path, "writing") from error
        except StoreFormatError as error:
            self.report(error)
        return directory

    def key_dirs(self) -> list[Path]:
        """Directories of all model keys."""
        return list(named_dirs(self.path))

    def exists(self) -> bool:
        """Whether there is a store to read.

        Raises:
            StoreError: something that is not ours is in its place.
        """
        return own_dir(self.path)

    def report(self, error: DamagedStoreError | StoreFormatError) -> None:
        """Warns of a file that is passed over, and says what follows."""
        newer = isinstance(error, StoreFormatError) and error.version > FORMAT
        follows = "it is left alone" if newer else "what it held is computed again when needed"
        self.warn(error.code, error.where or str(self.path), f"{error.message}; {follows}")

"""Summaries of parts on disk: they live beside the source record that they were made from."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import StoreError
from tsdoc.home import Home, private_dir
from tsdoc.prompt.files import read_checked, write_checked

MAX_DOCUMENTS = 200  # whose summaries are kept, the last used ones


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSummaries:
    """Those of one document.

    Attributes:
        record: Key of the document's source record.
    """

    home: Home
    record: str

    def load(self, key: str) -> dict[str, Any] | None:
        """Returns what was saved under `key`; None when there is none, or a damaged one."""
        return read_checked(self._directory / f"{key}.json")

    def save(self, key: str, value: dict[str, Any]) -> None:
        """Keeps a summary, and makes room for it.

        Raises:
            StoreError: it cannot be written.
            ResourceError: the disk is full.
        """
        for directory in (self.home.records, self._directory.parent, self._directory):
            private_dir(directory)
        write_checked(self._directory / f"{key}.json", value)
        self._make_room()

    @property
    def _directory(self) -> Path:
        return _root(self.home) / self.record

    def _make_room(self) -> None:
        try:
            found = sorted((path.stat().st_mtime, path) for path in _root(self.home).iterdir())
            for _, path in found[:-MAX_DOCUMENTS]:
                shutil.rmtree(path, ignore_errors=True)
        except OSError as error:  # another process may make room as well
            if not isinstance(error, FileNotFoundError):
                raise StoreError(
                    f"cannot be read ({error.strerror})", where=str(_root(self.home))
                ) from error


def remove_summaries(home: Home, keep: Collection[str]) -> None:
    """Removes the summaries of all documents but those of the source records `keep`."""
    if _root(home).is_dir():
        for directory in _root(home).iterdir():
            if directory.name not in keep:
                shutil.rmtree(directory, ignore_errors=True)


def _root(home: Home) -> Path:
    return home.records / "summaries"

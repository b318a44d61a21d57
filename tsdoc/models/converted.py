"""Converted models under `Home.models`: one directory per GGUF content, made once and whole.

Beside them are tokenizers alone, for counting tokens with a model that is not here.

A conversion works in a hidden directory beside its target and renames it at the end, under a lock
that dies with its owner. Whoever holds the lock may delete what an earlier owner left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tsdoc.home import Home, private_dir
from tsdoc.models.download_plan import disk_errors
from tsdoc.models.gguf_convert import CONVERTER_VERSION, convert_gguf, convert_tokenizer
from tsdoc.regular import read_own

_LABEL = "tsdoc-model.json"
_PARTIAL = re.compile(r"\.partial-(?P<name>(?:gguf|tokenizer)-[0-9a-f]{16}-v\d+)-\w+", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertedModel:
    """A converted model on this disk.

    Attributes:
        name: As the source was called ("embedded", "SmolLM2.gguf").
        source: Where it came from.
        gguf_sha256: Of the file it was converted from.
        num_bytes: Size on disk.
    """

    name: str
    source: str
    gguf_sha256: str
    directory: Path
    num_bytes: int


def find_converted(home: Home, gguf_sha256: str) -> Path | None:
    """Returns the directory of the model converted from the GGUF with this hash, or None."""
    directory = _directory(home, "gguf", gguf_sha256)
    return directory if (directory / _LABEL).is_file() else None


def find_tokenizer(home: Home, gguf_sha256: str) -> Path | None:
    """Returns a directory with the tokenizer of the GGUF with this hash, or None."""
    directory = _directory(home, "tokenizer", gguf_sha256)
    here = directory if (directory / _LABEL).is_file() else None
    return find_converted(home, gguf_sha256) or here


def list_converted(home: Home) -> list[ConvertedModel]:
    """Returns every complete converted model."""
    models = []
    for label in sorted(home.models.glob(f"gguf-*/{_LABEL}")):
        try:
            value = json.loads(read_own(label))
            models.append(
                ConvertedModel(
                    name=str(value["name"]),
                    source=str(value["source"]),
                    gguf_sha256=str(value["gguf_sha256"]),
                    directory=label.parent,
                    num_bytes=sum(path.stat().st_size for path in label.parent.iterdir()),
                )
            )
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            continue  # damaged or being deleted: not a model
    return models


def make_converted(
    home: Home,
    *,
    gguf_sha256: str,
    name: str,
    source: str,
    fetch: Callable[[Path], Path],
    on_progress: Callable[[int, int], None],
) -> Path:
    """Converts a GGUF file unless that was done before, and returns the model directory.

    Args:
        home: Where it goes.
        gguf_sha256: Hash of the file that `fetch` returns.
        name: For lists of models.
        source: For lists of models.
        fetch: Gets a private directory to work in and returns the GGUF file.
        on_progress: Called with (bytes converted, bytes in all).

    Raises:
        ModelError: the file is damaged, not supported, or cannot be had.
        ResourceError: the disk is full.
    """
    return _make(
        home,
        _directory(home, "gguf", gguf_sha256),
        {"name": name, "source": source, "gguf_sha256": gguf_sha256},
        lambda work, result: convert_gguf(fetch(work), result, on_progress),
    )


def make_tokenizer(
    home: Home, *, gguf_sha256: str, name: str, source: str, fetch: Callable[[Path], Path]
) -> Path:
    """Takes the tokenizer alone out of a GGUF file, unless it is here, and returns its directory.

    Args:
        home: Where it goes.
        gguf_sha256: Hash of the whole file.
        name: For people who look there.
        source: For people who look there.
        fetch: Gets a private directory to work in and returns the file's beginning.

    Raises:
        ModelError, ResourceError: as `make_converted`.
    """
    return find_tokenizer(home, gguf_sha256) or _make(
        home,
        _directory(home, "tokenizer", gguf_sha256),
        {"name": name, "source": source, "gguf_sha256": gguf_sha256},
        lambda work, result: convert_tokenizer(fetch(work), result),
    )


def _make(
    home: Home, target: Path, label: dict[str, str], convert: Callable[[Path, Path], None]
) -> Path:
    """Makes the directory `target` unless it is there; `convert` gets (work folder, result)."""
    from filelock import FileLock

    private_dir(home.models)
    with disk_errors(home.models):
        _remove_leftovers(home)
        with FileLock(_lock_path(home, target.name)):
            if (target / _LABEL).is_file():
                return target
            work = Path(tempfile.mkdtemp(prefix=f".partial-{target.name}-", dir=home.models))
            try:
                result = work / "model"
                result.mkdir(mode=0o700)
                convert(work, result)
                (result / _LABEL).write_text(json.dumps(label) + "\n", "utf-8")
                _publish(result, target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    return target


def _directory(home: Home, kind: str, gguf_sha256: str) -> Path:
    return home.models / f"{kind}-{gguf_sha256[:16].lower()}-v{CONVERTER_VERSION}"


def _lock_path(home: Home, name: str) -> Path:
    return home.models / f".lock-{name}"


def _publish(result: Path, target: Path) -> None:
    """Brings `result` to the disk, then gives it its name."""
    for path in [*result.iterdir(), result]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if target.exists():  # without a label: not made by `make_converted`, or damaged since
        shutil.rmtree(target)
    result.rename(target)


def _remove_leftovers(home: Home) -> None:
    """Deletes working directories whose owner is gone: their lock is free."""
    from filelock import FileLock, Timeout

    for path in home.models.glob(".partial-*"):
        match = _PARTIAL.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(Timeout), FileLock(_lock_path(home, match["name"]), timeout=0):
            shutil.rmtree(path, ignore_errors=True)

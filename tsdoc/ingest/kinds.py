"""Which reader a file goes to, by its name and its first bytes."""

from __future__ import annotations

import io
import re
import zipfile
from typing import IO

from tsdoc.ingest.decode import looks_binary

HEAD_BYTES = 8192

_BY_SUFFIX = {
    "pdf": "pdf",
    "epub": "epub",
    "docx": "docx",
    "docm": "docx",
    "html": "html",
    "htm": "html",
    "xhtml": "html",
    "md": "markdown",
    "markdown": "markdown",
    "mdown": "markdown",
    "ipynb": "notebook",
}
_LOCK_FILES = frozenset(
    {
        *("bun.lock", "cargo.lock", "composer.lock", "conda-lock.yml", "deno.lock", "flake.lock"),
        *("gemfile.lock", "go.sum", "gradle.lockfile", "mix.lock", "npm-shrinkwrap.json"),
        *("package-lock.json", "packages.lock.json", "pdm.lock", "pipfile.lock", "pixi.lock"),
        *("pnpm-lock.yaml", "podfile.lock", "poetry.lock", "pubspec.lock", "uv.lock", "yarn.lock"),
        ".terraform.lock.hcl",
    }
)
_GENERATED = re.compile(r".*[.-]min\.(js|css|mjs|cjs)|.*\.(js|css|mjs|cjs|ts)\.map", re.I)
_MINIFIABLE = re.compile(r".*\.(js|css|mjs|cjs)", re.I)
_MINIFIED_LINE = 1000


def kind_of(name: str, head: bytes) -> str | None:
    """Returns the kind of a file from its name and first `HEAD_BYTES`; None for a binary.

    "zip" stands for an archive of a kind that only its members tell; see `kind_of_zip`.
    """
    kind = _BY_SUFFIX.get(name.rpartition(".")[2].lower()) if "." in name else None
    if kind in ("pdf", "epub", "docx"):
        return kind
    if b"%PDF-" in head[:1024]:
        return "pdf"
    if head.startswith(b"PK\x03\x04"):
        return "zip"
    if looks_binary(head):
        return None
    return kind or _kind_of_text(head)


def kind_of_zip(file: IO[bytes]) -> str | None:
    """Returns "epub" or "docx" for such an archive, None for any other."""
    try:
        names = set(zipfile.ZipFile(file).namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return None
    if "META-INF/container.xml" in names:
        return "epub"
    return "docx" if "word/document.xml" in names else None


def kind_of_bytes(data: bytes) -> str | None:
    """Returns the kind of bytes that have no name, such as standard input."""
    kind = kind_of("", data[:HEAD_BYTES])
    return kind_of_zip(io.BytesIO(data)) if kind == "zip" else kind


def why_left_out(name: str, head: bytes) -> str | None:
    """Returns why a text file of a folder is left out by default, or None."""
    base = name.rpartition("/")[2]
    if base.lower() in _LOCK_FILES:
        return "lock file"
    if _GENERATED.fullmatch(base):
        return "minified"
    if _MINIFIABLE.fullmatch(base) and len(head) > 2 * _MINIFIED_LINE:
        return "minified" if len(head) // (head.count(b"\n") + 1) > _MINIFIED_LINE else None
    return None


def _kind_of_text(head: bytes) -> str:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:2048].lower()
    if start.startswith((b"<!doctype html", b"<html")):
        return "html"
    if start.startswith(b"{") and b'"nbformat"' in head and b'"cells"' in head:
        return "notebook"
    return "text"

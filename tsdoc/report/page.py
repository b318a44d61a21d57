"""Renders a page as one HTML file that loads nothing and runs no script but its own.

A template NAME.html in `templates/` extends base.html and sees `title` and `data`. The style is
base.css followed by NAME.css, the script base.js followed by NAME.js, where these exist. Every
value is escaped, and its control and bidi characters become visible, unless it is `Markup` made by
tsdoc itself. Scripts find `data` as JSON in the element with the id "data".
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tsdoc import __version__
from tsdoc.errors import ResourceError, UsageError
from tsdoc.terminal import visible

TEMPLATES = Path(__file__).parent / "templates"
GENERATOR = b'<meta name="generator" content="tsdoc">'
HEAD_BYTES = 1024  # in which it stands


def render_page(name: str, *, title: str, data: Mapping[str, Any], **figures: Any) -> str:
    """Returns the page.

    Args:
        name: A template in `templates/`, without ".html".
        title: Of the page.
        data: Shown by the template and embedded as JSON: plain values, any text.
        figures: More for the template alone: drawings as `markupsafe.Markup`, say.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style, script = _asset(name, "css"), _asset(name, "js")
    return environment.get_template(f"{name}.html").render(
        **figures,
        title=title,
        data=data,
        policy=content_policy(style, script),
        style=Markup(style),  # noqa: S704 - files of this package
        script=Markup(script),  # noqa: S704 - same
        embedded=Markup(embedded_json(data)),  # noqa: S704 - escaped there
        version=__version__,
    )


def embedded_json(value: object) -> str:
    """Returns JSON that can stand inside a script element: ASCII, without `<`, `>` and `&`."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def content_policy(style: str, script: str) -> str:
    """Returns the content security policy that admits this style and script, and nothing else."""
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )


def check_target(path: Path) -> None:
    """Checks, before long work, that a page can be written to `path`, and replaces nothing else.

    Raises:
        UsageError: it is `-`, a directory, or lies in none; or a file that is no page of tsdoc's,
            such as a source whose name was mistyped; or this user cannot write it.
    """
    if path == Path("-"):
        raise UsageError(
            "an HTML page goes into a file, for standard output has the answer", where="-"
        )
    if path.is_dir():
        raise UsageError("is a directory; an HTML page goes into a file", where=str(path))
    if not path.parent.is_dir():
        raise UsageError("the directory of the HTML page does not exist", where=str(path))
    if path.is_file() and not _is_page(path):
        raise UsageError(
            "exists, and is no page that tsdoc wrote", where=str(path), hint="Choose another name."
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError("the page cannot be written (no permission)", where=str(path))


def _is_page(path: Path) -> bool:
    """Whether a file is a page of tsdoc's, or empty."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return not head or GENERATOR in head


def write_page(path: Path, page: str) -> None:
    """Writes a page.

    Raises:
        UsageError: the file cannot be written there.
        ResourceError: the disk is full.
    """
    try:
        path.write_text(page, encoding="utf-8", newline="\n")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        kind = ResourceError if full else UsageError
        raise kind(f"the page cannot be written ({error.strerror})", where=str(path)) from error


def _visible(value: object) -> object:
    """Applied to every value of a template; `Markup` is ours and stays."""
    return visible(value) if type(value) is str else value


def _asset(name: str, kind: str) -> str:
    """Returns the base's style or script followed by the template's own."""
    paths = [TEMPLATES / f"base.{kind}", TEMPLATES / f"{name}.{kind}"]
    return "\n".join(path.read_text("utf-8") for path in paths if path.exists())


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"

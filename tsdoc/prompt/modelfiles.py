"""Small text files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tsdoc.errors import ModelError, reason_of
from tsdoc.regular import open_regular


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in `path`, empty when there is no such file.

    Raises:
        ModelError: it cannot be read, or holds something else.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"is not JSON ({error})", where=str(path)) from error
    if not isinstance(value, dict):
        raise ModelError("is not a JSON object", where=str(path))
    return value


def read_text(path: Path) -> str | None:
    """Returns the text of `path`, None when there is no such file.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot be read ({reason_of(error)})", where=str(path)) from error

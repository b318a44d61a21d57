"""Typed access to a model's JSON files: what cannot be is said with file, key and value."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from tsdoc.errors import ModelError

_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Values:
    """The values of a JSON object; null is as good as none.

    Attributes:
        where: The file, for errors; None where there is none.
        prefix: For the keys of an object within the file: its own key and a dot.
    """

    values: Mapping[str, Any]
    where: str | None
    prefix: str = ""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def count(self, key: str, *, below: int, default: int | None = None) -> int:
        """Returns a whole number from 1 on, or `default` where there is none.

        Raises:
            ModelError: it is something else, or missing, as in the methods that follow.
        """
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not (_is_whole(value) and 0 < value < below):
            raise self._wrong(key, value, f"no whole number from 1 to {below - 1:,}")
        return int(value)

    def number(self, key: str, *, above: float = 0, default: float | None = None) -> float:
        """Returns a finite number, or `default` where there is none."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not (_is_number(value) and above < value <= sys.float_info.max):
            raise self._wrong(key, value, f"no finite number above {above}")
        return float(value)

    def text(self, key: str, *, default: str) -> str:
        """Returns a text, or `default` where there is none."""
        value = self.values.get(key)
        if not (value is None or isinstance(value, str)):
            raise self._wrong(key, value, "no text")
        return default if value is None else value

    def flag(self, key: str, *, default: bool = False) -> bool:
        """Returns true or false; null is false."""
        value = self.values.get(key, default)
        if not (value is None or isinstance(value, bool)):
            raise self._wrong(key, value, "neither true nor false")
        return bool(value)

    def ids(self, key: str, *, below: int) -> list[int]:
        """Returns token ids, of which there may be none, one, or a list."""
        value = self.values.get(key)
        items = value if isinstance(value, list) else [] if value is None else [value]
        for item in items:
            if not (_is_whole(item) and 0 <= item < below):
                raise self._wrong(key, item, f"no token id below {below:,}")
        return [int(item) for item in items]

    def texts(self, key: str) -> list[str]:
        """Returns a list of texts, an empty one where there is none."""
        value = self.values.get(key)
        if not (value is None or isinstance(value, list)):
            raise self._wrong(key, value, "no list")
        for item in value or []:
            if not isinstance(item, str):
                raise self._wrong(key, item, "no text")
        return value or []

    def table(self, key: str) -> Values:
        """Returns an object, an empty one where there is none."""
        value = self.values.get(key)
        if not (value is None or isinstance(value, dict)):
            raise self._wrong(key, value, "no object")
        return Values(value or {}, self.where, f"{self.prefix}{key}.")

    def shown(self, key: str) -> str:
        """Returns a value as it stands in the file, whatever it is."""
        return _shown(self.values.get(key))

    def error(self, message: str, *, hint: str | None = None) -> ModelError:
        """Returns an error about the file."""
        return ModelError(message, where=self.where, hint=hint)

    def _wrong(self, key: str, value: object, what: str) -> ModelError:
        name = self.prefix + key
        if value is None and key not in self:
            return self.error(f"{name} is missing")
        return self.error(f"{name} holds {_shown(value)}, which is {what}")


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> TypeGuard[int | float]:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


def _shown(value: object) -> str:
    """Returns a value as it stands in the file, cut where it is long."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

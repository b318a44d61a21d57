"""Reads `tsdoc/cli/SCHEMAS.md`: which fields each schema has, and of which type."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import tsdoc

DOCUMENT = Path(tsdoc.__file__).parent / "cli" / "SCHEMAS.md"
SESSION = {"tsdoc.ask/1", "tsdoc.chat/1", "tsdoc.summarize/1", "tsdoc.ingest/1"}
# Fields that stand in several places: under which prefixes a mark in the document is meant.
PLACES: dict[str, dict[str, tuple[str, ...]]] = {
    "*": {"tsdoc.summarize/1": ("summary", "parts[]")},
    "^": {
        "tsdoc.summarize/1": (
            "summary.sentences[].place", "parts[].sentences[].place", "summary.nearest",
            "parts[].nearest", "parts[].first", "parts[].last",
        ),
    },
    "@": {
        "tsdoc.cache.list/1": ("entries[]",),
        "tsdoc.cache.prune/1": ("removed[]",),
        "tsdoc.cache.show/1": ("",),
    },
}  # fmt: skip
_ROW = re.compile(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|")
TYPES: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "list": (list,),
    "object": (dict,),
    "map": (dict,),
    "null": (type(None),),
    "any": (object,),
}

Fields = dict[str, str]


def read_document() -> dict[str, Fields]:
    """Returns the rows of each section by its heading; every row has a meaning."""
    sections: dict[str, Fields] = {}
    for line in DOCUMENT.read_text("utf-8").splitlines():
        if line.startswith("## "):
            sections[line[3:]] = {}
        elif (row := _ROW.fullmatch(line)) is not None:
            name, kind, meaning = row.groups()
            assert meaning.strip()
            fields = list(sections.values())[-1]
            assert name not in fields, name
            fields[name] = kind
    return sections


def schemas() -> dict[str, Fields]:
    """Returns the fields of every schema, shared ones included."""
    sections = read_document()
    shared = {key: name for fields in sections.values() for key, name in fields.items()}
    found = {}
    for schema, own in sections.items():
        if not schema.startswith("tsdoc."):
            continue
        fields = dict(sections["Every object"])
        if schema in SESSION:
            fields |= sections["A session"]
        if schema == "tsdoc.ingest/1":
            fields = {key: kind for key, kind in fields.items() if not key.startswith("answers")}
        if schema == "tsdoc.text/1":
            fields |= {k: v for k, v in sections["A session"].items() if k.startswith("document")}
        fields |= {key: kind for key, kind in own.items() if key[0] not in PLACES}
        for mark, places in PLACES.items():
            for prefix in places.get(schema, ()):
                rows = ((k, v) for k, v in shared.items() if k[0] == mark)
                fields |= {(prefix + key[1:]).lstrip("."): kind for key, kind in rows}
        found[schema] = fields
    return found


def check(value: object, fields: Fields) -> tuple[set[str], list[str]]:
    """Checks a JSON object against its fields; returns those it has, and what is wrong."""
    seen: set[str] = set()
    wrong = []
    for path, part in _walk(value, "", fields):
        kind = fields.get(path)
        if kind is None:
            wrong += [] if isinstance(part, dict) else [f"{path} is not documented"]
            continue
        allowed = tuple(t for name in kind.split(" or ") for t in TYPES[name])
        odd = isinstance(part, bool) and bool not in allowed and object not in allowed
        if odd or not isinstance(part, allowed):
            wrong.append(f"{path} is {type(part).__name__}, not {kind}")
        seen.add(path)
    return seen, wrong


def _walk(value: object, path: str, fields: Fields) -> Iterator[tuple[str, object]]:
    if path:
        yield path, value
    if fields.get(path, "").startswith(("map", "any")):
        return
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _walk(part, f"{path}.{key}" if path else key, fields)
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part, f"{path}[]", fields)

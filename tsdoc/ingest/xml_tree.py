"""XML from foreign files: no document type definitions, no entities, no network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from xml.parsers import expat

from tsdoc.errors import InputError

_MAX_DEPTH = 200


@dataclass(slots=True)
class Node:
    """An element: names without their namespace; `content` holds text and elements in order."""

    name: str
    attributes: dict[str, str]
    content: list[Node | str] = field(default_factory=list)

    def elements(self) -> Iterator[Node]:
        """Yields the child elements."""
        return (item for item in self.content if isinstance(item, Node))

    def find(self, name: str) -> Iterator[Node]:
        """Yields all elements of a name below this one, in document order."""
        for item in self.elements():
            if item.name == name:
                yield item
            yield from item.find(name)

    def text(self) -> str:
        """Returns all text below this element, white space collapsed."""
        parts: list[str] = []
        self._collect(parts)
        return " ".join("".join(parts).split())

    def _collect(self, parts: list[str]) -> None:
        for item in self.content:
            if isinstance(item, Node):
                item._collect(parts)
            else:
                parts.append(item)


def parse_xml(data: bytes, name: str) -> Node:
    """Parses a whole document.

    Raises:
        InputError: not well-formed, declares entities, or is nested absurdly deep.
    """
    builder = _Builder(name)
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    parser.buffer_text = True
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.text
    parser.EntityDeclHandler = builder.entity
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise InputError(f"{name} is not well-formed XML ({error})") from error
    if builder.root is None:
        raise InputError(f"{name} is empty")
    return builder.root


def local_name(name: str) -> str:
    """Returns an expat name without its namespace."""
    return name.rpartition(" ")[2]


class _Builder:
    def __init__(self, name: str) -> None:
        self.root: Node | None = None
        self._name = name
        self._open: list[Node] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        node = Node(local_name(name), {local_name(k): v for k, v in attributes.items()})
        if self._open:
            self._open[-1].content.append(node)
        else:
            self.root = node
        self._open.append(node)
        if len(self._open) > _MAX_DEPTH:
            raise InputError(f"{self._name} is nested too deep")

    def end(self, _name: str) -> None:
        self._open.pop()

    def text(self, text: str) -> None:
        if self._open:
            self._open[-1].content.append(text)

    def entity(self, *_declaration: Any) -> None:
        raise InputError(f"{self._name} declares XML entities, which are not read")

"""How the reader process and tsdoc talk: JSON objects, each after its length in four bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

LARGEST_FRAME = 1 << 30

Message = dict[str, Any]

Begin = Callable[[str, int], None]
"""Called by a reader with the name of the unit of work that it begins, and its size in bytes."""

Reader = Callable[[Message, Begin], Iterator[Message]]
"""Reads the document that a request names and yields what it finds, in the reader process."""


def encode_frame(message: Message) -> bytes:
    """Returns the bytes of one frame."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    return len(body).to_bytes(4, "big") + body


def read_frame(file: BinaryIO) -> Message | None:
    """Reads one frame from a blocking file; None at its end."""
    head = file.read(4)
    if len(head) < 4:
        return None
    body = file.read(int.from_bytes(head, "big"))
    message: Message = json.loads(body)
    return message

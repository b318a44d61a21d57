"""Reads the header of a GGUF file: metadata and the table of tensors. Nothing in it is trusted.

Layout (little endian): "GGUF", u32 version, u64 tensors, u64 key-value pairs, the pairs, one entry
per tensor, padding to `general.alignment`, tensor data.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tsdoc.errors import ModelError
from tsdoc.regular import open_regular

MAX_KEYS = 10_000
MAX_TENSORS = 100_000
MAX_STRING_BYTES = 16 << 20
MAX_TEXT_BYTES = 256 << 20  # all strings together
MAX_ITEMS = 8_000_000  # over all arrays together; the largest vocabularies have 262,144 tokens
MAX_DIMENSIONS = 4
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
# struct codes of GGUF's value types 0 … 12 without string and array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor of a GGUF file.

    Attributes:
        shape: As numpy and torch write it, [rows, columns]; GGUF's own order is the reverse.
        type_name: ggml's name of the storage type ("Q4_K").
        offset: Absolute position of its bytes in the file.
        num_bytes: Their number.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows that are quantised separately: all dimensions but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """Metadata and tensors of a GGUF file."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


def read_gguf_header(path: Path, *, whole: bool = True) -> GgufHeader:
    """Parses and checks the header of the GGUF file at `path`.

    Args:
        path: The file.
        whole: Whether it must hold the tensors as well; otherwise it may end behind its header.

    Raises:
        ModelError: it is no GGUF file, cut short, has impossible counts or overlong strings, or a
            tensor does not lie within the file.
    """
    try:
        with open_regular(path) as file:
            return _Parser(file, str(path), whole=whole).parse()
    except OSError as error:
        raise ModelError(f"cannot be read ({error.strerror})", where=str(path)) from error


class _Parser:
    """Walks through the header once; every read is checked against the file's length."""

    def __init__(self, file: BinaryIO, where: str, *, whole: bool) -> None:
        self._file = file
        self._where = where
        self._whole = whole
        self._size = os.fstat(file.fileno()).st_size
        self._items_left = MAX_ITEMS
        self._text_left = MAX_TEXT_BYTES

    def parse(self) -> GgufHeader:
        if self._file.read(4) != b"GGUF":
            raise self._broken("it does not begin with the GGUF magic")
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(
                f"GGUF version {version} is not supported (2 and 3 are)", where=self._where
            )
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise self._broken(f"impossible counts: {num_tensors} tensors, {num_keys} keys")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise self._broken(f"impossible alignment {alignment!r}")
        start = -(-self._file.tell() // alignment) * alignment
        return GgufHeader(metadata=metadata, tensors=self._tensors(entries, start))

    def _broken(self, why: str) -> ModelError:
        return ModelError(
            f"not a complete GGUF file ({why})",
            where=self._where,
            hint="Download it again, or check its size and checksum.",
        )

    def _read(self, num_bytes: int) -> bytes:
        if num_bytes > self._size - self._file.tell():
            raise self._broken("it ends within the header")
        return self._file.read(num_bytes)

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._read(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        length = self._scalar("Q")
        self._text_left -= length
        if length > MAX_STRING_BYTES or self._text_left < 0:
            raise self._broken(f"a string of {length} bytes")
        # Byte tokens of some vocabularies are not valid UTF-8; they are never merged from text.
        return self._read(length).decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _FLOAT32:
            # 1e-6 as float32 is 9.99999997e-7 as a double; the shortest decimal is what was meant.
            return float(str(np.float32(self._scalar("f"))))
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        raise self._broken(f"unknown value type {kind}")

    def _array(self) -> list[Any]:
        kind, count = self._scalar("I"), self._scalar("Q")
        self._items_left -= count
        if self._items_left < 0:
            raise self._broken(f"an array of {count} items")
        if kind in _SCALARS:
            layout = f"<{count}{_SCALARS[kind]}"
            return list(struct.unpack(layout, self._read(struct.calcsize(layout))))
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        raise self._broken(f"an array of value type {kind}")

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        num_dimensions = self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        return name, shape, self._scalar("I"), self._scalar("Q")

    def _tensors(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], start: int
    ) -> dict[str, GgufTensor]:
        from gguf.constants import GGML_QUANT_SIZES

        storages = {int(storage): storage for storage in GGML_QUANT_SIZES}
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if kind not in storages:
                raise ModelError(
                    f"tensor {name} has the unknown storage type {kind}", where=self._where
                )
            storage = storages[kind]
            block, block_bytes = GGML_QUANT_SIZES[storage]
            if name in tensors or 0 in shape or shape[-1] % block:
                raise self._broken(f"tensor {name} is impossible or given twice")
            num_bytes = math.prod(shape) // block * block_bytes
            if self._whole and start + offset + num_bytes > self._size:
                raise self._broken(f"tensor {name} lies beyond its end")
            tensors[name] = GgufTensor(
                name=name,
                shape=shape,
                type_name=storage.name,
                offset=start + offset,
                num_bytes=num_bytes,
            )
        return tensors

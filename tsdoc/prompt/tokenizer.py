"""Text to token ids and back, for the tokenizer of one model directory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tsdoc.errors import ModelError
from tsdoc.prompt.decoding import StreamDecoder, TokenBytes
from tsdoc.prompt.modelfiles import read_json_object
from tsdoc.prompt.pieces import find_cutter
from tsdoc.prompt.plain import (
    ControlToken,
    PrefixSpace,
    plain_tokenizer,
    read_control_tokens,
    read_tokenizer,
)
from tsdoc.regular import open_regular

_BATCH_CHARS = 1 << 20

Ids = npt.NDArray[np.int32]

_LONE_SURROGATES = re.compile("[\ud800-\udfff]")


class TextTokenizer:
    """The tokenizer of a model directory; `tokenizer.json` is read on first use.

    Text of documents and questions is encoded without any control token, whatever it contains;
    only `encode_control`, meant for the chat template, writes control tokens.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides the ids of a text."""
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            path = self.directory / name
            try:
                with open_regular(path) as file:
                    data = file.read()
            except FileNotFoundError:
                data = b""
            except OSError as error:
                raise ModelError(f"cannot be read ({error.strerror})", where=str(path)) from error
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()

    @cached_property
    def _loaded(self) -> _Loaded:
        return _load(self.directory)

    @property
    def start_ids(self) -> Ids:
        """What the model wants before a text that no template opens: its BOS token, or nothing."""
        return self._loaded.start_ids

    def encode(self, text: str) -> tuple[Ids, Ids]:
        """Encodes plain text.

        A lone surrogate, which no vocabulary can spell, is encoded as U+FFFD.

        Returns:
            ids, int32 [num_tokens], and the offset of each token's first character in `text`,
            int32 [num_tokens], ascending. Tokens that share a character have the same offset.
        """
        return next(self.encode_many([text]))

    def encode_many(
        self, texts: Iterable[str], on_chars: Callable[[int], None] | None = None
    ) -> Iterator[tuple[Ids, Ids]]:
        """Encodes texts independently of each other, several at a time on all cores.

        Args:
            texts: Read as they are needed.
            on_chars: Told now and then how many characters are done.

        Yields:
            For each text what `encode` returns, in order.
        """
        pieces = (
            _Piece(number, start, piece)
            for number, text in enumerate(texts)
            for start, piece in _with_starts(self._loaded.cut(_encodable(text)))
        )
        encoded = self._encode_pieces(pieces, on_chars)
        for _, parts in groupby(encoded, key=lambda part: part[0]):
            ids, starts = zip(*((ids, starts) for _, ids, starts in parts), strict=True)
            yield np.concatenate(ids), np.maximum.accumulate(np.concatenate(starts))

    def encode_control(self, text: str, *, at_start: bool = False) -> Ids:
        """Encodes text of the chat template: control tokens in it become their ids.

        Args:
            text: A stretch of a rendered template.
            at_start: Whether the stretch begins the prompt; some vocabularies want a space there.
        """
        loaded = self._loaded
        ids: list[int] = []
        position = 0
        for match in loaded.control_pattern.finditer(text):
            number = loaded.control_ids[match.group().strip()]
            run = text[position : match.start()]
            run = run.rstrip() if number in loaded.strips_before else run
            ids.extend(self._encode_run(run, position, at_start))
            ids.append(number)
            position = match.end()
        ids.extend(self._encode_run(text[position:], position, at_start))
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Returns the text of generated ids, without control tokens and without half characters."""
        decoder = self.stream_decoder()
        return "".join([decoder.push(int(number)) for number in ids])

    def stream_decoder(self) -> StreamDecoder:
        """Returns a decoder for one answer, fed token by token."""
        return StreamDecoder(self._loaded.token_bytes)

    def _encode_run(self, text: str, position: int, at_start: bool) -> list[int]:
        """Encodes template text between control tokens, with the prefix space where it has one."""
        if not text:
            return []
        if self._loaded.prefix.applies(text, begins=at_start and not position, after=position > 0):
            text = f" {text}"
        plain = self._loaded.plain  # without offsets it takes half as long, and none are needed
        (encoding,) = plain.encode_batch_fast([_encodable(text)], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _encode_pieces(
        self, pieces: Iterable[_Piece], on_chars: Callable[[int], None] | None
    ) -> Iterator[tuple[int, Ids, Ids]]:
        done = 0
        for batch in _batches(pieces):
            yield from self._encode_batch(batch)
            done += sum(len(piece.text) for piece in batch)
            if on_chars is not None:
                on_chars(done)

    def _encode_batch(self, batch: list[_Piece]) -> Iterator[tuple[int, Ids, Ids]]:
        encodings = self._loaded.plain.encode_batch(
            [piece.text for piece in batch], add_special_tokens=False
        )
        for piece, encoding in zip(batch, encodings, strict=True):
            ids = np.array(encoding.ids, dtype=np.int32)
            if np.isin(ids, self._loaded.forbidden).any():
                raise ModelError(
                    "the tokenizer makes a control token out of plain text",
                    where=str(self.directory),
                )
            starts = np.fromiter(
                (start for start, _ in encoding.offsets), dtype=np.int32, count=ids.size
            )
            yield piece.number, ids, starts + np.int32(piece.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    plain: Any
    cut: Callable[[str], Iterator[str]]
    prefix: PrefixSpace
    control_ids: dict[str, int]
    control_pattern: re.Pattern[str]
    strips_before: frozenset[int]
    forbidden: Ids
    start_ids: Ids
    token_bytes: TokenBytes


@dataclass(frozen=True, slots=True)
class _Piece:
    """Characters from `start` on of text number `number`."""

    number: int
    start: int
    text: str


def _load(directory: Path) -> _Loaded:
    original = read_tokenizer(directory)
    config = read_json_object(directory / "tokenizer_config.json")
    control = read_control_tokens(original, config)
    plain, prefix = plain_tokenizer(original, control)
    unknown = original.model.unk_token
    forbidden = [token.id for token in control if token.content != unknown]
    return _Loaded(
        plain=plain,
        cut=find_cutter(plain),
        prefix=prefix,
        control_ids={token.content.strip(): token.id for token in control},
        control_pattern=_pattern(control),
        strips_before=frozenset(token.id for token in control if token.lstrip),
        forbidden=np.array(forbidden, dtype=np.int32),
        start_ids=_start_ids(original),
        token_bytes=TokenBytes(original, control),
    )


def _pattern(control: tuple[ControlToken, ...]) -> re.Pattern[str]:
    """Matches control tokens, with the white space behind them where they take it.

    What some take before them is not in it: each place of a long run would be tried anew.
    """
    longest_first = sorted(control, key=lambda token: len(token.content), reverse=True)
    options = [
        re.escape(token.content) + (r"\s*" if token.rstrip else "") for token in longest_first
    ]
    return re.compile("|".join(options) or "(?!)")


def _start_ids(original: Any) -> Ids:
    encoding = original.encode("a")
    is_added = np.array(encoding.special_tokens_mask, dtype=np.bool_)
    first = int(np.argmin(is_added)) if is_added.size else 0
    return np.array(encoding.ids[:first], dtype=np.int32)


def _encodable(text: str) -> str:
    return text if text.isascii() else _LONE_SURROGATES.sub("\ufffd", text)


def _with_starts(pieces: Iterable[str]) -> Iterator[tuple[int, str]]:
    start = 0
    for piece in pieces:
        yield start, piece
        start += len(piece)


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Groups pieces to about `_BATCH_CHARS` characters, at most 4,096 of them."""
    remaining = iter(pieces)
    while batch := list(islice(remaining, 1)):
        size = len(batch[0].text)
        while size < _BATCH_CHARS and len(batch) < 4096 and (more := next(remaining, None)):
            batch.append(more)
            size += len(more.text)
        yield batch

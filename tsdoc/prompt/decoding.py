"""Token ids to text: the bytes each token spells, and a decoder that shows no half character."""

from __future__ import annotations

import codecs
from typing import Any

from tsdoc.errors import ModelError
from tsdoc.prompt.plain import BYTE_TOKEN, ControlToken, component_steps


class TokenBytes:
    """The bytes that each token of a vocabulary adds to a text.

    Covers byte-level vocabularies (GPT-2, Llama 3, Qwen) and SentencePiece ones with byte fallback
    (Llama 2, Mistral, Yi).

    Raises:
        ModelError: the vocabulary is spelled in another way.
    """

    def __init__(self, tokenizer: Any, control: tuple[ControlToken, ...]) -> None:
        steps = component_steps(tokenizer.decoder)
        kinds = {step["type"] for step in steps}
        self._tokenizer = tokenizer
        self._added = {
            token.id: b"" if token.special else token.content.encode() for token in control
        }
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._space = _space_mark(steps)
        if self._alphabet is None and self._space is None:
            raise ModelError(f"decoder {'+'.join(sorted(kinds)) or '(none)'} is not supported")
        self.strips_first_space = self._alphabet is None and bool(kinds & {"Strip", "Metaspace"})

    def __getitem__(self, token: int) -> bytes:
        """Returns the bytes of `token`; none for special tokens and ids outside the vocabulary."""
        if token in self._added:
            return self._added[token]
        entry = self._tokenizer.id_to_token(token)
        if entry is None:
            return b""
        if self._alphabet is not None:
            # Tokens that were added as ordinary text are not spelled in the byte alphabet.
            spelled = [self._alphabet.get(letter) for letter in entry]
            known = [value for value in spelled if value is not None]
            return bytes(known) if len(known) == len(spelled) else str(entry).encode()
        if found := BYTE_TOKEN.fullmatch(entry):
            return bytes([int(found[1], 16)])
        return str(entry).replace(self._space or " ", " ").encode()


class StreamDecoder:
    """Turns the tokens of one answer into text, piece by piece.

    The pieces joined are the decoded answer. Bytes of a character whose rest has not come yet are
    held back, and dropped when it never comes; bytes that are no UTF-8 become U+FFFD.
    """

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = token_bytes.strips_first_space

    def push(self, token: int) -> str:
        """Returns the text that `token` completes, possibly empty."""
        data = self._token_bytes[token]
        if self._at_start and data:
            data = data.removeprefix(b" ")
            self._at_start = False
        return self._decoder.decode(data)


def _space_mark(steps: list[dict[str, Any]]) -> str | None:
    """What a SentencePiece vocabulary writes for a space."""
    for step in steps:
        if step["type"] == "Metaspace":
            return str(step["replacement"])
        if step["type"] == "Replace" and step["content"] == " ":
            return str(step["pattern"].get("String"))
    return None


def _byte_alphabet() -> dict[str, int]:
    """The letters that byte-level vocabularies write for each byte.

    Printable Latin-1 stands for itself; the other bytes, in order, are the letters from U+0100 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + nth): byte for nth, byte in enumerate(others)
    }

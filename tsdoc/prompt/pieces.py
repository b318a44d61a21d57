"""Where a long text can be cut so that the pieces' tokens are exactly those of the whole.

Pieces keep memory flat and both cores busy. A cut is made after a line end, and only for
tokenizers of which it is known that no token, and no decision about one, reaches across it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from tokenizers import Tokenizer

from tsdoc.prompt.plain import component_steps

PIECE_CHARS = 1 << 16

# A single line end between a mark or letter and an ASCII letter. In each of the splitting rules
# below, no alternative matches a line end together with a letter after it, none looks back, and the
# only look-ahead (is a run of white space followed by more text?) concerns runs of two or more.
_AFTER_LINE = re.compile(r"(?<=[^\s]\n)(?=[A-Za-z])")
_AFTER_ANY_LINE = re.compile(r"(?<=\n)")

_KNOWN_SPLITS = (
    # Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    # Qwen 2, 2.5 and 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    # GPT-2
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
)


def find_cutter(plain: Tokenizer) -> Callable[[str], Iterator[str]]:
    """Returns the function that cuts a text for `plain`; it may leave every text whole."""
    if not all(_is_local(part) for part in component_steps(plain.normalizer)):
        return _whole
    steps = component_steps(plain.pre_tokenizer)
    if all(step["type"] == "Metaspace" for step in steps):
        return _cut_after_any_line if _newline_stands_alone(plain) else _whole
    return _cut_after_line if _splits_lines(steps) else _whole


def _whole(text: str) -> Iterator[str]:
    yield text


def _cut_after_line(text: str) -> Iterator[str]:
    return _cut(text, _AFTER_LINE)


def _cut_after_any_line(text: str) -> Iterator[str]:
    return _cut(text, _AFTER_ANY_LINE)


def _cut(text: str, place: re.Pattern[str]) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * PIECE_CHARS:
        found = place.search(text, start + PIECE_CHARS)
        if found is None:
            break
        yield text[start : found.start()]
        start = found.start()
    yield text[start:]


def _is_local(step: dict[str, Any]) -> bool:
    """Whether a normalizer changes nothing across a line end."""
    single = step["type"] == "Replace" and step["pattern"].get("String") == " "
    return bool(single or step["type"] == "NFC")


def _splits_lines(steps: list[dict[str, Any]]) -> bool:
    """Whether the pre-tokenizers split at every `_AFTER_LINE`, whatever stands further away."""
    splits = False
    for step in steps:
        if step["type"] == "Split":
            known = step["pattern"].get("Regex") in _KNOWN_SPLITS and not step["invert"]
            if not known or step["behavior"] != "Isolated":
                return False
            splits = True
        elif step["type"] == "ByteLevel":
            splits = splits or step["use_regex"]
        elif step["type"] != "Digits":
            return False
    return splits


def _newline_stands_alone(plain: Tokenizer) -> bool:
    """Whether a line end is always a token by itself, in a model without splitting rules."""
    vocab = plain.get_vocab()
    if "\n" not in vocab and "<0x0A>" not in vocab:
        return False
    return all(entry in ("\n", "<0x0A>") for entry in vocab if "\n" in entry or "<0x0A>" in entry)

"""From bytes to text: byte order marks, UTF-8, declared and guessed legacy encodings."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass

from tsdoc.ingest.extract import Problem

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_COOKIE = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")
_SAMPLE_BYTES = 16 * 1024
# Script that is a language's own, per encoding: kana for the Japanese ones, Hangul for Korean.
_EAST_ASIAN = {
    "cp932": ("\u3041", "\u30fe"),
    "euc_jp": ("\u3041", "\u30fe"),
    "cp949": ("\uac00", "\ud7a3"),
    "shift_jisx0213": ("\u3041", "\u30fe"),
    "euc_jisx0213": ("\u3041", "\u30fe"),
    "gb18030": ("\x7f", "\x7f"),
    "big5": ("\x7f", "\x7f"),
}
_EAST_ASIAN_SHARE = 0.5
# Encodings that announce themselves by an escape sequence; all else in them is ASCII.
_ESCAPED = (
    (b"\x1b$B", "iso2022_jp_ext"),
    (b"\x1b$@", "iso2022_jp_ext"),
    (b"\x1b$)C", "iso2022_kr"),
)
_SINGLE_BYTE = ("cp1252", "cp1250", "cp1251", "cp1253", "koi8_r")
_COMMON_HAN = frozenset(
    "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自着去之过家"
    "学对可她里后小么心多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见"
    "经头面公同三已老从动两长知民样现分将外但身些与高意进把法此实回二理美点月明其种声全工己话"
    "儿者向情部正名定女问力机给等几很业最间新什打便位因重被走电四第门相次东政海口使教西再平真"
    "听世气信北少关并内加化由却代军产入先山五太水万市眼体别处总才场师书比住员九笑性通目华报立"
    "這來國個說們為時會過後裡經頭動兩長樣現將與進實點種聲話兒問機給業間門東電關產體別處總場師"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    r"""Text with `\n` line ends, the encoding it was read with, and trouble on the way."""

    text: str
    encoding: str
    problems: tuple[Problem, ...] = ()


def decode(data: bytes, *, declared: str | None = None) -> Decoded:
    r"""Decodes a file's bytes.

    A byte order mark wins, then UTF-8, then a declaration (`declared`, or a coding comment in the
    first two lines), then a guess. Anything but UTF-8 and a marked UTF-16/32 comes with a
    "legacy_encoding" warning; bytes that no encoding explains become U+FFFD, with a
    "decoded_lossily" warning that names the lines.

    CRLF becomes `\n`; no other character counts as a line end.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return _marked(data[len(mark) :], encoding)
    unmarked = _unmarked_utf16(data[:8192]) if b"\0" in data[:8192] else None
    if unmarked is not None:
        return _marked(data, unmarked)
    for mark, encoding in _ESCAPED:
        if mark in data[:8192] and (text := _decoded(data, encoding)) is not None:
            return _legacy(text, encoding, "by its escape sequences")
    try:
        return Decoded(text=_newlines(data.decode("utf-8")), encoding="utf-8")
    except UnicodeDecodeError:
        pass
    name = _known(declared or _cookie(data))
    if name is not None:
        try:
            return _legacy(data.decode(name), name, "as it declares")
        except UnicodeDecodeError:
            pass
    if _mostly_utf8(data):
        return _lossy(data, "utf-8")
    name = _guess(data)
    try:
        return _legacy(data.decode(name), name, "a guess")
    except UnicodeDecodeError:
        return _lossy(data, name)


def looks_binary(head: bytes) -> bool:
    """Whether the first bytes of a file are no text in any encoding that `decode` knows."""
    if any(head.startswith(mark) for mark, _ in _BOMS):
        return False
    if b"\0" in head:
        return _unmarked_utf16(head) is None
    controls = sum(head.count(bytes([c])) for c in (*range(1, 8), *range(14, 27), 28, 29, 30, 31))
    return controls * 50 > len(head)


def _marked(data: bytes, encoding: str) -> Decoded:
    try:
        return Decoded(text=_newlines(data.decode(encoding)), encoding=encoding)
    except UnicodeDecodeError:
        return _lossy(data, encoding)


def _legacy(text: str, encoding: str, how: str) -> Decoded:
    problem = Problem(code="legacy_encoding", message=f"not UTF-8; read as {encoding} ({how})")
    return Decoded(text=_newlines(text), encoding=encoding, problems=(problem,))


def _lossy(data: bytes, encoding: str) -> Decoded:
    text = _newlines(data.decode(encoding, errors="replace"))
    lines = [n for n, line in enumerate(text.split("\n"), 1) if "\ufffd" in line]
    shown = ", ".join(map(str, lines[:5])) + (", …" if len(lines) > 5 else "")
    problem = Problem(
        code="decoded_lossily",
        message=f"bytes that are not {encoding} were replaced by U+FFFD (line {shown})",
    )
    return Decoded(text=text, encoding=encoding, problems=(problem,))


def _newlines(text: str) -> str:
    return text.replace("\r\n", "\n") if "\r" in text else text


def _cookie(data: bytes) -> str | None:
    for line in data[:1000].split(b"\n")[:2]:
        found = _COOKIE.match(line)
        if found is not None:
            return found[1].decode("ascii", "replace")
    return None


def _known(encoding: str | None) -> str | None:
    """Returns Python's name of a declared text encoding, or None."""
    if encoding is None:
        return None
    try:
        info = codecs.lookup(encoding.strip())
    except (LookupError, ValueError):
        return None
    if not getattr(info, "_is_text_encoding", True) or info.name in ("idna", "punycode"):
        return None
    # Browsers and editors read these labels as the Windows page that extends them.
    name = info.name
    return "cp1252" if name in ("iso8859-1", "ascii") else name


def _mostly_utf8(data: bytes) -> bool:
    """Whether broken bytes are few among well-formed multi-byte characters."""
    text = data.decode("utf-8", errors="replace")
    broken = text.count("\ufffd")
    good = sum(1 for _ in re.finditer("[^\x00-\x7f\ufffd]", text))
    return good >= 10 * broken


def _guess(data: bytes) -> str:
    """Returns the likeliest legacy encoding of bytes that are not UTF-8."""
    sample = _sample(data)
    if len(re.findall(rb"[\x80-\xff]", sample)) < 4:
        return "cp1252"
    from charset_normalizer import from_bytes

    best = from_bytes(sample, cp_isolation=[*_SINGLE_BYTE, *_EAST_ASIAN]).best()
    if best is None:
        scores = _east_asian_scores(sample)
        likeliest = max(scores, key=lambda name: scores[name], default="cp1252")
        return likeliest if scores.get(likeliest, 0.0) > _EAST_ASIAN_SHARE else "cp1252"
    # Western and Central European pages differ in a few letters; the Western one is far commoner.
    if best.encoding == "cp1250" and _decoded(sample, "cp1252") is not None:
        return "cp1252"
    if best.encoding not in _EAST_ASIAN:
        return str(best.encoding)
    scores = _east_asian_scores(sample)
    return max(scores, key=lambda name: scores[name], default="gb18030")


def _east_asian_scores(sample: bytes) -> dict[str, float]:
    """Tells East Asian encodings apart by how common the characters are that they decode to."""
    scores: dict[str, float] = {}
    for encoding in _EAST_ASIAN:
        wide = [char for char in _decoded(sample, encoding) or "" if char > "\x7f"]
        if wide:
            common = 2 * sum(char in _COMMON_HAN for char in wide)
            low, high = _EAST_ASIAN[encoding]
            scores[encoding] = (common + sum(low <= char <= high for char in wide)) / len(wide)
    return scores


def _decoded(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError:
        return None


def _sample(data: bytes) -> bytes:
    """Returns the lines around the first bytes that are not ASCII, cut at line ends."""
    found = re.search(rb"[\x80-\xff]", data)
    start = data.rfind(b"\n", 0, found.start() if found else 0) + 1
    if len(data) - start <= _SAMPLE_BYTES:
        return data[start:]
    end = data.rfind(b"\n", start, start + _SAMPLE_BYTES)
    return data[start : end if end > start else start + _SAMPLE_BYTES]


def _unmarked_utf16(head: bytes) -> str | None:
    """Returns the byte order of UTF-16 without a mark, when mostly Latin text shows it."""
    pairs = len(head) // 2
    if pairs < 4:
        return None
    even, odd = head[0 : 2 * pairs : 2].count(0), head[1 : 2 * pairs : 2].count(0)
    for encoding, zeros, others in (("utf-16-le", odd, even), ("utf-16-be", even, odd)):
        if zeros > 0.7 * pairs and not others:
            text = head[: 2 * pairs].decode(encoding, errors="replace")
            if sum(char.isprintable() or char in "\r\n\t" for char in text) > 0.98 * pairs:
                return encoding
    return None

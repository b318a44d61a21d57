"""Encodings: what bytes become, and what is said about it."""

from __future__ import annotations

import codecs

import pytest

from tsdoc.ingest.decode import decode, looks_binary

GERMAN = "Müller grüßt für die Öffentlichkeit, und die Straße heißt ‚Am Öhr‘.\n"
FRENCH = "Le café déjà vu, où est la gare ? Ça va, merci à tous les élèves.\n"


@pytest.mark.parametrize(
    ("mark", "encoding"),
    [
        (codecs.BOM_UTF8, "utf-8"),
        (codecs.BOM_UTF16_LE, "utf-16-le"),
        (codecs.BOM_UTF16_BE, "utf-16-be"),
        (codecs.BOM_UTF32_LE, "utf-32-le"),
        (codecs.BOM_UTF32_BE, "utf-32-be"),
    ],
)
def test_a_byte_order_mark_decides_and_is_dropped(mark: bytes, encoding: str) -> None:
    decoded = decode(mark + "naïve 😀\n".encode(encoding))
    assert decoded.text == "naïve 😀\n"
    assert decoded.problems == ()


def test_utf8_is_read_without_a_word() -> None:
    decoded = decode("plain “text” 😀".encode())
    assert (decoded.text, decoded.problems) == ("plain “text” 😀", ())


@pytest.mark.parametrize(
    ("text", "encoding", "name"),
    [
        (FRENCH, "cp1252", "cp1252"),
        (GERMAN, "cp1252", "cp1252"),
        ("Привет, как дела? Это русский текст о море.\n", "cp1251", "cp1251"),
        ("Привет, как дела? Это русский текст о море.\n", "koi8-r", "koi8_r"),
        ("// こんにちは世界\nclass A {}\n" * 8, "shift_jis", "cp932"),
        ("こんにちは世界、これは日本語の文章です。\n", "euc_jp", "euc_jp"),
        ("你好世界，这是一个中文的句子。\n", "gbk", "gb18030"),
        ("你好世界，這是一個中文的句子。\n", "big5", "big5"),
        ("안녕하세요 세계 이것은 한국어 문장입니다.\n", "euc_kr", "cp949"),
    ],
)
def test_legacy_encodings_are_decoded_with_a_warning(text: str, encoding: str, name: str) -> None:
    decoded = decode(text.encode(encoding))
    assert decoded.text == text
    assert decoded.encoding == name
    assert [problem.code for problem in decoded.problems] == ["legacy_encoding"]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("똠방각하 펲시콜라\n쌰, 뷁, 걍... 힝\n", "cp949"),
        ("これは日本語の文章です。\n", "iso2022_jp"),
        ("안녕하세요 세계\n", "iso2022_kr"),
        ("Unicode (ユニコード) は、世界の文字を扱うための符号です。か\u309aい\n", "shift_jisx0213"),
    ],
)
def test_rarer_east_asian_encodings_are_decoded_too(text: str, encoding: str) -> None:
    decoded = decode(text.encode(encoding))
    assert decoded.text == text
    assert [problem.code for problem in decoded.problems] == ["legacy_encoding"]


def test_a_coding_comment_is_believed() -> None:
    decoded = decode("# -*- coding: koi8-r -*-\n# да\n".encode("koi8-r"))
    assert decoded.text.endswith("# да\n")


def test_a_false_declaration_is_not_believed() -> None:
    data = "# coding: ascii\n# naïve\n".encode()
    assert decode(data).text.endswith("naïve\n")
    assert decode("é".encode("cp1252"), declared="no-such-page").text == "é"
    assert decode("é".encode("cp1252"), declared="rot13").text == "é"


def test_a_few_broken_bytes_in_utf8_are_replaced_and_their_lines_named() -> None:
    data = ("été à Paris\n" * 20).encode() + b"broken \xff here\n"
    decoded = decode(data)
    assert decoded.text.count("\ufffd") == 1
    assert decoded.problems[0].code == "decoded_lossily"
    assert "line 21" in decoded.problems[0].message


def test_only_lf_and_crlf_are_line_ends() -> None:
    decoded = decode("a\r\nb\rc\x0cd\u2028e\x85f\n".encode())
    assert decoded.text == "a\nb\rc\x0cd\u2028e\x85f\n"


def test_unmarked_utf16_is_recognised() -> None:
    data = "a window file, plain Latin text\n".encode("utf-16-le")
    assert not looks_binary(data)
    assert decode(data).text == "a window file, plain Latin text\n"


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n" + bytes(range(256)), b"abc\x00\x00def" * 20, b"\x01\x02\x03" * 9]
)
def test_binaries_are_told_from_text(data: bytes) -> None:
    assert looks_binary(data)

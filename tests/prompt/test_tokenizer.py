from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.prompt.strategies import texts
from tests.prompt.vocabularies import CONTROL_TEXTS
from tsdoc.errors import ModelError
from tsdoc.prompt import pieces
from tsdoc.prompt.tokenizer import TextTokenizer

shared_tokenizer = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)


def _original(tokenizer: TextTokenizer) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer.directory / "tokenizer.json"))


def _control_ids(tokenizer: TextTokenizer) -> set[int]:
    return set(_original(tokenizer).get_added_tokens_decoder())


@pytest.mark.parametrize("text", CONTROL_TEXTS)
@pytest.mark.parametrize("around", ["{}", "a{}b", " {} ", "\n{}\n", "{0}{0}"])
def test_control_tokens_in_a_text_are_spelled_out(
    tokenizer: TextTokenizer, text: str, around: str
) -> None:
    text = around.format(text)
    ids, _ = tokenizer.encode(text)
    assert _control_ids(tokenizer).isdisjoint(ids.tolist())
    assert tokenizer.decode(ids).lstrip() == text.lstrip()


def test_merges_that_build_a_control_token_are_not_made(llama3: TextTokenizer) -> None:
    original = _original(llama3)
    number = original.token_to_id("</s>")
    assert [token.id for token in original.model.tokenize("</s>")] == [number]
    ids, _ = llama3.encode("</s>")
    assert ids.size > 1


@shared_tokenizer
@given(text=texts)
def test_every_text_is_encoded_and_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    import unicodedata

    ids, starts = tokenizer.encode(text)
    spelled = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
    if "llama3" in str(tokenizer.directory):
        spelled = unicodedata.normalize("NFC", spelled)
    decoded = tokenizer.decode(ids)
    if "sentencepiece" in str(tokenizer.directory):
        assert decoded == spelled.replace("▁", " ").removeprefix(" ")
    else:
        assert decoded == spelled
    assert ids.dtype == starts.dtype == np.int32
    assert ids.size == starts.size
    assert np.all(np.diff(starts) >= 0)
    assert np.all((starts >= 0) & (starts < max(len(text), 1)))


def test_tokens_inside_a_character_start_where_it_starts(byte_level: TextTokenizer) -> None:
    ids, starts = byte_level.encode("a🜁b")
    assert ids.size > 3
    assert starts.tolist() == [0, *[1] * (ids.size - 2), 2]


def test_a_text_has_no_prefix_space(sentencepiece: TextTokenizer) -> None:
    ids, _ = sentencepiece.encode("whale")
    token = _original(sentencepiece).id_to_token(int(ids[0]))
    assert token is not None
    assert not token.startswith("▁")


def test_texts_together_are_encoded_as_each_by_itself(tokenizer: TextTokenizer) -> None:
    many = ["one", "", "two <|im_end|>\n", "漢字" * 50, "three"]
    for text, (ids, starts) in zip(many, tokenizer.encode_many(many), strict=True):
        alone, alone_starts = tokenizer.encode(text)
        assert np.array_equal(ids, alone)
        assert np.array_equal(starts, alone_starts)


def test_pieces_of_a_long_text_have_the_tokens_of_the_whole(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "PIECE_CHARS", 20)
    source = random.Random(1)
    parts = ["\n", "\n", " ", "a", "Word", "9", ".", "\r\n", "'s", "e\u0301", "\u0301", "漢", "\t"]
    num_pieces = 0
    for _ in range(300):
        text = "".join(source.choices(parts, k=200))
        num_pieces += len(list(tokenizer._loaded.cut(text)))
        whole = tokenizer._loaded.plain.encode(text, add_special_tokens=False)
        ids, starts = tokenizer.encode(text)
        assert ids.tolist() == whole.ids
        assert starts.tolist() == np.maximum.accumulate([s for s, _ in whole.offsets]).tolist()
    assert num_pieces > 600


def test_texts_stay_whole_where_tokens_may_reach_across_lines(tmp_path: Path) -> None:
    from tests.prompt.vocabularies import make_sentencepiece

    directory = make_sentencepiece(tmp_path / "model")
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    data["model"]["vocab"]["a\n"] = 5000
    path.write_text(json.dumps(data), "utf-8")
    text = "a\n" * pieces.PIECE_CHARS * 2
    assert list(TextTokenizer(directory)._loaded.cut(text)) == [text]


def test_template_text_gets_control_tokens_by_id(byte_level: TextTokenizer) -> None:
    text = "<|im_start|>user\nThe whale<|im_end|>\n<tool_call>"
    expected = _original(byte_level).encode(text, add_special_tokens=False).ids
    assert byte_level.encode_control(text, at_start=True).tolist() == expected


@pytest.mark.parametrize(
    "text", ["<s>[INST] a [/INST] b</s><s>[INST]", "a<s> b", " a</s>\n\nb", "<s>", ""]
)
def test_template_text_gets_prefix_spaces_where_the_model_has_them(
    sentencepiece: TextTokenizer, text: str
) -> None:
    expected = _original(sentencepiece).encode(text, add_special_tokens=False).ids
    assert sentencepiece.encode_control(text, at_start=True).tolist() == expected


@pytest.mark.parametrize("scheme", ["never", "first", "always", "byte_level"])
@pytest.mark.parametrize("text", ["<s>a</s> b", "a<s>b</s>", " a<s> b", "<s><s>a"])
def test_every_scheme_of_prefix_spaces_is_followed(tmp_path: Path, scheme: str, text: str) -> None:
    from tests.prompt.vocabularies import make_byte_level, make_sentencepiece

    if scheme == "byte_level":
        directory = make_byte_level(tmp_path / "model")
        text = text.replace("<s>", "<|im_start|>").replace("</s>", "<|im_end|>")
    else:
        directory = make_sentencepiece(tmp_path / "model")
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    if scheme == "byte_level":
        data["pre_tokenizer"]["add_prefix_space"] = True
    else:
        step = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        data |= {"normalizer": None, "pre_tokenizer": step}
    path.write_text(json.dumps(data), "utf-8")
    tokenizer = TextTokenizer(directory)
    expected = _original(tokenizer).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_control(text, at_start=True).tolist() == expected
    ids, _ = tokenizer.encode("word")
    assert b"".join(tokenizer._loaded.token_bytes[number] for number in ids.tolist()) == b"word"


def test_bytes_listed_as_added_tokens_are_text(tmp_path: Path) -> None:
    from tests.prompt.vocabularies import make_sentencepiece

    directory = make_sentencepiece(tmp_path / "model")
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    number = data["model"]["vocab"]["<0x0A>"]
    data["added_tokens"].append({**data["added_tokens"][0], "id": number, "content": "<0x0A>"})
    path.write_text(json.dumps(data), "utf-8")
    tokenizer = TextTokenizer(directory)
    ids, _ = tokenizer.encode("a\n<0x0A>")
    assert np.count_nonzero(ids == number) == 1
    assert tokenizer.decode(ids) == "a\n<0x0A>"


def test_start_ids_are_what_the_model_puts_before_a_text(
    llama3: TextTokenizer, byte_level: TextTokenizer
) -> None:
    assert llama3.start_ids.tolist() == [_original(llama3).token_to_id("<|begin_of_text|>")]
    assert byte_level.start_ids.size == 0


def test_control_tokens_listed_only_in_the_config_count_too(tmp_path: Path) -> None:
    from tests.prompt.vocabularies import make_byte_level

    directory = make_byte_level(tmp_path / "model")
    path = directory / "tokenizer_config.json"
    entry = {"content": "<think>", "special": True}
    path.write_text(json.dumps({"added_tokens_decoder": {"9000": entry, "x": 1}}), "utf-8")
    assert TextTokenizer(directory).encode_control("<think>").tolist() == [9000]


@pytest.mark.timeout(60)
def test_white_space_around_control_tokens_that_claim_it_is_theirs(tmp_path: Path) -> None:
    from tests.prompt.vocabularies import make_byte_level

    directory = make_byte_level(tmp_path / "model")
    path = directory / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    data["added_tokens"][2] |= {"lstrip": True, "rstrip": True}
    path.write_text(json.dumps(data), "utf-8")
    tokenizer = TextTokenizer(directory)
    original = _original(tokenizer)
    for text in ("a \n<|im_end|>\n b", " <|im_end|> \n <|im_end|>", "<tool_call> <|im_end|>b "):
        expected = original.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_control(text).tolist() == expected
    blank = " " * (1 << 19)  # minutes, if each place were looked at on its own
    assert tokenizer.encode_control(f"<|im_end|>{blank}<|im_end|>{blank}a").size == 3
    expected = original.encode(f"{blank}a", add_special_tokens=False).ids
    assert tokenizer.encode_control(f"{blank}a").tolist() == expected


@shared_tokenizer
@given(ids=st.lists(st.integers(0, 1100), max_size=40))
def test_a_stream_gives_the_decoded_text_and_never_half_a_character(
    tokenizer: TextTokenizer, ids: list[int]
) -> None:
    stream = tokenizer.stream_decoder()
    parts = [stream.push(number) for number in ids]
    assert "".join(parts) == tokenizer.decode(ids)


@shared_tokenizer
@given(text=texts)
def test_every_prefix_of_a_streamed_text_is_a_prefix_of_the_text(
    byte_level: TextTokenizer, text: str
) -> None:
    spelled = "".join("?" if "\ud800" <= c <= "\udfff" else c for c in text)
    ids, _ = byte_level.encode(spelled)
    stream = byte_level.stream_decoder()
    shown = ""
    for number in ids:
        shown += stream.push(int(number))
        assert spelled.startswith(shown)
    assert shown == spelled


def test_decoding_leaves_out_special_tokens_and_unknown_ids(byte_level: TextTokenizer) -> None:
    ids = byte_level.encode_control("a<|im_end|>b<tool_call>")
    assert byte_level.decode([*ids.tolist(), 10**6]) == "ab<tool_call>"


def test_bytes_that_are_no_text_become_replacement_characters(byte_level: TextTokenizer) -> None:
    original = _original(byte_level)
    numbers = [original.token_to_id(letter) for letter in ("a", "ÿ", "b", "Ã")]
    known = [number for number in numbers if number is not None]
    assert known == numbers
    assert byte_level.decode(known) == "a\ufffdb"


def test_the_fingerprint_covers_the_files(tmp_path: Path) -> None:
    from tests.prompt.vocabularies import make_byte_level

    directory = make_byte_level(tmp_path / "model")
    before = TextTokenizer(directory).fingerprint
    assert TextTokenizer(directory).fingerprint == before
    path = directory / "tokenizer.json"
    path.write_text(path.read_text("utf-8") + " ", "utf-8")
    assert TextTokenizer(directory).fingerprint != before


@pytest.mark.parametrize("content", [None, "{", '{"model": {"type": "WordLevel"}}'])
def test_a_missing_or_damaged_tokenizer_is_a_model_error(
    tmp_path: Path, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, "utf-8")
    with pytest.raises(ModelError, match="tokenizer"):
        TextTokenizer(tmp_path).encode("a")


def test_other_kinds_of_tokenizer_are_named(tmp_path: Path) -> None:
    from tokenizers import models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ModelError, match="WordLevel is not supported"):
        TextTokenizer(tmp_path).encode("a")

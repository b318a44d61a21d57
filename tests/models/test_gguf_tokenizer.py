from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from tests.models import synthetic
from tsdoc.errors import ModelError
from tsdoc.models.gguf_tokenizer import write_tokenizer

TEXTS = [
    "hello the world, I'LL see 12345 it's ½ Ⅷ ٣٤\r\n\r\n  \t x  y\n\n\n   z  ",
    "naïve cafe\u0301 日本語 🎉👨‍👩‍👧 \x00 \x1b[31m\u200b\u3000",
    "<|im_start|>hello<|im_end|><tool> the <tool>x",
    "   leading",
    "",
    "def f(x):\n\treturn x**2  # the 12\n",
]


def texts() -> list[str]:
    generator = random.Random(1)
    pool = "thelo wd12 \n\t'.<>|" * 6 + "éß漢字かな🎉\u0301\u00a0Ⅷ"
    return TEXTS + ["".join(generator.choices(pool, k=80)) for _ in range(100)]


def build(directory: Path, keys: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    metadata = {f"tokenizer.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = architecture
    write_tokenizer(metadata, directory, vocab_size=len(keys["ggml.tokens"]))
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def oracle(directory: Path, keys: dict[str, Any], architecture: str = "llama") -> Tokenizer:
    """Returns transformers' own reading of the same vocabulary."""
    model = synthetic.make_model("llama")
    synthetic.write_gguf(
        directory / "m.gguf",
        architecture=architecture,
        keys=synthetic.metadata_of(model, "llama"),
        tensors=synthetic.tensors_of(model, "llama"),
        tokenizer=keys,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, gguf_file="m.gguf")
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def assert_same_ids(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in texts():
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == expected, text


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2", "smollm"])
def test_byte_level_ids_equal_those_of_transformers(tmp_path: Path, pre: str) -> None:
    keys = synthetic.byte_tokenizer_keys(pre)
    theirs = oracle(tmp_path, keys)
    # What transformers' GGUF reader leaves out, although the families' own tokenizers have it.
    if pre == "qwen2":
        theirs.normalizer = NFC()
    if pre == "smollm":
        theirs.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    assert_same_ids(build(tmp_path, keys), theirs)


def test_decoding_gives_the_text_back(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, synthetic.byte_tokenizer_keys("gpt-2"))
    for text in texts():
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_user_defined_ones_are_not(tmp_path: Path) -> None:
    build(tmp_path, synthetic.byte_tokenizer_keys())
    added = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    special = {token["content"]: token["special"] for token in added}
    assert special == dict.fromkeys(synthetic.CONTROLS, True) | {"<tool>": False}


def test_unused_entries_are_no_tokens(tmp_path: Path) -> None:
    assert build(tmp_path, synthetic.byte_tokenizer_keys()).token_to_id("[PAD0]") is None


def test_template_and_begin_token_are_written(tmp_path: Path) -> None:
    keys = synthetic.byte_tokenizer_keys() | {"ggml.add_bos_token": True}
    tokenizer = build(tmp_path, keys)
    assert (tmp_path / "chat_template.jinja").read_text() == synthetic.CHAT
    begin = keys["ggml.bos_token_id"]
    assert tokenizer.encode("x").ids[0] == begin
    assert tokenizer.encode("x", add_special_tokens=False).ids[0] != begin


def test_all_tokens_that_end_a_turn_count(tmp_path: Path) -> None:
    keys = synthetic.byte_tokenizer_keys()
    metadata = {f"tokenizer.{key}": value for key, value in keys.items()}
    ends = write_tokenizer(metadata, tmp_path, vocab_size=len(keys["ggml.tokens"]))
    tokens = keys["ggml.tokens"]
    assert [tokens[i] for i in ends] == ["<|im_end|>", "<|endoftext|>"]


def sentencepiece_keys(seed: int) -> dict[str, Any]:
    """A vocabulary as SentencePiece trains it: pieces made of shorter pieces, random scores."""
    generator = random.Random(seed)
    pieces = list("▁helotwrd.,'12xyz")
    while len(pieces) < 150:
        piece = generator.choice(pieces) + generator.choice(pieces)
        if piece not in pieces and len(piece) < 9:
            pieces.append(piece)
    scores = [float(-i) for i in range(len(pieces))]
    generator.shuffle(scores)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "ggml.scores": [0.0] * 259 + scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
    }


@pytest.mark.parametrize("seed", range(3))
def test_sentencepiece_ids_equal_those_of_transformers(tmp_path: Path, seed: int) -> None:
    keys = sentencepiece_keys(seed)
    theirs = oracle(tmp_path, keys)
    ours = build(tmp_path, keys)
    for text in texts():
        # Blanks at the start: transformers strips one there, Llama 2's own tokenizer.json and
        # llama.cpp do not. Control tokens: it puts no blank behind them, those two do.
        plain = text.lstrip().replace("<|", "").replace("<tool>", "")
        if plain:
            expected = theirs.encode(plain, add_special_tokens=False).ids
            assert ours.encode(plain, add_special_tokens=False).ids == expected, plain


def test_sentencepiece_decodes_bytes_and_blanks(tmp_path: Path) -> None:
    tokenizer = build(tmp_path, sentencepiece_keys(0))
    text = "hello  world 漢字\n🎉"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode(text).ids[0] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ggml.pre": "tekken"}, "'tekken' is not supported"),
        ({"ggml.pre": None}, "pre-tokenizer None"),
        ({"ggml.model": "t5"}, "'t5' is not supported"),
        ({"ggml.merges": ["q q"]}, "not in the vocabulary"),
        ({"ggml.merges": ["qq"]}, "not a pair"),
        ({"ggml.merges": None}, "no merges"),
        ({"ggml.token_type": [1]}, "disagree"),
        ({"ggml.tokens": ["a"] * 272}, "twice"),
    ],
)
def test_inconsistent_or_unknown_vocabularies_are_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        build(tmp_path, synthetic.byte_tokenizer_keys() | change)


def test_old_qwen_files_without_the_key_split_as_qwen_does(tmp_path: Path) -> None:
    ours = build(tmp_path, synthetic.byte_tokenizer_keys(None), "qwen2")
    assert (
        ours.encode("a12").ids
        == build(tmp_path, synthetic.byte_tokenizer_keys("qwen2")).encode("a12").ids
    )

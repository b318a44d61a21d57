"""Builds tokenizer.json and its companions from the vocabulary inside a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.errors import ModelError

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 2, 3, 4, 5, 6
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3")
# Control tokens that end a turn or a text in the supported families; whichever the vocabulary has.
_END_TOKENS = (
    "</s>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocabulary:
    """Tokens by id, with ggml's token types and (SentencePiece only) scores."""

    tokens: Sequence[str]
    types: Sequence[int]
    scores: Sequence[float]

    def ids(self) -> dict[str, int]:
        """Returns token → id without the unused padding entries."""
        used = {t: i for i, t in enumerate(self.tokens) if self.types[i] != _UNUSED}
        num_used = sum(kind != _UNUSED for kind in self.types)
        if len(used) != num_used:
            raise ModelError("the vocabulary holds a token twice")
        return used

    def added_tokens(self) -> list[dict[str, Any]]:
        """Returns the tokens that are matched as a whole: control and user-defined ones."""
        return [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind != _USER_DEFINED,
            }
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]


def write_tokenizer(metadata: Mapping[str, Any], directory: Path, *, vocab_size: int) -> list[int]:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `directory`.

    Args:
        metadata: Of the GGUF file.
        directory: Where to write.
        vocab_size: Rows of the embedding; a longer vocabulary is refused.

    Returns:
        The ids that end an answer, the declared one first.

    Raises:
        ModelError: the tokenizer is of an unknown kind or inconsistent.
    """
    vocabulary = _read_vocabulary(metadata, vocab_size)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        parts = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        parts = _sentencepiece(metadata, vocabulary)
    else:
        raise ModelError(
            f"tokenizer model {kind!r} is not supported", hint="Supported in GGUF: gpt2, llama."
        )
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(),
        **parts,
    }
    tokenizer["post_processor"] = _post_processor(metadata, vocabulary)
    text = json.dumps(tokenizer, ensure_ascii=False)
    (directory / "tokenizer.json").write_text(text, "utf-8")
    config = _tokenizer_config(metadata, vocabulary)
    (directory / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8"
    )
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    return _end_ids(metadata, vocabulary)


def _read_vocabulary(metadata: Mapping[str, Any], vocab_size: int) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ModelError("the GGUF file holds no vocabulary")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    scores = metadata.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    for values, kind in ((types, int), (scores, float)):
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ModelError("types or scores of the vocabulary are damaged")
    if len(tokens) > vocab_size or len(types) != len(tokens) or len(scores) != len(tokens):
        raise ModelError(
            f"vocabulary ({len(tokens)} tokens), its types ({len(types)}) or scores "
            f"({len(scores)}) and the embedding ({vocab_size} rows) disagree"
        )
    return _Vocabulary(tokens=tokens, types=types, scores=scores)


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    """GPT-2 style BPE over bytes; `tokenizer.ggml.pre` names the rule that splits words."""
    pre = metadata.get("tokenizer.ggml.pre")
    architecture = metadata.get("general.architecture")
    if pre is None and architecture in ("qwen2", "qwen3"):
        pre = "qwen2"  # files older than the key; every model of these families splits this way
    splitters, normalizer, ignore_merges = _pre_tokenizer(pre)
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError("the GGUF file holds no merges")
    pairs = [merge.split(" ") for merge in merges if isinstance(merge, str)]
    if any(len(pair) != 2 for pair in pairs) or len(pairs) != len(merges):
        raise ModelError("a merge of the vocabulary is not a pair of tokens")
    vocab = vocabulary.ids()
    for left, right in pairs:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ModelError(f"merge {left!r} + {right!r} is not in the vocabulary")
    return {
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": splitters},
        "decoder": _BYTE_LEVEL | {"use_regex": True},
        "model": _bpe(vocab, pairs) | {"ignore_merges": ignore_merges},
    }


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}


def _pre_tokenizer(pre: Any) -> tuple[list[dict[str, Any]], dict[str, Any] | None, bool]:
    """Returns (pre-tokenizers, normalizer, whether whole words skip the merges)."""

    def split(digits: str) -> list[dict[str, Any]]:
        pattern = {"Regex": _WORDS + digits + _REST}
        return [
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
            _BYTE_LEVEL | {"use_regex": False},
        ]

    if pre in ("qwen2", "deepseek-r1-qwen"):
        return split(r"\p{N}"), {"type": "NFC"}, False
    if pre in _LLAMA_3:
        return split(r"\p{N}{1,3}"), None, True
    if pre in ("smollm", "starcoder"):
        digits = {"type": "Digits", "individual_digits": True}
        return [digits, _BYTE_LEVEL | {"use_regex": True}], None, False
    if pre in ("gpt-2", "default"):
        return [_BYTE_LEVEL | {"use_regex": True}], None, False
    raise ModelError(
        f"pre-tokenizer {pre!r} is not supported",
        hint="Supported in GGUF: qwen2, llama-bpe, smollm, gpt-2.",
    )


def _bpe(vocab: dict[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(pair) for pair in merges],
    }


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    """SentencePiece BPE as Llama 2 uses it: `▁` for blanks, bytes for unknown characters."""
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    blanks = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    unknown = [t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == 2]
    vocab = vocabulary.ids()
    model = _bpe(vocab, _merges_from_scores(vocabulary, vocab))
    model |= {"fuse_unk": True, "byte_fallback": True, "unk_token": next(iter(unknown), None)}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    normalizers = [blanks]
    if prefix:
        normalizers.insert(0, {"type": "Prepend", "prepend": "▁"})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges_from_scores(vocabulary: _Vocabulary, vocab: Mapping[str, int]) -> list[list[str]]:
    """Returns the merges that SentencePiece's greedy rule (highest score first) amounts to.

    Every way to split a token into two tokens is a merge that yields it; its rank is the token's
    score, and among splits of one token the longer left part goes first.
    """
    whole = {_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE}
    ranked: list[tuple[float, int, list[str]]] = []
    for token, i in vocab.items():
        if vocabulary.types[i] in whole:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-vocabulary.scores[i], -cut, [left, right]))
    ranked.sort(key=lambda item: item[:2])
    return [pair for _, _, pair in ranked]


def _token(metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str) -> str | None:
    i = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if isinstance(i, int) and 0 <= i < len(vocabulary.tokens):
        return vocabulary.tokens[i]
    return None


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Returns whether the file asks for the begin token, or its family puts it there."""
    family = metadata.get("tokenizer.ggml.model") == "llama"
    family = family or metadata.get("tokenizer.ggml.pre") in _LLAMA_3
    return bool(metadata.get("tokenizer.ggml.add_bos_token", family))


def _post_processor(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """Returns the rule that puts the begin token in front, when the file asks for it."""
    bos = _token(metadata, vocabulary, "bos")
    if bos is None or not _adds_bos(metadata):
        return None
    i = vocabulary.tokens.index(bos)

    def begin(number: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": bos, "type_id": number}}

    def sequence(name: str, number: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": number}}

    return {
        "type": "TemplateProcessing",
        "single": [begin(0), sequence("A", 0)],
        "pair": [begin(0), sequence("A", 0), begin(1), sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [i], "tokens": [bos]}},
    }


def _tokenizer_config(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(metadata),
    }
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for short, name in names.items():
        config[f"{short}_token"] = _token(metadata, vocabulary, name)
    return config


def _end_ids(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> list[int]:
    ids: list[int] = []
    for name in ("eos", "eot", "eom"):
        i = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(i, int) and 0 <= i < len(vocabulary.tokens):
            ids.append(i)
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == _CONTROL and token in _END_TOKENS:
            ids.append(i)
    if not ids:
        raise ModelError("the vocabulary names no token that ends an answer")
    return list(dict.fromkeys(ids))

"""Small tokenizers of the kinds that models have, trained on the spot, as model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INSTRUCT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% elif m.role == 'user' %}{{ bos_token if loop.first }}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
CONTROL_TEXTS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<tool_call>",
    "<s>",
    "</s>",
    "<unk>",
)
_WORDS = [
    "The whale swam under the ship and the captain said nothing at all.",
    "def main(path: str) -> int:\n    return len(path) + 12345",
    "<document name=...> </document> [INST] im_start im_end endoftext tool_call eot_id <| |> s > <",
    "über naïve 漢字 かな 😀 e\u0301 \\ \\\\ section › 4.2 Files",
    "Question: Answer: user assistant system Documents",
] * 20
_LLAMA_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _train(tokenizer: Tokenizer, specials: list[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 500,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(_WORDS, trainer)


def make_byte_level(directory: Path) -> Path:
    """GPT-2's kind: control tokens have entries in the model's own vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    _train(
        tokenizer,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return _save(directory, tokenizer.to_str(), template=CHATML, eos="<|im_end|>")


def make_llama3(directory: Path) -> Path:
    """Llama 3's kind: whole words that have an entry are taken before any merge.

    Without a template. The vocabulary also holds merges that spell out control tokens.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, [], pre_tokenizers.ByteLevel.alphabet())
    data = json.loads(tokenizer.to_str())
    vocab, merges = data["model"]["vocab"], data["model"]["merges"]
    first = len(vocab)
    spelled = ["<s", "</", "</s", "<s>", "</s>", "<|", "|>"]
    vocab.update({entry: first + n for n, entry in enumerate(spelled) if entry not in vocab})
    pairs = [["<", "s"], ["<", "/"], ["</", "s"], ["<s", ">"], ["</s", ">"], ["<", "|"], ["|", ">"]]
    merges.extend(pair for pair in pairs if pair not in merges)
    contents = ["<|begin_of_text|>", "<|eot_id|>", "<|im_end|>"]
    numbers = {content: len(vocab) + n for n, content in enumerate(contents)}
    numbers |= {entry: vocab[entry] for entry in ("<s>", "</s>")}
    data["added_tokens"] = [_added(content, number) for content, number in numbers.items()]
    data["added_tokens"].sort(key=lambda token: token["id"])
    data["post_processor"] = json.loads(
        processors.TemplateProcessing(
            single="<|begin_of_text|> $A",
            special_tokens=[("<|begin_of_text|>", numbers["<|begin_of_text|>"])],
        ).__getstate__()
    )
    return _save(directory, json.dumps(data), template=None, eos="<|eot_id|>")


def make_sentencepiece(directory: Path) -> Path:
    """Llama 2's kind: one alphabet with a mark for spaces, a prefix space, byte fallback."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("▁|\n"), "merged_with_next")
    _train(tokenizer, ["<unk>", "<s>", "</s>"], [chr(n) for n in range(0x20, 0x7F) if n != 0x20])
    data = json.loads(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    for entry in [entry for entry in vocab if "\n" in entry or not entry.isascii()]:
        if "▁" not in entry:
            del vocab[entry]
    data["model"]["merges"] = [
        pair for pair in data["model"]["merges"] if {*pair, "".join(pair)} <= set(vocab)
    ]
    after = max(vocab.values()) + 1
    vocab.update({f"<0x{byte:02X}>": after + byte for byte in range(256)})
    data["pre_tokenizer"] = None
    data["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    data["decoder"] = json.loads(
        decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ).__getstate__()
    )
    return _save(directory, json.dumps(data), template=INSTRUCT, eos="</s>", bos="<s>")


def _added(content: str, number: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": content, "special": True, **flags}


def _save(
    directory: Path, tokenizer: str, *, template: str | None, eos: str, bos: str | None = None
) -> Path:
    directory.mkdir()
    (directory / "tokenizer.json").write_text(tokenizer, "utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    config = {"eos_token": eos, "bos_token": bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return directory

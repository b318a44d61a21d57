"""A tokenizer that knows no control tokens, made from one that does.

Documents and questions go through it, so `<|im_end|>` in a text is spelled out like any other
characters. Two doors have to be shut: the list of added tokens, which is searched in the text
before anything else, and entries of the model's own vocabulary that merges can still build.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tsdoc.errors import ModelError

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
"""How SentencePiece vocabularies write the token of a single byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlToken:
    """An added token: the template writes it by id, a document cannot.

    Attributes:
        special: Never part of an answer's text (`<|im_end|>`; not `<tool_call>`).
        lstrip: White space before it belongs to it.
        rstrip: White space after it belongs to it.
    """

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixSpace:
    """Where a vocabulary's own tokenizer puts a space before a text.

    Attributes:
        first: Before the very first characters of a prompt.
        after_control: Also after each control token.
        doubled: Also where the text begins with white space already.
    """

    first: bool = False
    after_control: bool = False
    doubled: bool = False

    def applies(self, text: str, *, begins: bool, after: bool) -> bool:
        """Whether `text`, which begins the prompt or stands after a control token, gets one."""
        wanted = (self.first and begins) or (self.after_control and after)
        return wanted and (self.doubled or not text[:1].isspace())


def read_tokenizer(directory: Path) -> Tokenizer:
    """Reads `tokenizer.json` of a model directory.

    Raises:
        ModelError: it is missing, damaged, or no deterministic BPE.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ModelError("the model has no tokenizer.json", where=str(directory))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise ModelError(f"tokenizer cannot be read ({error})", where=str(path)) from error
    kind = type(tokenizer.model).__name__
    if kind != "BPE":
        raise ModelError(f"tokenizer type {kind} is not supported (only BPE)", where=str(path))
    if tokenizer.model.dropout:
        raise ModelError("the tokenizer is not deterministic (BPE dropout)", where=str(path))
    return tokenizer


def read_control_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> tuple[ControlToken, ...]:
    """Returns the added tokens of tokenizer.json and of tokenizer_config.json (`config`).

    Runs of white space and single bytes (`<0x0A>`), which some vocabularies add as ordinary
    tokens, are not control tokens.
    """
    found = {
        number: ControlToken(
            id=number,
            content=token.content,
            special=token.special,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
        )
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    listed = config.get("added_tokens_decoder")
    for number, token in listed.items() if isinstance(listed, dict) else ():
        if number.isdecimal() and isinstance(token, dict) and token.get("content"):
            found.setdefault(
                int(number),
                ControlToken(
                    id=int(number),
                    content=str(token["content"]),
                    special=bool(token.get("special")),
                    lstrip=bool(token.get("lstrip")),
                    rstrip=bool(token.get("rstrip")),
                ),
            )
    return tuple(token for _, token in sorted(found.items()) if not _is_text(token))


def _is_text(token: ControlToken) -> bool:
    blank = token.content.isspace() and not token.special
    return blank or BYTE_TOKEN.fullmatch(token.content) is not None


def plain_tokenizer(
    tokenizer: Tokenizer, control: tuple[ControlToken, ...]
) -> tuple[Tokenizer, PrefixSpace]:
    """Makes the tokenizer for plain text: no control tokens, no template, no prefix space.

    Returns:
        The tokenizer, and where the original puts the prefix space that this one leaves out.
    """
    normalizer = component_steps(tokenizer.normalizer)
    pre_tokenizer = component_steps(tokenizer.pre_tokenizer)
    parts: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": _sequence("normalizers", normalizer),
        "pre_tokenizer": _sequence("pretokenizers", pre_tokenizer),
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }
    reachable = {token.content for token in control if _is_reachable(tokenizer.model, token)}
    if reachable:
        parts["model"] = _without_tokens(json.loads(tokenizer.to_str())["model"], reachable)
    plain = Tokenizer.from_str(json.dumps(parts))
    if not reachable:
        plain.model = tokenizer.model
    return plain, _prefix_space(normalizer + pre_tokenizer)


def component_steps(component: Any) -> list[dict[str, Any]]:
    """The JSON form of a normalizer, pre-tokenizer or decoder, as a list of its steps."""
    return [] if component is None else _unroll(json.loads(component.__getstate__()))


def _unroll(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    key = next(k for k in ("normalizers", "pretokenizers", "decoders") if k in state)
    return [step for child in state[key] for step in _unroll(child)]


def _sequence(key: str, steps: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Puts steps together again, without those that put a space before a text."""
    kept = []
    for step in steps:
        changed = {name: value for name, value in step.items() if name != "add_prefix_space"}
        if step["type"] == "Metaspace":
            changed["prepend_scheme"] = "never"
        elif "add_prefix_space" in step:
            changed["add_prefix_space"] = False
        if step["type"] != "Prepend":
            kept.append(changed)
    return {"type": "Sequence", key: kept} if kept else None


def _prefix_space(steps: list[dict[str, Any]]) -> PrefixSpace:
    for step in steps:
        if step["type"] == "Prepend":
            return PrefixSpace(first=True, after_control=True, doubled=True)
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return PrefixSpace(first=scheme != "never", after_control=scheme == "always")
        if step.get("add_prefix_space"):
            return PrefixSpace(first=True, after_control=True)
    return PrefixSpace()


def _is_reachable(model: Any, token: ControlToken) -> bool:
    """Whether plain characters can become `token` in the model's own vocabulary.

    Merges inside a span do not depend on what stands around it, so it is enough to look at the
    span that is the token's content and nothing else.
    """
    if model.token_to_id(token.content) is None:
        return False
    return [piece.id for piece in model.tokenize(token.content)] == [
        model.token_to_id(token.content)
    ]


def _without_tokens(model: dict[str, Any], contents: set[str]) -> dict[str, Any]:
    """Takes entries out of a BPE model's JSON form, with all merges that make or use them."""
    merges = []
    for merge in model["merges"]:
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        if contents.isdisjoint((left, right, left + right)):
            merges.append((left, right))
    vocab = {entry: number for entry, number in model["vocab"].items() if entry not in contents}
    unknown = model.get("unk_token")
    if unknown in contents:
        # It stays the token for what the vocabulary cannot spell, under a name no text has.
        unknown = f"\ufdd0{unknown}"
        vocab[unknown] = model["vocab"][model["unk_token"]]
    return {**model, "vocab": vocab, "merges": merges, "unk_token": unknown}

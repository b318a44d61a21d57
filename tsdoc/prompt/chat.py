"""Token ids around the document: the template's head, questions, and later turns."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import numpy as np

from tsdoc.errors import ModelError
from tsdoc.home import Home
from tsdoc.prompt.render import RenderedTemplate, render_template
from tsdoc.prompt.tokenizer import Ids, TextTokenizer

_SEPARATOR = "\nQuestion: "


class ChatTemplate:
    """A model's chat template with a place for the document and one for the question."""

    def __init__(self, rendered: RenderedTemplate, tokenizer: TextTokenizer) -> None:
        self.rendered = rendered
        self.tokenizer = tokenizer

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about this template that the user should read once."""
        return self.rendered.warnings

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of everything the template adds to a prompt."""
        parts = json.dumps([asdict(self.rendered), _SEPARATOR], sort_keys=True)
        return hashlib.sha256(parts.encode("ascii")).hexdigest()

    @cached_property
    def turn_format(self) -> str:
        """Hex digest of what decides the ids of turns; one conversation needs one format."""
        parts = [self.tokenizer.fingerprint, self.rendered.turn, self.rendered.tail, _SEPARATOR]
        return hashlib.sha256(json.dumps(parts).encode("ascii")).hexdigest()

    @cached_property
    def head_ids(self) -> Ids:
        """Everything before the document: system text and the start of the user's turn."""
        if self.rendered.has_template:
            return self.tokenizer.encode_control(self.rendered.head, at_start=True)
        text, _ = self.tokenizer.encode(self.rendered.head)
        return np.concatenate([self.tokenizer.start_ids, text])

    def question_ids(self, question: str) -> Ids:
        """Everything after the document: the question and the start of the answer's turn.

        Control tokens in the question are plain text.
        """
        text, _ = self.tokenizer.encode(_SEPARATOR + question)
        return np.concatenate([text, self._tail_ids])

    def turn_ids(self, question: str) -> Ids:
        """A further question after an answer whose ids do not include the stop token.

        Raises:
            ModelError: the template allows no second question.
        """
        if self.rendered.turn is None:
            raise ModelError(
                "the model's chat template allows only one question",
                hint="Ask each question by itself.",
            )
        separator = "" if self.rendered.has_template else _SEPARATOR.lstrip()
        text, _ = self.tokenizer.encode(separator + question)
        return np.concatenate([self._between_ids, text, self._tail_ids])

    @cached_property
    def turn_lead(self) -> int:
        """How many of `turn_ids` stand before the user's turn begins."""
        return self._between_ids.size

    @cached_property
    def _between_ids(self) -> Ids:
        return self.tokenizer.encode_control(self.rendered.turn or "")

    @cached_property
    def _tail_ids(self) -> Ids:
        return self.tokenizer.encode_control(self.rendered.tail)


def load_template(directory: Path, tokenizer: TextTokenizer, *, home: Home | None) -> ChatTemplate:
    """Loads the chat template of a model directory.

    Args:
        directory: A model directory.
        tokenizer: Its tokenizer.
        home: Where the rendered template is kept; None keeps nothing.

    Raises:
        ModelError: the template's files cannot be read, or it fails.
    """
    return ChatTemplate(render_template(directory, home=home), tokenizer)

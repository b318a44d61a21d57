"""What the evaluation asks of a policy: prefill a haystack once, answer questions behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tsdoc.models.config import ModelConfig
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import Ids
from tsdoc.settings import Settings

if TYPE_CHECKING:
    import torch

    from tsdoc.engine.decoder import DecoderPart
    from tsdoc.kernels.interface import Backend

SHORTER = "Choose shorter --lengths or a smaller --model."
"""What to do where a haystack's K and V do not fit in memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """A loaded model and the settings it runs with.

    Attributes:
        steps: See `Runner`.
        backend: Of the shipped engine; other policies run on its device.
        template: What stands around haystack and question.
        max_tokens: The longest haystack with its question and answer.
    """

    config: ModelConfig
    settings: Settings
    decoder: DecoderPart
    backend: Backend
    template: ChatTemplate
    max_tokens: int
    steps: DecoderPart | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer: token ids without the stop token, times in seconds, Selection Cache counts.

    Attributes:
        sampled: Selections that were made by the key index and exactly as well.
        caught: Sum over these of the share of the exact selection's votes that the index caught.
    """

    tokens: tuple[int, ...]
    first_s: float
    decode_s: float
    lookups: int = 0
    hits: int = 0
    sampled: int = 0
    caught: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """Given tokens fed one by one: logits [num_tokens, vocab_size] float32 on the CPU."""

    logits: torch.Tensor
    lookups: int = 0
    hits: int = 0


class Contender(Protocol):
    """A policy that runs: one haystack at a time."""

    def prefill(self, ids: Ids, on_tokens: Callable[[int], None]) -> None:
        """Reads a haystack; the one before is forgotten.

        Args:
            ids: int32 [num_tokens].
            on_tokens: Told now and then how many tokens are done.

        Raises:
            ResourceError: the device cannot hold it.
        """

    def answer(self, question: Ids, max_new_tokens: int) -> Reply:
        """Answers greedily behind the haystack; the next answer starts behind it as well."""

    def follow(self, ids: Ids) -> Followed:
        """Feeds given tokens behind the haystack as if they had been generated."""

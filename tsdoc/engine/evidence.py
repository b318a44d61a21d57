"""What question and answer looked at in the document: one exact pass over its keys, per layer.

Every token that asked or answered votes, in the layers of its `QueryLog`, among all keys of the
document, whatever was selected while it was computed. Keys that any question draws (attention
sinks, headings, delimiters) are told apart by the votes of a neutral question: a token's evidence
is its part of the Kullback-Leibler divergence between the two distributions, mean over layers.

Weight and layers were chosen on 51 questions about novels (`tests/evidence_eval.py` measures them
on others): question tokens point at what has the same words, answer tokens at what says the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from tsdoc.engine.forward import Ranges, Runner, blocks, chunk_bounds
from tsdoc.engine.query_log import QueryLog, logged_layers
from tsdoc.kernels.interface import DeviceCache
from tsdoc.prompt.chat import ChatTemplate

NEUTRAL_QUESTION = "What is this document about?"
ANSWER_WEIGHT = 0.5  # of the answer's tokens together; the rest is the question's
FLOOR = 0.01  # of an equal share: votes below it are noise


@dataclass(frozen=True, slots=True)
class Copy:
    """Positions [first, last) of the prompt, read again from position `at` on."""

    first: int
    last: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What the tokens of one answer looked at, per position of a range of the document.

    Attributes:
        votes: [num_layers, num_positions] float32, each layer's of sum 1.
        attention: [num_positions] float32: the share of attention, as it is paid to the rows that
            are attended, that goes there; mean over layers.
    """

    votes: torch.Tensor
    attention: torch.Tensor

    def evidence(self, neutral: torch.Tensor) -> torch.Tensor:
        """Returns how much more was looked at than `neutral` does, [num_positions], ≥ 0.

        In nats: their sum is the divergence where more was looked at, mean over layers.
        """
        return gain(self.votes, neutral)


def gain(votes: torch.Tensor, neutral: torch.Tensor) -> torch.Tensor:
    """How much more `votes` look at a position than `neutral` ones do, [num_positions], ≥ 0.

    Args:
        votes: [num_layers, num_positions], each layer's of sum 1.
        neutral: Same, of a neutral question.
    """
    floor = FLOOR / votes.shape[1]
    total = torch.zeros(votes.shape[1], device=votes.device)
    for found, expected in zip(votes, neutral, strict=True):
        total += (found * torch.log((found + floor) / (expected + floor))).clamp_min_(0)
    return total / len(neutral)


class KeptVotes(Protocol):
    """Keeps votes [num_layers, num_positions] with what they were cast in."""

    def read(self, asked: bytes, shape: tuple[int, int]) -> npt.NDArray[np.float32] | None:
        """Returns what was kept under `asked`; None where there is nothing good."""

    def keep(self, asked: bytes, votes: npt.NDArray[np.float32]) -> None:
        """Keeps `votes` under `asked`, if that can be done."""


@dataclass(slots=True, kw_only=True)
class Neutral:
    """What a question that any document answers looks at in a prompt: found once.

    Attributes:
        ids: Tokens of the question.
        document: Positions [first, last) that are voted on.
        start: Length of the prompt.
        kept: Where it is found in later sessions.
        by_index: Whether votes go by the key index, as those that they are compared with.
    """

    ids: Sequence[int]
    document: tuple[int, int]
    start: int
    kept: KeptVotes | None = None
    by_index: bool = False
    _votes: torch.Tensor | None = field(default=None, init=False)

    def votes(
        self, runner: Runner, cache: DeviceCache, start: int, *, question_chunk_size: int
    ) -> torch.Tensor:
        """Returns votes [num_layers, num_positions]; K and V from `start` on are overwritten.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """
        if self._votes is None:
            # Behind a conversation, votes depend on that as well.
            kept = self.kept if start == self.start else None
            layers = logged_layers(runner.decoder.config.num_layers)
            how = (list(self.ids), self.document, layers, question_chunk_size)
            asked = repr((*how, "by index") if self.by_index else how).encode()
            if kept is not None:
                self._votes = self._read(kept, asked, len(layers), runner.rope.cos.device)
            if self._votes is not None:
                return self._votes
            self._votes = document_votes(
                runner,
                cache,
                self.ids,
                start,
                self.document,
                question_chunk_size=question_chunk_size,
            )
            runner.load(cache, start)  # what comes next begins where this did
            if kept is not None:
                kept.keep(asked, self._votes.cpu().numpy())
        return self._votes

    def _read(
        self, kept: KeptVotes, asked: bytes, num_layers: int, device: torch.device
    ) -> torch.Tensor | None:
        first, last = self.document
        votes = kept.read(asked, (num_layers, last - first))
        if votes is None or votes.size == 0:
            return None
        # Of a store that was tampered with, too, only shares are taken.
        is_good = votes.min() >= 0 and votes.max() <= 1
        return torch.tensor(votes, device=device) if is_good else None


@torch.inference_mode()
def look(
    runner: Runner,
    cache: DeviceCache,
    log: QueryLog,
    document: tuple[int, int],
    *,
    question_chunk_size: int,
    allowed: Ranges | None = None,
    copies: Sequence[Copy] = (),
) -> Looked:
    """Finds what the tokens of `log` looked at.

    Args:
        runner: Model and settings.
        cache: Holds K and V of the prompt, the question and the answer.
        log: Queries of the question's last chunk and of the answer.
        document: Positions [first, last) that are voted on.
        question_chunk_size: Tokens that share a selection when attention is recomputed.
        allowed: What the answer was restricted to.
        copies: What the question repeats; attention to it counts for the original.

    Raises:
        CorruptPageError: a page does not match its checksum.
    """
    first, last = document
    chunks = [
        *chunk_bounds(log.start, log.question_end, question_chunk_size, log.start),
        *chunk_bounds(log.question_end, log.end, question_chunk_size, log.question_end),
    ]
    device = runner.rope.cos.device
    votes = torch.empty(len(log.layers), last - first, device=device)
    attention = torch.zeros(last - first)
    for row, layer in zip(votes, log.layers, strict=True):
        row.copy_(_weighed_votes(runner, cache, layer, log, document))
        paid = _paid(runner, cache, layer, log, chunks, allowed)
        for copy in copies:
            paid[copy.first : copy.last] += paid[copy.at :][: copy.last - copy.first]
        attention += paid[first:last]
    return Looked(votes=votes, attention=attention / len(log.layers))


@torch.inference_mode()
def document_votes(
    runner: Runner,
    cache: DeviceCache,
    ids: Sequence[int],
    start: int,
    document: tuple[int, int],
    *,
    question_chunk_size: int,
    asked_from: int = 0,
) -> torch.Tensor:
    """Votes of a question behind the prompt, [num_layers, num_positions].

    Args:
        runner: Model and settings.
        cache: Holds K and V of the prompt; those behind `start` are overwritten.
        ids: The question's tokens.
        start: Length of the prompt.
        document: Positions [first, last) that are voted on.
        question_chunk_size: Tokens that share a selection.
        asked_from: The first of `ids` that votes; those before it are an earlier conversation's.
    """
    end, voters = start + len(ids), start + asked_from
    device = runner.rope.cos.device
    log = QueryLog(
        runner.decoder, start=voters, question_end=end, num_tokens=end - voters, device=device
    )
    chunks = [
        *chunk_bounds(start, voters, question_chunk_size, start),
        *chunk_bounds(voters, end, question_chunk_size, voters),
    ]
    for block in blocks(chunks):
        first, last = block[0][0], block[-1][1]
        runner.run_chunks(
            cache,
            torch.tensor(ids[first - start : last - start]),
            first,
            block,
            need_logits=False,
            num_layers=log.layers.stop,
            log=log if last > voters else None,
        )
    votes = torch.empty(len(log.layers), document[1] - document[0], device=device)
    for row, layer in zip(votes, log.layers, strict=True):
        row.copy_(runner.soft_votes(cache, layer, log, (voters, end), document))
    return votes


def make_neutral(
    template: ChatTemplate,
    document: tuple[int, int],
    start: int,
    kept: KeptVotes | None = None,
    *,
    by_index: bool = False,
) -> Neutral:
    """The neutral question of a prompt of `start` tokens; see `Neutral`."""
    ids = template.question_ids(NEUTRAL_QUESTION).tolist()
    return Neutral(ids=ids, document=document, start=start, kept=kept, by_index=by_index)


def _weighed_votes(
    runner: Runner, cache: DeviceCache, layer: int, log: QueryLog, document: tuple[int, int]
) -> torch.Tensor:
    asked = runner.soft_votes(cache, layer, log, (log.start, log.question_end), document)
    if log.end == log.question_end:
        return asked
    answered = runner.soft_votes(cache, layer, log, (log.question_end, log.end), document)
    return torch.lerp(asked, answered, ANSWER_WEIGHT)


def _paid(
    runner: Runner,
    cache: DeviceCache,
    layer: int,
    log: QueryLog,
    chunks: Sequence[tuple[int, int]],
    allowed: Ranges | None,
) -> torch.Tensor:
    """Mean attention of all tokens to each position before them, as chunks of `log` pay it."""
    total = torch.zeros(log.end)
    for start, end in chunks:
        mass = runner.attention_mass(cache, layer, log, (start, end), allowed).cpu()
        total[: mass.shape[0]] += mass * (end - start)
    return total / (log.end - log.start)

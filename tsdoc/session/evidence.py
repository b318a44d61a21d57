"""Finds what answers came from, with one neutral question per session to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import look, neutral_votes
from tsdoc.engine.generate import Generation
from tsdoc.evidence import Evidence, find_evidence
from tsdoc.kernels.kv import KVPiece
from tsdoc.prompt.assemble import Prompt


@dataclass(slots=True, kw_only=True)
class EvidenceFinder:
    """Evidence for the answers of one session.

    Attributes:
        prompt: What was asked about.
        neutral_ids: Tokens of a question that any document answers.
        make_piece: Room for a number of tokens from a position on.
    """

    prompt: Prompt
    neutral_ids: Sequence[int]
    make_piece: Callable[[int, int], KVPiece]
    _neutral: torch.Tensor | None = field(default=None, init=False)

    def find(
        self, engine: Engine, generation: Generation, pieces: Sequence[KVPiece], *, count: int
    ) -> Evidence:
        """Finds up to `count` passages for an answer that has just been generated.

        What lies behind the prompt is overwritten on devices with a memory of their own.

        Args:
            engine: Generated it.
            generation: Finished, with its queries kept.
            pieces: K and V of the prompt.
            count: Passages at most.

        Raises:
            CorruptPageError: a page does not match its checksum.
        """
        assert generation.log is not None  # noqa: S101 - the session asked for the queries
        document = self.prompt.head_len, self.prompt.contents_start
        chunk_size = generation.config.question_chunk_size
        looked = look(
            engine.runner,
            generation.cache,
            generation.log,
            document,
            question_chunk_size=chunk_size,
            allowed=generation.config.allowed,
        )
        if self._neutral is None:
            start = len(self.prompt.ids)
            cache = engine.cache([*pieces, self.make_piece(start, len(self.neutral_ids))])
            engine.runner.load(cache, start)
            self._neutral = neutral_votes(
                engine.runner,
                cache,
                self.neutral_ids,
                start,
                document,
                question_chunk_size=chunk_size,
            )
            engine.runner.load(cache, start)  # the next question begins where this one did
        return find_evidence(
            looked.evidence(self._neutral).numpy(),
            looked.attention.numpy(),
            document[0],
            self.prompt.map,
            count=count,
        )

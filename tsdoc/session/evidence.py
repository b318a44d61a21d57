"""Finds what answers came from, with one neutral question per session to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tsdoc.engine.engine import Engine
from tsdoc.engine.evidence import Neutral, look
from tsdoc.engine.generate import Generation
from tsdoc.evidence import Evidence, find_evidence
from tsdoc.kernels.kv import KVPiece
from tsdoc.prompt.assemble import Prompt
from tsdoc.store import Entry


@dataclass(frozen=True, slots=True)
class EntryVotes:
    """See `KeptVotes`: they lie beside the K and V that they were cast in.

    Attributes:
        entry: The entry that is open now; None where K and V are in memory alone.
    """

    entry: Callable[[], Entry | None]

    def read(self, asked: bytes, shape: tuple[int, int]) -> npt.NDArray[np.float32] | None:
        """See `KeptVotes.read`."""
        entry = self.entry()
        return entry.read_votes(asked, shape) if entry is not None else None

    def keep(self, asked: bytes, votes: npt.NDArray[np.float32]) -> None:
        """See `KeptVotes.keep`."""
        entry = self.entry()
        if entry is not None:
            entry.keep_votes(asked, votes)


@dataclass(slots=True, kw_only=True)
class EvidenceFinder:
    """Evidence for the answers of one session.

    Attributes:
        prompt: What was asked about.
        neutral: What any question looks at.
        make_piece: Room for a number of tokens from a position on.
    """

    prompt: Prompt
    neutral: Neutral
    make_piece: Callable[[int, int], KVPiece]

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
        chunk_size = generation.config.question_chunk_size
        looked = look(
            engine.runner,
            generation.cache,
            generation.log,
            self.neutral.document,
            question_chunk_size=chunk_size,
            allowed=generation.config.allowed,
            copies=generation.copies,
        )
        start = self.neutral.start
        room = self.make_piece(start, len(self.neutral.ids))
        cache = engine.cache([*pieces, room], engine.index)
        engine.runner.load(cache, start)
        expected = self.neutral.votes(engine.runner, cache, start, question_chunk_size=chunk_size)
        return find_evidence(
            looked.evidence(expected).cpu().numpy(),
            looked.attention.numpy(),
            self.neutral.document[0],
            self.prompt.map,
            count=count,
        )

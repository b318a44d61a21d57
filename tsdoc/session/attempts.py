"""One answer, in as many attempts as it takes where pages turn out to be damaged meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tsdoc.errors import CorruptPageError, DamagedStoreError
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.shared_kv import HostPiece
from tsdoc.session.indexing import keep_shares, recall_shares
from tsdoc.session.prompt_kv import KeptPrompt
from tsdoc.session.question import LaidOut
from tsdoc.session.tail import Tail
from tsdoc.session.transcript import StopAnswer, Transcript

if TYPE_CHECKING:
    from tsdoc.engine.engine import Engine
    from tsdoc.engine.generate import Generation
    from tsdoc.kernels.index_use import IndexWatch
    from tsdoc.store import Entry


@dataclass(slots=True, kw_only=True)
class Attempts:
    """Generates one answer; what is damaged is computed again, and the answer starts over.

    Attributes:
        kept: K and V of the prompt.
        engine: Generates, and repairs.
        make_piece: Gives room for question and answer, by first position and capacity.
        reused_tokens: Tokens of the prompt that the answer found in the store; repairs lessen it.
        ended: Why the answer is over, where the model itself does not say.
    """

    kept: KeptPrompt
    engine: Engine
    make_piece: Callable[[int, int], HostPiece]
    reused_tokens: int
    ended: str = "stop"

    def run(
        self, asked: LaidOut, before: Tail, answer: Transcript, *, interruptible: bool
    ) -> tuple[Generation, HostPiece]:
        """Returns the attempt that came through, and K and V of question and answer.

        Args:
            asked: The question.
            before: The conversation that it goes on with.
            answer: Takes tokens; what was shown of an attempt is not shown again.
            interruptible: Ctrl-C ends the answer as it is, once it has begun.
        """
        while True:
            piece = self.make_piece(asked.start, asked.room)
            try:
                pieces = [*self.kept.get().pieces, *before.pieces, piece]
                self._about_index(recall_shares)
                found = self._generate(pieces, asked, answer, interruptible=interruptible)
                self._about_index(keep_shares)
                return found, piece
            except CorruptPageError as error:
                self.kept.repair(self.engine, error)
                self.reused_tokens -= error.end - error.start
            except DamagedStoreError as error:
                self.reused_tokens = self.kept.get_again(error).estimate.reused_tokens

    def _about_index(self, act: Callable[[Engine, IndexWatch, Entry], None]) -> None:
        watch, entry = self.engine.index, self.kept.entry
        if watch is not None and entry is not None:
            act(self.engine, watch, entry)

    def _generate(
        self,
        pieces: Sequence[KVPiece],
        asked: LaidOut,
        answer: Transcript,
        *,
        interruptible: bool,
    ) -> Generation:
        generation = self.engine.generate(pieces, asked.ids, asked.start, asked.config)
        try:
            for count, token in enumerate(generation, 1):
                answer.add(count, token)
                if answer.looped:
                    self.ended = "loop"
                    break
            answer.finish()
        except KeyboardInterrupt:
            if not interruptible or not generation.tokens:
                raise
            self.ended = "interrupted"
            answer.finish()
        except StopAnswer:
            pass
        return generation

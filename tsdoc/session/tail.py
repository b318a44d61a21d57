"""What stands behind a document's prompt: the turns of one conversation, with their K and V."""

from __future__ import annotations

from dataclasses import dataclass, field

from tsdoc.kernels.shared_kv import HostPiece


@dataclass(slots=True, kw_only=True)
class Tail:
    """Token ids behind a prompt, exactly as they were asked and generated.

    K and V are in memory for as long as the process lives. Of a conversation that is taken up
    again there are none: its ids go through the model together with the next question.

    Attributes:
        ids: All turns, with what the template puts between them, without stop tokens.
        num_cached: How many of the first ones `pieces` hold.
        pieces: K and V, one piece for each turn.
    """

    ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    pieces: list[HostPiece] = field(default_factory=list)

    def append(self, ids: list[int], piece: HostPiece, end: int) -> None:
        """Adds a turn.

        Args:
            ids: Its question with what stands around it, and its answer.
            piece: Begins where `pieces` end.
            end: Position in the prompt up to which `piece` holds K and V.
        """
        piece.shorten(end - piece.start)
        self.ids += ids
        self.pieces.append(piece)
        self.num_cached += piece.capacity

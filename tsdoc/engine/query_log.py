"""The queries of the tokens that asked and answered, kept for the evidence pass."""

from __future__ import annotations

import torch

from tsdoc.engine.decoder import DecoderPart


def logged_layers(num_layers: int) -> range:
    """The middle third of a model's layers, which tell best what an answer rests on.

    Lower ones match words, higher ones prepare the next token.
    """
    return range(num_layers // 3, -(-2 * num_layers // 3))


class QueryLog:
    """Queries before RoPE of consecutive tokens, those of the question's last chunk first.

    Args:
        decoder: Decides layers, heads and type.
        start: Position of the first token.
        question_end: Position after the question; later tokens are the answer's.
        num_tokens: Room for that many.
        device: Where queries are computed.

    Attributes:
        layers: See `logged_layers`.
        num_tokens: Tokens there is room for.
        end: Position after the last token whose queries are held, from `question_end` on.
    """

    def __init__(
        self,
        decoder: DecoderPart,
        *,
        start: int,
        question_end: int,
        num_tokens: int,
        device: torch.device,
    ) -> None:
        config = decoder.config
        self.start = start
        self.question_end = question_end
        self.end = question_end
        self.num_tokens = num_tokens
        self.layers = logged_layers(config.num_layers)
        # Rows that are never written cost nothing on a CPU.
        self._queries = torch.empty(
            (len(self.layers), num_tokens, config.num_qo_heads, config.head_dim),
            dtype=decoder.dtype,
            device=device,
        )

    def write(self, layer: int, position: int, q: torch.Tensor) -> None:
        """Keeps `q` [num_tokens, num_qo_heads, head_dim] of tokens from `position` on.

        Those before `start` are left out.
        """
        if layer not in self.layers:
            return
        q = q[max(self.start - position, 0) :]
        first = max(position - self.start, 0)
        self._queries[layer - self.layers.start, first : first + q.shape[0]] = q

    def write_at(self, layer: int, position: torch.Tensor, q: torch.Tensor) -> None:
        """Keeps `q` [1, num_qo_heads, head_dim] at `position` ([1] on the device): graph-safe."""
        if layer in self.layers:
            rows = self._queries[layer - self.layers.start]
            rows.index_copy_(0, (position - self.start).long(), q)

    def queries(self, layer: int, first: int, last: int) -> torch.Tensor:
        """Queries [last - first, num_qo_heads, head_dim] of some tokens in one of `layers`."""
        return self._queries[layer - self.layers.start, first - self.start : last - self.start]

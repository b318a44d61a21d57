"""What a decoder that holds only a shard of the weights exchanges with the other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tsdoc.kernels.ranks import Ranks, SoloRanks


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSplit:
    """A rank's place among those that share the weights.

    The vocabulary is cut into ranges of equal length, the last ones filled up with rows of zeros.

    Attributes:
        ranks: Those that share the weights.
        vocab_size: Tokens of the model; None where the vocabulary is not cut.
    """

    ranks: Ranks
    vocab_size: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank adds what is to count once, a residual say."""
        return self.ranks.rank == 0

    def embed(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Rows of the whole embedding; `table` [vocab_shard, hidden_size] is this rank's part."""
        if self.vocab_size is None:
            return F.embedding(ids, table)
        local = ids - self.ranks.rank * table.shape[0]
        inside = (local >= 0) & (local < table.shape[0])
        rows = F.embedding(local.clamp(0, table.shape[0] - 1), table)
        return self.ranks.sum(rows.masked_fill_(~inside.unsqueeze(1), 0.0))

    def join(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of the whole vocabulary from this rank's [num_tokens, vocab_shard]."""
        if self.vocab_size is None:
            return logits
        parts = self.ranks.gather(logits)
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def sum(self, product: torch.Tensor) -> torch.Tensor:
        """The whole of a product of which each rank has computed a part, in place."""
        return self.ranks.sum(product)

    def start_sum(self, product: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins what `sum` does; the result is called for its end, and returns the sum."""
        return self.ranks.start_sum(product)


UNSPLIT = TensorSplit(ranks=SoloRanks())

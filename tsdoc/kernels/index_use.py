"""When selections go by the key index, and how well that does; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tsdoc.kernels.index import QueryMoments

FEW_UNTIL = 1 << 17  # tokens among which a quarter more candidates than top_k are enough
WORTHWHILE = 4  # times as many tokens as candidates, or all are scored


class Selecting(Protocol):
    """The settings of a selection that matter here; see `SelectionConfig`."""

    @property
    def top_k(self) -> int:
        """Tokens selected."""

    @property
    def function(self) -> str:
        """How heads vote."""

    @property
    def sets(self) -> str:
        """One set for all heads, or one per KV head."""

    @property
    def smoothing(self) -> int:
        """Width of a max-pool over votes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """How candidates are found before they are scored exactly.

    Attributes:
        candidates: Tokens scored exactly, as a multiple of top_k; 1 is none.
        few: The same on a CPU for FEW_UNTIL tokens or fewer.
        floor: Least share of an exact selection's votes that a layer's selections have to catch;
            below it that layer is selected from exactly.
        sample: On a CPU each layer's first selection is also made exactly, to know that share, and
            then one of so many of all layers; on a GPU those of each answer's first step.
    """

    candidates: int = 3
    few: float = 1.25
    floor: float = 0.95
    sample: int = 257  # a prime: with every number of layers, each has its turn

    def num_candidates(self, top_k: int, num_tokens: int) -> int:
        """Candidates on a CPU among `num_tokens`."""
        return int(top_k * (self.few if num_tokens <= FEW_UNTIL else self.candidates))

    def applies(self, config: Selecting, num_tokens: int) -> bool:
        """Whether a selection among `num_tokens` is worth, and able, to go through the index."""
        is_plain = config.function == "head_soft_vote" and config.sets == "one"
        enough = WORTHWHILE * self.candidates * config.top_k
        return is_plain and config.smoothing == 1 and num_tokens >= enough


class IndexWatch:
    """Knows how much of exact selections' votes the index catches, from selections made both ways.

    Args:
        config: Floor and sampling.
        moments: Of the model, for an index that is made while it is used.
    """

    def __init__(self, config: IndexConfig, moments: QueryMoments | None = None) -> None:
        self.config = config
        self.moments = moments
        self._count = 0
        self._shares: dict[int, list[float]] = {}

    def is_trusted(self, layer: int) -> bool:
        """Whether selections of a layer catch enough to go by the index."""
        shares = self._shares.get(layer)
        return not shares or sum(shares) / len(shares) >= self.config.floor

    def wants_sample(self, layer: int) -> bool:
        """Whether the layer's next selection is to be made both ways."""
        self._count += 1
        return layer not in self._shares or self._count % self.config.sample == 0

    def note(self, layer: int, share: float) -> None:
        """Takes the share of an exact selection's votes that the index's selection has."""
        self._shares.setdefault(layer, []).append(share)

    def known(self, num_layers: int) -> list[float | None]:
        """The mean share of each layer; None where no selection was made both ways."""
        found = (self._shares.get(layer) for layer in range(num_layers))
        return [sum(shares) / len(shares) if shares else None for shares in found]

    @property
    def num_samples(self) -> int:
        """Selections made both ways."""
        return sum(len(shares) for shares in self._shares.values())

    @property
    def sum_of_shares(self) -> float:
        """Over all samples."""
        return sum(sum(shares) for shares in self._shares.values())

    @property
    def mean_share(self) -> float | None:
        """Mean over all samples; None without one."""
        return self.sum_of_shares / self.num_samples if self._shares else None

    @property
    def least_share(self) -> float | None:
        """Mean of the layer where it is least; None without a sample."""
        means = [sum(shares) / len(shares) for shares in self._shares.values()]
        return min(means, default=None)

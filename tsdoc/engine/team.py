"""Ranks that compute together: one leads, the others repeat what it does on their shards.

The leader runs sessions and commands as if it were alone. Every operation of a `Runner` is
announced before it begins, and the followers run the same one: each with its shard of the weights
and of K and V, meeting the others in collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tsdoc.kernels.interface import DeviceCache
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.ranks import SOLO, Mesh

if TYPE_CHECKING:
    from tsdoc.engine.forward import Runner


class Followers(Protocol):
    """The other ranks, as the leader sees them."""

    def together(self, operation: str, /, **arguments: object) -> AbstractContextManager[None]:
        """Announces an operation; entered while the leader runs its part of it.

        An error within means that the ranks are no longer at the same place; they start anew for
        the next operation.

        Args:
            operation: Name of the operation.
            arguments: Numbers, ids, ranges, caches, query logs and Selection Caches.

        Raises:
            RankError: another rank was lost, now or since the last operation.
        """

    def renew(self) -> None:
        """Nothing is under way: ranks that were lost since start anew for the next operation."""

    def know(self, cache: DeviceCache, pieces: Sequence[KVPiece], runner: Runner) -> None:
        """Remembers what a cache was made of, so that the others can make theirs."""

    def close(self) -> None:
        """Ends them."""


class Nobody:
    """See `Followers`: there are none."""

    def together(self, operation: str, /, **arguments: object) -> AbstractContextManager[None]:
        """See `Followers.together`."""
        return nullcontext()

    def know(self, cache: DeviceCache, pieces: Sequence[KVPiece], runner: Runner) -> None:
        """See `Followers.know`."""

    def renew(self) -> None:
        """See `Followers.renew`."""

    def close(self) -> None:
        """See `Followers.close`."""


NOBODY = Nobody()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Team:
    """The ranks that an engine is one of.

    Attributes:
        mesh: All of them.
        followers: Those that this rank leads.
    """

    mesh: Mesh = SOLO
    followers: Followers = NOBODY


ALONE = Team()

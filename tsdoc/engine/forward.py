"""One pass of some tokens through all layers: a prefill block, a question, or one decode step.

embed → for each layer: project → write K/V → select per chunk → attend → finish → logits
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tsdoc.engine.decoder import DecoderPart
from tsdoc.engine.query_log import QueryLog
from tsdoc.engine.selection_cache import SelectionCache
from tsdoc.engine.team import ALONE, Team
from tsdoc.kernels.interface import DeviceCache, DeviceDecode, Pending
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig, chunk_range, selection_query

Ranges = Sequence[tuple[int, int]]

BLOCK = 4096  # tokens of a question that go through the layers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A model and the selection settings it runs with.

    Attributes:
        rope: Table for every compact position these settings can produce.
        team: The ranks that run it together.
        steps: The model as it runs generated tokens, one at a time; None is `decoder`.
    """

    decoder: DecoderPart
    selection: SelectionConfig
    rope: RopeTable
    team: Team = ALONE
    steps: DecoderPart | None = None

    def load(self, cache: DeviceCache, end: int) -> None:
        """Makes K and V of [0, end) available; see `DeviceCache.load`."""
        with self.team.followers.together("load", cache=cache, end=end):
            cache.load(end)

    def save(self, cache: DeviceCache, start: int, end: int) -> Pending:
        """Begins to bring K and V of [start, end) into the pieces; see `DeviceCache.save`."""
        with self.team.followers.together("save", cache=cache, start=start, end=end):
            return cache.save(start, end)

    def soft_votes(
        self,
        cache: DeviceCache,
        layer: int,
        log: QueryLog,
        tokens: tuple[int, int],
        document: tuple[int, int],
    ) -> torch.Tensor:
        """What logged `tokens` [first, last) look at in `document`; `DeviceCache.soft_votes`."""
        together = self.team.followers.together(
            "soft_votes", cache=cache, layer=layer, log=log, tokens=tokens, document=document
        )
        with together, torch.inference_mode():
            return cache.soft_votes(layer, log.queries(layer, *tokens), *document)

    def attention_mass(
        self,
        cache: DeviceCache,
        layer: int,
        log: QueryLog,
        tokens: tuple[int, int],
        allowed: Ranges | None,
    ) -> torch.Tensor:
        """Where the attention of logged `tokens`, as one chunk, goes; see `DeviceCache`."""
        together = self.team.followers.together(
            "attention_mass", cache=cache, layer=layer, log=log, tokens=tokens, allowed=allowed
        )
        with together, torch.inference_mode():
            around = chunk_range(*tokens, self.selection)
            q = log.queries(layer, *tokens)
            queries = cache.selection_queries(q, [around])
            (selected,) = cache.select(layer, queries, [around], allowed)
            return cache.attention_mass(layer, q, selected, around)

    def run_chunks(
        self,
        cache: DeviceCache,
        ids: torch.Tensor,
        start: int,
        chunks: Ranges,
        *,
        allowed: Ranges | None = None,
        need_logits: bool,
        num_layers: int | None = None,
        log: QueryLog | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor | None:
        """Runs tokens [start, start + len(ids)) chunk by chunk through all layers together.

        Args:
            cache: Holds K and V of everything before; receives those of `ids`.
            ids: Token ids [num_tokens] int64.
            start: Position of the first.
            chunks: Position ranges that cover the tokens without gaps.
            allowed: Restricts selection to these position ranges.
            need_logits: A prefill needs only K and V, so the last layer stops after writing them.
            num_layers: Stops likewise in an earlier layer, after so many; None runs all.
            log: Keeps the queries.
            on_layer: Called with the number of layers that are done, or begun on a device.

        Returns:
            Logits [vocab_size] of the last token, or None.
        """
        together = self.team.followers.together(
            "run_chunks",
            cache=cache,
            ids=ids,
            start=start,
            chunks=chunks,
            allowed=allowed,
            need_logits=need_logits,
            num_layers=num_layers,
            log=log,
        )
        with together, torch.inference_mode():
            return self._run_chunks(
                cache, ids, start, chunks, allowed, need_logits, num_layers, log, on_layer
            )

    def _run_chunks(
        self,
        cache: DeviceCache,
        ids: torch.Tensor,
        start: int,
        chunks: Ranges,
        allowed: Ranges | None,
        need_logits: bool,
        num_layers: int | None,
        log: QueryLog | None,
        on_layer: Callable[[int], None] | None,
    ) -> torch.Tensor | None:
        decoder, config = self.decoder, self.selection
        ranges = [chunk_range(first, last, config) for first, last in chunks]
        hidden = decoder.embed(ids)
        num_layers = num_layers or decoder.config.num_layers
        for layer in range(num_layers):
            q, k, v = decoder.project(layer, hidden)
            cache.write(layer, start, k, v)
            if log is not None:
                log.write(layer, start, q)
            if layer == num_layers - 1 and not need_logits:
                return None
            queries = cache.selection_queries(q, ranges)
            selected = cache.select(layer, queries, ranges, allowed)
            attention = cache.attend_chunks(layer, q, selected, ranges)
            hidden = decoder.finish_layer(layer, hidden, attention)
            if on_layer is not None:
                on_layer(layer + 1)
        return decoder.logits(hidden[-1:]).squeeze(0)

    def run_step(
        self,
        cache: DeviceCache,
        token: int,
        position: int,
        reuse: SelectionCache,
        *,
        allowed: Ranges | None = None,
        log: QueryLog | None = None,
    ) -> torch.Tensor:
        """Runs one generated token and returns the logits [vocab_size] of the next.

        On a Selection Cache hit, tokens that have left the local window since the selection was
        made stay attended: the window grows.
        """
        together = self.team.followers.together(
            "run_step",
            cache=cache,
            token=token,
            position=position,
            reuse=reuse,
            allowed=allowed,
            log=log,
        )
        with together, torch.inference_mode():
            return self._run_step(cache, token, position, reuse, allowed, log)

    def _run_step(
        self,
        cache: DeviceCache,
        token: int,
        position: int,
        reuse: SelectionCache,
        allowed: Ranges | None,
        log: QueryLog | None,
    ) -> torch.Tensor:
        decoder, config = self.steps or self.decoder, self.selection
        around = chunk_range(position, position + 1, config)
        whole = allowed is None and around.num_candidates <= config.top_k
        hidden = decoder.embed(torch.tensor([token]))
        for layer in range(decoder.config.num_layers):
            q, k, v = decoder.project(layer, hidden)
            cache.write(layer, position, k, v)
            if log is not None:
                log.write(layer, position, q)
            query = selection_query(q, self.rope, config.n_local)
            window = reuse.look_up(layer, query, whole=whole)
            if window is None:
                (selected,) = cache.select(layer, query.unsqueeze(0), [around], allowed)
                window = cache.open_window(layer, selected, around)
                reuse.remember(layer, query, window, whole=whole)
            hidden = decoder.finish_layer(layer, hidden, window.attend(q, position))
        return decoder.logits(hidden).squeeze(0)

    def run_device_step(
        self, decode: DeviceDecode, token: int, *, log: QueryLog | None = None
    ) -> torch.Tensor:
        """`run_step` where the device decides what is selected; logits [vocab_size]."""
        together = self.team.followers.together(
            "run_device_step", decode=decode, token=token, log=log
        )
        with together, torch.inference_mode():
            return self._run_device_step(decode, token, log)

    def _run_device_step(
        self, decode: DeviceDecode, token: int, log: QueryLog | None
    ) -> torch.Tensor:
        decoder = self.decoder

        def step(ids: torch.Tensor) -> torch.Tensor:
            hidden = decoder.embed(ids)
            for layer in range(decoder.config.num_layers):
                q, k, v = decoder.project(layer, hidden)
                if log is not None:
                    log.write_at(layer, decode.position, q)
                hidden = decoder.finish_layer(layer, hidden, decode.attend(layer, q, k, v))
            return decoder.logits(hidden).squeeze(0)

        return decode.run(step, token)


def chunk_bounds(start: int, end: int, chunk_size: int, origin: int = 0) -> list[tuple[int, int]]:
    """Splits [start, end) at the multiples of `chunk_size` counted from `origin`."""
    if start >= end:
        return []
    cuts = range(start + chunk_size - (start - origin) % chunk_size, end, chunk_size)
    edges = [start, *cuts, end]
    return list(itertools.pairwise(edges))


def blocks(chunks: Ranges) -> list[list[tuple[int, int]]]:
    """Groups consecutive chunks whose tokens go through the layers together, BLOCK at most."""
    found: list[list[tuple[int, int]]] = []
    for first, last in chunks:
        if not found or last - found[-1][0][0] > BLOCK:
            found.append([])
        found[-1].append((first, last))
    return found

"""Decode steps on the device: hit or miss, selection, window and attention without the host.

A step is the same launches whatever happens, so on CUDA it is captured as a graph once per answer
(about 20 ms for 28 layers) and replayed; kernels of a layer that hits return at once. Lengths and
the position are read from device memory. Buffers serve one answer after the other.

With a key index, an answer's first step selects both ways: it is not captured. Layers in which the
index catches too little of the exact selections' votes select exactly from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tsdoc.kernels.hot_rows import HotRows
from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.ranks import Ranks
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.triton.decode_attention import attend_window
from tsdoc.kernels.triton.decode_scores import decode_votes
from tsdoc.kernels.triton.decode_step import (
    LENGTH,
    LOOKUPS,
    STATE_SIZE,
    TOTAL_HITS,
    begin_step,
    compare_query,
)
from tsdoc.kernels.triton.gather import gather_rotated
from tsdoc.kernels.triton.hot_rows import gather_hot
from tsdoc.kernels.triton.index_rescore import select_candidates
from tsdoc.kernels.triton.index_scan import index_votes
from tsdoc.kernels.triton.tiles import LOG2_E
from tsdoc.kernels.triton.topk import make_space, select_top, tile_size, tiles_holding
from tsdoc.kernels.triton_index import DeviceIndex
from tsdoc.kernels.triton_samples import ExactSelection


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DecodeSetup:
    """What the launches of a step depend on.

    Attributes:
        pool: K and V; has room for every position that will be reached.
        storage: Pool tensors and page table as they are now; growing replaces them.
        num_sms: Multiprocessors of the device.
        tile: See `TopSpace`.
        is_restricted: Whether only some positions may be selected.
        index: Finds candidates instead of reading all keys, and knows how well; None selects
            exactly.
        ranks: Those that have the model's other heads; they never use an index.
    """

    pool: PagePool
    storage: tuple[torch.Tensor, torch.Tensor]
    rope: RopeTable
    config: SelectionConfig
    compute_dtype: torch.dtype
    num_sms: int
    theta: float | None
    max_hits: int
    tile: int
    is_restricted: bool
    index: tuple[DeviceIndex, IndexWatch] | None
    ranks: Ranks

    def equals(self, other: DecodeSetup) -> bool:
        """Whether the same launches do for both."""
        own, others = (
            (s.config, s.compute_dtype, s.theta, s.max_hits, s.tile, s.is_restricted, s.index)
            for s in (self, other)
        )
        mine, theirs = ((s.pool, s.rope, *s.storage) for s in (self, other))
        return own == others and all(a is b for a, b in zip(mine, theirs, strict=True))


class DecodeSteps:
    """Decode steps in buffers that one answer after the other uses."""

    def __init__(self, setup: DecodeSetup) -> None:
        self.setup = setup
        pool, config = setup.pool, setup.config
        self._device = device = pool.page_table.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        num_layers = len(pool.keys)
        num_kv, head_dim = pool.keys[0].shape[1:]
        self._position, self._token = zeros(1), zeros(1).long()
        self._meta, self._ends, self._skip = zeros(1, 4), zeros(1), zeros(1)
        self._tickets = zeros(num_kv)
        self._allowed = zeros(pool.capacity + 1) if setup.is_restricted else None
        self._state = zeros(num_layers, STATE_SIZE)
        num_sets = num_kv if config.sets == "per_kv_head" else 1
        self._num_candidates = num_candidates(config, setup.index)
        self._exact: ExactSelection | None = None
        if setup.index is not None:
            watch, num_sms = setup.index[1], setup.num_sms
            self._exact = ExactSelection(pool, watch, config.top_k, num_sms)
        self._exactly: set[int] = set()  # layers that do not go by the index
        self._is_sampled = False
        self._space = make_space(
            num_sets, pool.capacity, self._num_candidates, device, tile=setup.tile
        )
        self.hot: HotRows | None = None
        if setup.index is not None and pool.on_host:
            self.hot = HotRows(pool, config, self._num_candidates)
        rows = config.n_init + config.top_k + config.n_local + 1 + setup.max_hits
        windows = (num_layers, num_kv, rows, head_dim)
        self._k = torch.empty(windows, dtype=setup.compute_dtype, device=device)
        self._v = torch.empty_like(self._k)
        self._remembered: list[torch.Tensor | None] = [None] * num_layers
        self._graph: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = None
        self._is_compiled = False

    @property
    def position(self) -> torch.Tensor:
        """See `DeviceDecode.position`."""
        return self._position

    def begin(self, position: int, allowed: torch.Tensor | None) -> None:
        """Prepares for an answer whose first token is at `position`."""
        self._graph = None  # an answer's steps may write to memory of its own
        self._next = position
        tiles = tiles_holding(self._num_candidates, position, self.setup.tile)
        self._floor_tiles = max(tiles, self.setup.config.top_k)
        self._position.fill_(position)
        self._state.zero_()
        if self._allowed is not None and allowed is not None:
            self._allowed[: allowed.shape[0]] = allowed
        if self.hot is not None:
            self.hot.begin(position)
        self._is_sampled = self._wants_sample()
        self._exactly = self._distrusted()

    def _wants_sample(self) -> bool:
        """Where all keys of a layer would cross the bus, each layer is looked at once."""
        if self.setup.index is None:
            return False
        known = self.setup.index[1].known(len(self._k))
        return None in known or not self.setup.pool.on_host

    def _distrusted(self) -> set[int]:
        if self.setup.index is None:
            return set()
        watch = self.setup.index[1]
        return {layer for layer in range(len(self._k)) if not watch.is_trusted(layer)}

    def counts(self) -> tuple[int, int]:
        """Look-ups and hits since `begin`, over all layers."""
        lookups, hits = self._state[:, [LOOKUPS, TOTAL_HITS]].sum(0).tolist()
        return lookups, hits

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `DeviceDecode.attend`."""
        setup = self.setup
        config, pool = setup.config, setup.pool
        heads, head_dim = q.shape[1:]
        remembered = self._remembered[layer]
        if remembered is None:
            remembered = torch.zeros(heads, head_dim, device=self._device)
            self._remembered[layer] = remembered
        likeness = None
        if setup.ranks.size > 1 and setup.theta is not None:
            own = compare_query(q[0], remembered, setup.rope, config.n_local)
            likeness = setup.ranks.gather(own)
        hot = None if self.hot is None else self.hot.layers[layer]
        soft = config.function == "head_soft_vote"
        query = torch.empty(heads, head_dim, dtype=setup.compute_dtype, device=self._device)
        begin_step(
            q[0],
            k[0],
            v[0],
            keys=pool.keys[layer],
            values=pool.values[layer],
            page_table=pool.page_table,
            window_k=self._k[layer],
            window_v=self._v[layer],
            query=query,
            remembered=remembered,
            state=self._state[layer],
            position=self._position,
            meta=self._meta,
            ends=self._ends,
            skip=self._skip,
            allowed=self._allowed,
            likeness=likeness,
            hot=hot,
            rope=setup.rope,
            scale=head_dim**-0.5 * (LOG2_E if soft else 1.0),
            theta=setup.theta,
            n_init=config.n_init,
            n_local=config.n_local,
            top_k=config.top_k,
            max_hits=setup.max_hits,
        )
        selected = self._select(layer, query)
        keys, values, table = pool.keys[layer], pool.values[layer], pool.page_table
        rows = slice(layer, layer + 1)
        if hot is None or layer in self._exactly:
            gather_rotated(
                keys, values, table, selected, self._meta, self._ends, setup.rope, self._k[rows],
                self._v[rows], skip=self._skip,
            )  # fmt: skip
        else:
            gather_hot(
                keys, values, table, selected, hot, self._meta, self._ends, self._skip, setup.rope,
                self._k[layer], self._v[layer], n_init=config.n_init, n_local=config.n_local,
            )  # fmt: skip
        length = self._state[layer, LENGTH : LENGTH + 1]
        return attend_window(q[0], self._k[layer], self._v[layer], length, setup.rope).unsqueeze(0)

    def _select(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Positions [1, num_sets, top_k], num_selected of them written, unless this is a hit."""
        setup, config, pool = self.setup, self.setup.config, self.setup.pool
        exact = self._exact
        if exact is not None and layer in self._exactly and not self._is_sampled:
            return exact.select(layer, query, self._meta, self._skip, self._allowed)
        if setup.index is not None:
            index, _ = setup.index
            codes, keys = index.codes[layer], pool.keys[layer]
            votes, projected = index_votes(
                query, index.axes[layer], index.centres[layer], codes, self._meta, self._skip,
                self._space, self._tickets, floor_tiles=self._floor_tiles, allowed=self._allowed,
                num_sms=setup.num_sms,
            )  # fmt: skip
            chosen = select_candidates(
                query, votes, projected, keys, pool.page_table, codes, self._meta, self._skip,
                self._space, self._tickets, room=2 * self._num_candidates, top_k=config.top_k,
                hot=None if self.hot is None else self.hot.layers[layer],
            )  # fmt: skip
            if exact is None or not self._is_sampled:
                return chosen
            best = exact.select(layer, query, self._meta, self._skip, self._allowed, chosen)
            return best if layer in self._exactly else chosen
        votes = decode_votes(
            query, pool.keys[layer], pool.page_table, self._meta, self._skip, self._space,
            self._tickets, length=pool.capacity, per_kv_head=config.sets == "per_kv_head",
            soft=config.function == "head_soft_vote", allowed=self._allowed, num_sms=setup.num_sms,
        )  # fmt: skip
        is_joint = setup.ranks.size > 1 and config.sets == "one"
        if is_joint:
            # On a hit too: a step is the same launches whatever happens. Every rank gets the same
            # sum, and so the same positions.
            setup.ranks.sum(votes)
        return select_top(
            votes, self._meta, top_k=config.top_k, smoothing=config.smoothing, space=self._space,
            is_reduced=not is_joint, skip=self._skip,
        )  # fmt: skip

    def _extend_index(self) -> None:
        """Adds what is about to leave the local window to the index."""
        if self.setup.index is not None:
            index, _ = self.setup.index
            if self._next - self.setup.config.n_local > index.covered:
                index.cover(self._next)
        self._next += 1

    def run(self, step: Callable[[torch.Tensor], torch.Tensor], token: int) -> torch.Tensor:
        """See `DeviceDecode.run`: the very first step compiles, an answer's first is captured."""
        self._extend_index()
        self._token.fill_(token)
        if self._exact is not None and self._is_sampled:
            self._is_compiled = True
            logits = self._advance(step)
            self._exact.note()
            self._is_sampled, self._exactly = False, self._exactly | self._distrusted()
            return logits
        if self._device.type != "cuda" or not self._is_compiled:
            self._is_compiled = True
            return self._advance(step)
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            # NCCL looks at its events from a thread of its own, whatever this one captures.
            mode = "global" if self.setup.ranks.size == 1 else "thread_local"
            with torch.cuda.graph(graph, capture_error_mode=mode):
                logits = self._advance(step)
            self._graph = (graph, logits)
        graph, logits = self._graph
        graph.replay()
        return logits

    def _advance(self, step: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        logits = step(self._token)
        self._position += 1
        return logits


def make_setup(
    pool: PagePool,
    rope: RopeTable,
    config: SelectionConfig,
    compute_dtype: torch.dtype,
    num_sms: int,
    *,
    position: int,
    theta: float | None,
    max_hits: int,
    is_restricted: bool,
    ranks: Ranks,
    index: tuple[DeviceIndex, IndexWatch] | None = None,
) -> DecodeSetup:
    """What steps from `position` on depend on."""
    return DecodeSetup(
        pool=pool,
        storage=(pool.keys[0], pool.page_table),
        rope=rope,
        config=config,
        compute_dtype=compute_dtype,
        num_sms=num_sms,
        theta=theta,
        max_hits=max_hits,
        # A candidate more or less does not matter, so larger tiles than an exact top-k's will do.
        tile=tile_size(4 * position if index else position, num_candidates(config, index)),
        is_restricted=is_restricted,
        index=index,
        ranks=ranks,
    )


def num_candidates(config: SelectionConfig, index: tuple[DeviceIndex, IndexWatch] | None) -> int:
    """Positions that the first selection of a step finds."""
    return config.top_k * (index[1].config.candidates if index else 1)

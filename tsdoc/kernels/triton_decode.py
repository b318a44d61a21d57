"""Decode steps on the device: hit or miss, selection, window and attention without the host.

A step is the same launches whatever happens, so on CUDA it is captured as a graph once and
replayed; kernels of a layer that hits return at once. Lengths and the position are read from
device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.triton.decode_attention import attend_window
from tsdoc.kernels.triton.decode_scores import decode_votes
from tsdoc.kernels.triton.decode_step import LENGTH, LOOKUPS, STATE_SIZE, TOTAL_HITS, begin_step
from tsdoc.kernels.triton.gather import gather_rotated
from tsdoc.kernels.triton.tiles import LOG2_E
from tsdoc.kernels.triton.topk import select_top


@dataclass(slots=True, kw_only=True)
class TritonDecode:
    """See `DeviceDecode`.

    Attributes:
        pool: K and V; has room for every position that will be reached.
        position: Of the next token.
        allowed: [positions + 1] int32, running count of positions that may be selected.
    """

    pool: PagePool
    rope: RopeTable
    config: SelectionConfig
    compute_dtype: torch.dtype
    device: torch.device
    num_sms: int
    position: int
    theta: float | None
    max_hits: int
    allowed: torch.Tensor | None
    _position: torch.Tensor = field(init=False)
    _token: torch.Tensor = field(init=False)
    _meta: torch.Tensor = field(init=False)
    _ends: torch.Tensor = field(init=False)
    _skip: torch.Tensor = field(init=False)
    _state: torch.Tensor = field(init=False)
    _remembered: list[torch.Tensor | None] = field(init=False)
    _windows: list[tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    _graph: tuple[torch.cuda.CUDAGraph, torch.Tensor] | None = field(init=False, default=None)
    _steps: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        num_layers, config = len(self.pool.keys), self.config
        self._position = zeros(1) + self.position
        self._token = zeros(1).long()
        self._meta, self._ends, self._skip = zeros(1, 4), zeros(1), zeros(1)
        self._state = zeros(num_layers, STATE_SIZE)
        self._remembered = [None] * num_layers
        num_kv, head_dim = self.pool.keys[0].shape[1:]
        rows = config.n_init + config.top_k + config.n_local + 1 + self.max_hits
        shape = (num_kv, rows, head_dim)
        self._windows = [
            (
                torch.empty(shape, dtype=self.compute_dtype, device=self.device),
                torch.empty(shape, dtype=self.compute_dtype, device=self.device),
            )
            for _ in range(num_layers)
        ]

    @property
    def num_lookups(self) -> int:
        """See `DeviceDecode.num_lookups`."""
        return int(self._state[:, LOOKUPS].sum())

    @property
    def num_hits(self) -> int:
        """See `DeviceDecode.num_hits`."""
        return int(self._state[:, TOTAL_HITS].sum())

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `DeviceDecode.attend`."""
        config, pool = self.config, self.pool
        heads, head_dim = q.shape[1:]
        remembered = self._remembered[layer]
        if remembered is None:
            remembered = torch.zeros(heads, head_dim, device=self.device)
            self._remembered[layer] = remembered
        soft = config.function == "head_soft_vote"
        window_k, window_v = self._windows[layer]
        query = torch.empty(heads, head_dim, dtype=self.compute_dtype, device=self.device)
        begin_step(
            q[0],
            k[0],
            v[0],
            keys=pool.keys[layer],
            values=pool.values[layer],
            page_table=pool.page_table,
            window_k=window_k,
            window_v=window_v,
            query=query,
            remembered=remembered,
            state=self._state[layer],
            position=self._position,
            meta=self._meta,
            ends=self._ends,
            skip=self._skip,
            allowed=self.allowed,
            rope=self.rope,
            scale=head_dim**-0.5 * (LOG2_E if soft else 1.0),
            theta=self.theta,
            n_init=config.n_init,
            n_local=config.n_local,
            top_k=config.top_k,
            max_hits=self.max_hits,
        )
        per_kv_head = config.sets == "per_kv_head"
        votes, maxima = decode_votes(
            query,
            pool.keys[layer],
            pool.page_table,
            self._meta,
            self._skip,
            length=pool.capacity,
            per_kv_head=per_kv_head,
            soft=soft,
            allowed=self.allowed,
            num_sms=self.num_sms,
        )
        selected = select_top(
            votes,
            self._meta,
            top_k=config.top_k,
            smoothing=config.smoothing,
            maxima=maxima,
            skip=self._skip,
        )
        gather_rotated(
            pool.keys[layer],
            pool.values[layer],
            pool.page_table,
            selected,
            self._meta,
            self._ends,
            self.rope,
            window_k.unsqueeze(0),
            window_v.unsqueeze(0),
            skip=self._skip,
        )
        length = self._state[layer, LENGTH : LENGTH + 1]
        return attend_window(q[0], window_k, window_v, length, self.rope).unsqueeze(0)

    def run(self, step: Callable[[torch.Tensor], torch.Tensor], token: int) -> torch.Tensor:
        """See `DeviceDecode.run`: the first step compiles, the second is captured."""
        self._token.fill_(token)
        self._steps += 1
        if self.device.type != "cuda" or self._steps == 1:
            logits = step(self._token)
            self._position += 1
            return logits
        if self._graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = step(self._token)
                self._position += 1
            self._graph = (graph, logits)
        graph, logits = self._graph
        graph.replay()
        return logits

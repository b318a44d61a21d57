"""Paged selection scores of a prefill block: votes [num_chunks, positions] in two passes over K.

All chunks of a block are scored together, each masked to its own candidates:

    pass 1  running maximum and sum of every (query head, chunk), split over the positions
    combine one log2-sum-exp2 per (query head, chunk)
    pass 2  scores again, probabilities, and their sum over the query heads: the votes

No score reaches memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from tsdoc.kernels.triton.score_stats import combine_stats, stats_kernel
from tsdoc.kernels.triton.score_votes import border_votes_kernel, votes_kernel
from tsdoc.kernels.triton.tiles import LOG2_E, PAGE_SIZE, padded, precision

MAX_ROWS = 128  # (chunk, head) rows of one tile


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTuning:
    """Tile sizes; any choice gives the same votes up to rounding.

    Attributes:
        stats_block: Keys per tile of pass 1.
        stats_registers: Limit per thread, so that several programs share a multiprocessor.
        stats_programs: Programs of pass 1 per multiprocessor.
        votes_block: Keys per tile of pass 2.
        votes_tiles: Tiles that a program of pass 2 takes through all KV heads at a time.
        votes_programs: Programs of pass 2 per multiprocessor.
    """

    stats_block: int = 128
    stats_warps: int = 4
    stats_stages: int = 2
    stats_registers: int | None = None
    stats_programs: int = 2
    votes_block: int = 128
    votes_warps: int = 4
    votes_stages: int = 2
    votes_registers: int | None = None
    votes_tiles: int = 4
    votes_programs: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """What both passes are launched with.

    Attributes:
        q: [num_chunks, num_qo_heads, head_dim], scaled.
        low: First candidate.
        common_high: End of the candidates that all chunks share.
        high: End of the last chunk's candidates.
        chunk_rows: Chunks of one tile's rows.
    """

    q: torch.Tensor
    keys: torch.Tensor
    page_table: torch.Tensor
    meta: torch.Tensor
    allowed: torch.Tensor | None
    low: int
    common_high: int
    high: int
    chunk_rows: int
    num_sms: int
    tuning: ScoreTuning

    @property
    def num_batches(self) -> int:
        return -(-self.q.shape[0] // self.chunk_rows)

    @property
    def is_exact(self) -> bool:
        """Whether products are float32: those need small tiles."""
        return self.q.dtype == torch.float32

    @property
    def rows(self) -> int:
        rows: int = self.constants["R"]
        return rows

    @property
    def constants(self) -> dict[str, Any]:
        num_kv, head_dim = self.keys.shape[1:]
        group = self.q.shape[1] // num_kv
        return {
            "GROUP": group,
            "GP": padded(group),
            "R": self.chunk_rows * padded(group),
            "NUM_KV": num_kv,
            "HEAD_DIM": head_dim,
            "BLOCK_D": padded(head_dim, 16),
            "PRECISION": precision(self.q.dtype),
            "PAGE": PAGE_SIZE,
        }

    def tiles(self, size: int) -> tuple[int, int, int, int]:
        """First tile, first and end of those that are candidates of every chunk, end."""
        first, last = self.low // size, triton.cdiv(self.high, size)
        if self.allowed is not None:  # every tile takes the masked way
            return first, last, last, last
        inner = min(triton.cdiv(self.low, size), last)
        return first, inner, max(inner, self.common_high // size), last


def block_votes(
    q: torch.Tensor,
    keys: torch.Tensor,
    page_table: torch.Tensor,
    meta: torch.Tensor,
    *,
    low: int,
    common_high: int,
    high: int,
    per_kv_head: bool,
    soft: bool = True,
    allowed: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    num_sms: int = 1,
    tuning: ScoreTuning | None = None,
) -> torch.Tensor:
    """Votes of several chunks for the positions [low, high).

    Args:
        q: Selection queries [num_chunks, num_qo_heads, head_dim] in the type of the products.
        keys: [num_slots, num_kv_heads, head_dim] pool.
        page_table: [num_pages] int32.
        meta: [num_chunks, 4] int32: init_end, local_start, num_selected, num_before.
        low: Smallest init_end, that of the last chunk included: all chunks that have candidates
            begin there.
        common_high: Least local_start.
        high: Largest local_start.
        per_kv_head: One set of votes per KV head, instead of their sum.
        soft: Sum of softmax probabilities; False is the sum of scaled scores.
        allowed: [≥ high + 1] int32, running count of positions that may be selected.
        beside: [num_chunks, num_qo_heads] float32: log-sum-exp of scaled scores of keys that are no
            candidates, and share the softmax with them.
        num_sms: Multiprocessors of the device.
        tuning: Tile sizes.

    Returns:
        [num_sets, num_chunks, length] float32 indexed by position. Outside a chunk's candidates
        they are -inf or unwritten.
    """
    num_chunks, num_heads, head_dim = q.shape
    num_kv = keys.shape[1]
    gp = padded(num_heads // num_kv)
    scale = head_dim**-0.5 * (LOG2_E if soft else 1.0)
    # Few sizes: the last block of a prompt and most questions need no kernels of their own.
    sizes = [max(1, rows // gp) for rows in (16, MAX_ROWS // 2, MAX_ROWS)]
    block = _Block(
        q=(q.float() * scale).to(q.dtype),
        keys=keys,
        page_table=page_table,
        meta=meta,
        allowed=allowed,
        low=low,
        common_high=common_high,
        high=high,
        chunk_rows=next(n for n in sizes if n >= num_chunks or n == sizes[-1]),
        num_sms=num_sms,
        tuning=tuning or ScoreTuning(),
    )
    lse = _log_sums(block) if soft else None
    if lse is not None and beside is not None:
        lse = torch.logaddexp2(lse, beside * LOG2_E)
    return _votes(block, lse, num_kv if per_kv_head else 1)


def _log_sums(block: _Block) -> torch.Tensor:
    """Pass 1: log2-sum-exp2 [num_chunks, num_qo_heads] of each chunk's candidates' scores."""
    tuning, num_batches = block.tuning, block.num_batches
    num_chunks, num_heads, _ = block.q.shape
    num_kv = block.keys.shape[1]
    size = min(tuning.stats_block, 32) if block.is_exact else tuning.stats_block
    tiles = block.tiles(size)
    splits = max(1, block.num_sms * tuning.stats_programs // (num_kv * num_batches))
    splits = min(splits, tiles[3] - tiles[0])
    peak = torch.empty(num_chunks, num_heads, splits, device=block.q.device)
    total = torch.empty_like(peak)
    stats_kernel[(num_kv, splits, num_batches)](
        block.q, block.keys, block.page_table, block.meta, block.allowed, peak, total,
        num_chunks, num_heads, splits, *tiles, WIDE=False, BLOCK_N=size,
        HAS_ALLOWED=block.allowed is not None, num_warps=tuning.stats_warps,
        maxnreg=tuning.stats_registers, num_stages=1 if block.is_exact else tuning.stats_stages,
        **block.constants,
    )  # fmt: skip
    return combine_stats(peak, total)


def _votes(block: _Block, lse: torch.Tensor | None, num_sets: int) -> torch.Tensor:
    """Pass 2; see `block_votes`."""
    tuning, num_batches = block.tuning, block.num_batches
    num_chunks, num_heads, _ = block.q.shape
    length = triton.cdiv(block.high, PAGE_SIZE) * PAGE_SIZE
    size = min(tuning.votes_block, 32) if block.is_exact else tuning.votes_block
    low, inner, outer, high = block.tiles(size)
    splits = max(1, block.num_sms * tuning.votes_programs // (num_sets * num_batches))
    # As many tiles at a time as leave every program something to do.
    share = (outer - inner) // splits
    group_tiles = max(1, min(share, tuning.votes_tiles))
    votes = torch.empty(num_sets, num_chunks, length, device=block.q.device)
    shared = block.constants | {
        "SOFT": lse is not None,
        "HEADS": block.keys.shape[1] // num_sets,
        "WIDE": block.rows == MAX_ROWS and tuning.votes_warps == 4,
    }
    if outer > inner:
        votes_kernel[(num_sets, splits, num_batches)](
            block.q, block.keys, block.page_table, lse, votes, num_chunks, num_heads, length,
            inner, outer, group_tiles, BLOCK_N=size, num_warps=tuning.votes_warps,
            maxnreg=tuning.votes_registers,
            num_stages=1 if block.is_exact else tuning.votes_stages, **shared,
        )  # fmt: skip
    # Smaller tiles for the few at the border, so that more programs share them.
    part = min(size, 64)
    low, inner, outer, high = (edge * (size // part) for edge in (low, inner, outer, high))
    num_border = inner - low + high - max(outer, inner)
    if num_border > 0:
        programs = min(num_border, block.num_sms * tuning.votes_programs)
        border_votes_kernel[(num_sets, programs, num_batches)](
            block.q, block.keys, block.page_table, block.meta, block.allowed, lse, votes,
            num_chunks, num_heads, length, low, inner, outer, high, BLOCK_N=part,
            HAS_ALLOWED=block.allowed is not None, num_warps=tuning.votes_warps, num_stages=1,
            **shared,
        )  # fmt: skip
    return votes

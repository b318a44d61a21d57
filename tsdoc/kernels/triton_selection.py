"""Which tokens the chunks of a block attend to: votes and top-k of the `triton` backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from tsdoc.kernels.host_pool import PAGE_SIZE
from tsdoc.kernels.ranks import Ranks
from tsdoc.kernels.selection import SelectionConfig, top_indices, votes
from tsdoc.kernels.triton.scores import block_votes
from tsdoc.kernels.triton.store import slots_of
from tsdoc.kernels.triton.topk import select_top
from tsdoc.kernels.triton_parts import CacheParts
from tsdoc.kernels.triton_plan import BlockPlan

VOTE_BYTES = 2 << 30  # votes held at a time


class SelectedRows(Sequence[torch.Tensor]):
    """Per chunk the selected positions [num_sets, num_selected], kept together.

    Attributes:
        positions: [num_chunks, num_sets, top_k] int32; of chunk i the first counts[i] are set.
    """

    def __init__(self, positions: torch.Tensor, counts: Sequence[int]) -> None:
        self.positions = positions
        self.counts = tuple(counts)

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # no slices
        return self.positions[index, :, : self.counts[index]]


def together(selected: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """[num_chunks, num_sets, longest] int32 of per-chunk selections."""
    if isinstance(selected, SelectedRows):
        return selected.positions
    longest = max(1, max(chosen.shape[1] for chosen in selected))
    shape = (len(selected), selected[0].shape[0], longest)
    out = torch.zeros(shape, dtype=torch.int32, device=device)
    for number, chosen in enumerate(selected):
        out[number, :, : chosen.shape[1]] = chosen.to(device)
    return out


def select_chunks(
    parts: CacheParts, config: SelectionConfig, layer: int, queries: torch.Tensor, plan: BlockPlan
) -> SelectedRows:
    """Selects for the chunks of `plan`, each among its own candidates.

    Args:
        parts: Pool and device.
        config: Function, sets, smoothing, top_k.
        layer: Whose keys.
        queries: Selection queries [num_chunks, num_qo_heads, head_dim] float32.
        plan: Of the same chunks.
    """
    num_kv = parts.pool.keys[layer].shape[1]
    num_sets = num_kv if config.sets == "per_kv_head" else 1
    shape = (len(plan.ranges), num_sets, config.top_k)
    if max(plan.counts) == 0:
        empty = torch.empty(shape, dtype=torch.int32, device=queries.device)
        return SelectedRows(empty, plan.counts)
    q = queries.to(parts.compute_dtype)
    if config.function == "head_vote":
        positions = torch.zeros(shape, dtype=torch.int32, device=queries.device)
        _head_vote(parts, config, layer, q, plan, positions)
        return SelectedRows(positions, plan.counts)
    length = max(r.local_start for r in plan.ranges)
    step = max(1, VOTE_BYTES // (4 * num_sets * (length + PAGE_SIZE)))
    chosen = [
        _vote(parts, config, layer, q, plan, slice(first, first + step))
        for first in range(0, len(plan.ranges), step)
    ]
    return SelectedRows(chosen[0] if len(chosen) == 1 else torch.cat(chosen), plan.counts)


def _vote(
    parts: CacheParts,
    config: SelectionConfig,
    layer: int,
    q: torch.Tensor,
    plan: BlockPlan,
    part: slice,
) -> torch.Tensor:
    """Positions [chunks, sets, top_k] of some of the plan's chunks."""
    ranges, meta = plan.ranges[part], plan.meta[part]
    high = max(r.local_start for r in ranges)
    ballots = block_votes(
        q[part],
        parts.pool.keys_to_score(layer, plan.ranges[0].start, high),
        parts.pool.page_table,
        meta,
        low=ranges[-1].init_end,
        common_high=min(r.local_start for r in ranges),
        high=high,
        per_kv_head=config.sets == "per_kv_head",
        soft=config.function == "head_soft_vote",
        allowed=plan.allowed,
        num_sms=parts.num_sms,
    )
    if config.sets == "one" and parts.ranks.size > 1:
        return _settle_together(parts.ranks, config, ballots, meta)
    return select_top(ballots, meta, top_k=config.top_k, smoothing=config.smoothing)


def _settle_together(
    ranks: Ranks, config: SelectionConfig, ballots: torch.Tensor, meta: torch.Tensor
) -> torch.Tensor:
    """Positions [chunks, 1, top_k] from the votes [1, chunks, length] of each rank's heads.

    Votes are added up before the top-k, each rank takes that of some chunks, and all get the same
    positions. Chunks that cannot be shared out evenly are settled by every rank, from the same sum.
    """
    num_chunks = ballots.shape[1]
    settle = partial(select_top, top_k=config.top_k, smoothing=config.smoothing)
    if num_chunks % ranks.size:
        return settle(ranks.sum(ballots), meta)
    own = meta.chunk(ranks.size)[ranks.rank]
    return ranks.gather(settle(ranks.sum_share(ballots[0]).unsqueeze(0), own)).flatten(0, 1)


def _head_vote(
    parts: CacheParts,
    config: SelectionConfig,
    layer: int,
    q: torch.Tensor,
    plan: BlockPlan,
    positions: torch.Tensor,
) -> None:
    """The rarely used `head_vote` in plain torch: fills `positions` [chunks, sets, top_k]."""
    pool = parts.pool
    num_kv = pool.keys[layer].shape[1]
    for number, (r, count) in enumerate(zip(plan.ranges, plan.counts, strict=True)):
        if count == 0:
            continue
        candidates = torch.arange(r.init_end, r.local_start, device=q.device)
        held = pool.keys_to_score(layer, r.start, r.local_start)
        keys = held[slots_of(pool.page_table, candidates)].to(q.dtype)
        grouped = q[number].view(num_kv, -1, q.shape[-1]).float() * q.shape[-1] ** -0.5
        logits = torch.einsum("kgd,nkd->kgn", grouped, keys.float()).flatten(0, 1)
        if plan.allowed is not None:
            steps = plan.allowed[r.init_end : r.local_start + 1].diff()
            logits = logits.masked_fill(steps == 0, -torch.inf)
        ballots = votes(logits, config, num_selected=count, num_kv_heads=num_kv)
        best = torch.stack([top_indices(row, count) for row in ballots])
        positions[number, :, :count] = (best + r.init_end).int()

"""What tokens looked at: votes among all keys of a range, and attention paid, on a CUDA device."""

from __future__ import annotations

import torch

from tsdoc.kernels.attention import mass_by_position
from tsdoc.kernels.host_pool import PAGE_SIZE
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import attended_positions, token_queries
from tsdoc.kernels.triton.scores import block_votes
from tsdoc.kernels.triton_attention import gather_plan
from tsdoc.kernels.triton_parts import CacheParts
from tsdoc.kernels.triton_plan import BlockPlan
from tsdoc.kernels.triton_selection import VOTE_BYTES, together


def soft_votes(
    parts: CacheParts,
    rope: RopeTable,
    n_local: int,
    layer: int,
    q: torch.Tensor,
    start: int,
    end: int,
) -> torch.Tensor:
    """See `DeviceCache.soft_votes`: every token is scored as a chunk of its own."""
    pool = parts.pool
    queries = token_queries(q, rope, n_local).to(parts.compute_dtype)
    bounds = torch.tensor([start, end, 0, 0], dtype=torch.int32, device=q.device)
    total = torch.zeros(end - start, device=q.device)
    keys = pool.keys_to_score(layer, start, end)
    for part in torch.split(queries, max(1, VOTE_BYTES // (4 * (end + PAGE_SIZE)))):
        votes = block_votes(
            part.contiguous(),
            keys,
            pool.page_table,
            bounds.expand(part.shape[0], 4).contiguous(),
            low=start,
            common_high=end,
            high=end,
            per_kv_head=False,
            num_sms=parts.num_sms,
        )
        total += votes[0, :, start:end].sum(dim=0)
    return total / (queries.shape[0] * queries.shape[1])


def attention_mass(
    parts: CacheParts,
    rope: RopeTable,
    layer: int,
    q: torch.Tensor,
    selected: torch.Tensor,
    plan: BlockPlan,
) -> torch.Tensor:
    """See `DeviceCache.attention_mass`; `plan` is that of the one chunk."""
    (around,) = plan.ranges
    positions = together([selected], q.device)
    k, _ = gather_plan(parts, rope, layer, positions, plan, plan.ends, plan.num_rows)
    own = slice(plan.num_before[0], plan.num_rows)
    heads = rope.rotate(q.float().transpose(0, 1), own)
    rows = attended_positions(selected.to(q.device), around, around.start)
    return mass_by_position(heads, k[0], rows, around.start)

"""TokenSelect's arithmetic in plain torch: ranges, selection queries, votes, top-k.

This is the reference every backend is held to, and what the CPU backend runs. Paper: TokenSelect,
EMNLP 2025, arXiv 2411.02886; the exact rules are those of tsdoc's design (README, "How it works").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from tsdoc.kernels.rope import RopeTable

VoteFunction = Literal["head_soft_vote", "head_vote", "topk"]

SIFT_STEP = 64  # of values, one is looked at to find where the k largest may be


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """The settings that decide which tokens a chunk attends to (see `SelectionSettings`)."""

    n_init: int = 128
    n_local: int = 512
    top_k: int = 2048
    chunk_size: int = 512
    function: VoteFunction = "head_soft_vote"
    sets: Literal["one", "per_kv_head"] = "one"
    smoothing: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRange:
    """Which positions chunk [start, end) attends to, beside the selected ones and itself.

        0 … init_end | candidates … local_start | local … start | the chunk … end

    Init and local are always attended; candidates are [init_end, local_start).
    """

    start: int
    end: int
    init_end: int
    local_start: int

    @property
    def num_candidates(self) -> int:
        """Tokens between init and local."""
        return self.local_start - self.init_end


def chunk_range(start: int, end: int, config: SelectionConfig) -> ChunkRange:
    """Splits the tokens before `start` into init, candidates and local."""
    init_end = min(config.n_init, start)
    return ChunkRange(
        start=start,
        end=end,
        init_end=init_end,
        local_start=max(init_end, start - config.n_local),
    )


def selection_query(q: torch.Tensor, rope: RopeTable, n_local: int) -> torch.Tensor:
    """Mean over a chunk of its queries, token i rotated as at position n_local + i.

    Keys stay un-rotated (position 0), so yarn's attention factor, which the table applies once,
    is applied a second time here to keep scores on the scale of attention's.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], after bias and norm, before RoPE.
        rope: Table that covers n_local + num_tokens positions.
        n_local: First position.

    Returns:
        [num_qo_heads, head_dim] float32.
    """
    heads = q.float().transpose(0, 1)
    rotated = rope.rotate(heads, slice(n_local, n_local + q.shape[0]))
    return rotated.mean(dim=1) * rope.attention_factor


def token_queries(q: torch.Tensor, rope: RopeTable, n_local: int) -> torch.Tensor:
    """The selection queries of single tokens: what each would select by in decode.

    Args:
        q: [num_tokens, num_qo_heads, head_dim], before RoPE.
        rope: Table that covers n_local.
        n_local: The position they are rotated to.

    Returns:
        [num_tokens, num_qo_heads, head_dim] float32.
    """
    return rope.rotate(q.float(), slice(n_local, n_local + 1)) * rope.attention_factor


def votes(
    logits: torch.Tensor,
    config: SelectionConfig,
    *,
    num_selected: int,
    num_kv_heads: int,
    all_allowed: bool = False,
) -> torch.Tensor:
    """Turns scaled scores into votes for each candidate.

    Args:
        logits: [num_qo_heads, num_candidates] float32, already times 1 / sqrt(head_dim);
            -inf marks candidates that may not be selected.
        config: Function, sets and smoothing.
        num_selected: How many tokens will be selected (`head_vote` needs it).
        num_kv_heads: Groups of query heads, for `per_kv_head` sets.
        all_allowed: There is no -inf: it is not looked for.

    Returns:
        [num_sets, num_candidates]: float32, or float64 for `head_vote`, whose counts carry the
        soft vote as a tie-break in their fraction. Forbidden candidates are -inf.
    """
    num_sets = num_kv_heads if config.sets == "per_kv_head" else 1
    combined = cast_votes(
        logits,
        config,
        num_selected=num_selected,
        num_heads=logits.shape[0],
        add_up=lambda x: sum_over_heads(x, num_sets),
    )
    allowed = None if all_allowed else torch.isfinite(logits[0])
    return settle_votes(combined, allowed, config.smoothing)


def cast_votes(
    logits: torch.Tensor,
    config: SelectionConfig,
    *,
    num_selected: int,
    num_heads: int,
    add_up: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The sum of heads' votes, which may be added to those of other heads.

    Args:
        logits: As for `votes`, of some of the model's heads.
        config: Function and sets.
        num_selected: As for `votes`.
        num_heads: Query heads that vote in all.
        add_up: Sums [heads, num_candidates] over the heads of each set.

    Returns:
        [num_sets, num_candidates], float64 for `head_vote`; forbidden candidates have no meaning.
    """
    if config.function == "topk":
        return add_up(logits.masked_fill(torch.isinf(logits), 0.0))
    soft = torch.softmax(logits, dim=-1)
    combined = add_up(soft)
    if config.function == "head_vote":
        ballots = torch.zeros_like(logits, dtype=torch.float64)
        for head in range(logits.shape[0]):
            ballots[head, top_indices(logits[head], num_selected)] = 1.0
        # A head's softmax sums to 1, so votes / (heads + 1) < 1 never outweighs one ballot.
        combined = add_up(ballots) + combined.double() / (num_heads + 1)
    return combined


def settle_votes(
    combined: torch.Tensor, allowed: torch.Tensor | None, smoothing: int
) -> torch.Tensor:
    """What decides, from the votes of all heads: forbidden candidates are -inf, neighbours pooled.

    Args:
        combined: [num_sets, num_candidates], see `cast_votes`.
        allowed: [num_candidates] bool; None is all.
        smoothing: Width of the max-pool.
    """
    if allowed is not None:
        combined = combined.masked_fill(~allowed, -torch.inf)
    if smoothing > 1:
        pooled = F.max_pool1d(combined.unsqueeze(0), smoothing, stride=1, padding=smoothing // 2)
        combined = pooled.squeeze(0)
        if allowed is not None:
            combined = combined.masked_fill(~allowed, -torch.inf)
    return combined


def sum_over_heads(x: torch.Tensor, num_sets: int) -> torch.Tensor:
    """Adds up the heads [num_heads, n] of each set, one after the other: [num_sets, n].

    `torch.sum` takes another order for the last columns, which would break their ties.
    """
    first, *others = x.view(num_sets, x.shape[0] // num_sets, x.shape[1]).unbind(1)
    total = first.clone()
    for head in others:
        total += head
    return total


def top_indices(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k largest of `scores` [n], ascending; among equals the lower index wins."""
    if k >= scores.shape[0]:
        return torch.arange(scores.shape[0], device=scores.device)
    chosen, threshold = _largest(scores, k)
    excess = chosen.shape[0] - k
    if excess == 0:
        return chosen
    ties = torch.nonzero(scores[chosen] == threshold).squeeze(1)
    kept = torch.ones_like(chosen, dtype=torch.bool)
    kept[ties[-excess:]] = False
    return chosen[kept]


def _largest(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, float | torch.Tensor]:
    """Indices, ascending, of all that are not below the k-th largest, and that.

    On a CPU numpy takes a fraction of the time of `torch.topk` and `torch.nonzero`.
    """
    if scores.device.type != "cpu":
        threshold = torch.topk(scores, k, sorted=False).values.min()
        return torch.nonzero(scores >= threshold).squeeze(1), threshold
    values = scores.numpy()
    likely = _likely(values, k)
    if likely is not None:
        values = values[likely]
    least = np.partition(values, len(values) - k)[len(values) - k]
    chosen = np.flatnonzero(values >= least)
    return torch.from_numpy(chosen if likely is None else likely[chosen]), float(least)


def _likely(values: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64] | None:
    """Indices, ascending, of at least `k` values which no other exceeds; None if not found so.

    Every SIFT_STEP-th value tells where to draw the line, four standard deviations lower.
    """
    sample = values[::SIFT_STEP]
    share = k / SIFT_STEP
    count = int(share + 4 * share**0.5) + 1
    if count > len(sample) // 2:
        return None
    line = np.partition(sample, len(sample) - count)[len(sample) - count]
    likely = np.flatnonzero(values >= line)
    return likely if len(likely) >= k else None


def attended_positions(selected: torch.Tensor, around: ChunkRange, end: int) -> torch.Tensor:
    """Positions [num_sets, n] of init, `selected` [num_sets, num_selected] and [local, `end`)."""
    num_sets, device = selected.shape[0], selected.device
    before = torch.arange(around.init_end, device=device).expand(num_sets, -1)
    after = torch.arange(around.local_start, end, device=device).expand(num_sets, -1)
    return torch.cat((before, selected, after), dim=1)


def allowed_mask(
    first: int, last: int, ranges: Sequence[tuple[int, int]] | None
) -> torch.Tensor | None:
    """Which of the positions [first, last) lie in one of `ranges`; None means all of them."""
    if ranges is None:
        return None
    mask = torch.zeros(last - first, dtype=torch.bool)
    for start, end in ranges:
        mask[max(start - first, 0) : max(end - first, 0)] = True
    return mask

"""Bytes and operations of each kind of work, counted from shapes.

Bytes are those that have to move at least once for the algorithm as the backend runs it: votes and,
where they reach memory, scores included; a multiply-add is two operations. B and F below are one
layer's. What is counted is held against measured ceilings in `tsdoc.profile.roofline`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tsdoc.kernels.selection import ChunkRange, SelectionConfig
from tsdoc.models.config import ModelConfig

SCORE_BYTES = 4  # scores and votes are float32


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes moved and floating-point operations."""

    num_bytes: float = 0.0
    num_flops: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.num_bytes + other.num_bytes, self.num_flops + other.num_flops)

    def __mul__(self, count: float) -> Work:
        return Work(self.num_bytes * count, self.num_flops * count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Where the backends differ.

    Attributes:
        compute_bytes: Per number of activations and weights.
        step_bytes: Per number of the weights that a generated token reads.
        kv_bytes: Per number of the cached K and V.
        gathered_bytes: Per number of gathered K and V.
        prefill_passes: Times a block's selection reads K.
        prefill_score_accesses: Times a block's selection writes or reads a score in memory.
        decode_score_accesses: Same, of one decode query.
    """

    compute_bytes: int
    step_bytes: int
    kv_bytes: int
    gathered_bytes: int
    prefill_passes: int
    prefill_score_accesses: int
    decode_score_accesses: int


def traffic(
    device: str, compute_dtype: str, kv_dtype: str, *, narrow_steps: bool = False
) -> Traffic:
    """Returns what the backend of "cpu" or "cuda" does.

    With `narrow_steps`, generated tokens read weights in bfloat16.

    The CPU writes scores once, reads them for the softmax, writes and reads its result; it gathers
    into float32. CUDA reads K twice in a prefill and keeps no scores; in decode it reads K once,
    writes the scores and reads them.
    """
    sizes = {"float32": 4, "bfloat16": 2}
    compute, kv = sizes[compute_dtype], sizes[kv_dtype]
    if device == "cuda":
        return Traffic(
            compute_bytes=compute,
            step_bytes=compute,
            kv_bytes=kv,
            gathered_bytes=compute,
            prefill_passes=2,
            prefill_score_accesses=0,
            decode_score_accesses=2,
        )
    return Traffic(
        compute_bytes=compute,
        step_bytes=2 if narrow_steps else compute,
        kv_bytes=kv,
        gathered_bytes=4,
        prefill_passes=1,
        prefill_score_accesses=4,
        decode_score_accesses=4,
    )


def product(num_rows: int, inner: int, outer: int, itemsize: int) -> Work:
    """[num_rows, inner] times [inner, outer]."""
    moved = num_rows * inner + inner * outer + num_rows * outer
    return Work(moved * itemsize, 2.0 * num_rows * inner * outer)


def projections(config: ModelConfig, num_tokens: int, itemsize: int) -> Work:
    """Q, K and V of one layer."""
    outer = (config.num_qo_heads + 2 * config.num_kv_heads) * config.head_dim
    return product(num_tokens, config.hidden_size, outer, itemsize)


def layer_rest(config: ModelConfig, num_tokens: int, itemsize: int) -> Work:
    """Output projection and MLP of one layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    heads = config.num_qo_heads * config.head_dim
    return (
        product(num_tokens, heads, hidden, itemsize)
        + product(num_tokens, hidden, 2 * wide, itemsize)
        + product(num_tokens, wide, hidden, itemsize)
    )


def prefill_linear(config: ModelConfig, num_tokens: int, t: Traffic) -> Work:
    """All layers of one block; the last stops after K and V."""
    whole = projections(config, num_tokens, t.compute_bytes) * config.num_layers
    return whole + layer_rest(config, num_tokens, t.compute_bytes) * (config.num_layers - 1)


def decode_linear(config: ModelConfig, t: Traffic) -> Work:
    """All layers and the logits of one token: every weight is read once."""
    layer = projections(config, 1, t.step_bytes) + layer_rest(config, 1, t.step_bytes)
    head = product(1, config.hidden_size, config.vocab_size, t.step_bytes)
    return layer * config.num_layers + head


def store_kv(config: ModelConfig, num_tokens: int, t: Traffic) -> Work:
    """K and V of all layers brought into the cache: read as computed, written as kept."""
    numbers = 2 * num_tokens * config.num_kv_heads * config.head_dim * config.num_layers
    return Work(numbers * (t.compute_bytes + t.kv_bytes))


def block_selection(
    config: ModelConfig, selection: SelectionConfig, ranges: Sequence[ChunkRange], t: Traffic
) -> Work:
    """Selection queries, scores, votes and top-k of one block's chunks in one layer."""
    num_tokens = ranges[-1].end - ranges[0].start
    row = config.num_qo_heads * config.head_dim
    queries = Work(
        num_tokens * row * t.compute_bytes + len(ranges) * row * SCORE_BYTES, 4.0 * num_tokens * row
    )
    scored = [r.num_candidates for r in ranges if r.num_candidates > selection.top_k]
    if not scored:
        return queries
    # Without a softmax there is no first pass for its sums.
    passes = t.prefill_passes if selection.function == "head_soft_vote" else 1
    keys = passes * max(scored) * config.num_kv_heads * config.head_dim * t.kv_bytes
    scores = t.prefill_score_accesses * config.num_qo_heads * sum(scored) * SCORE_BYTES
    flops = passes * 2.0 * row * sum(scored)
    return queries + Work(keys + scores + _votes(config, selection, sum(scored)), flops)


def block_attention(
    config: ModelConfig, selection: SelectionConfig, ranges: Sequence[ChunkRange], t: Traffic
) -> Work:
    """Gathering and attention of one block's chunks in one layer."""
    total = Work()
    row = config.num_qo_heads * config.head_dim
    for r in ranges:
        length = r.end - r.start
        before = rows_before(r, selection)
        kv = 2 * (before + length) * config.num_kv_heads * config.head_dim
        gathered = kv * (t.kv_bytes + t.gathered_bytes)
        attended = kv * t.gathered_bytes + 2 * length * row * t.compute_bytes
        flops = 4.0 * length * row * (before + (length + 1) / 2)
        total = total + Work(gathered + attended, flops)
    return total


def decode_selection(
    config: ModelConfig, selection: SelectionConfig, around: ChunkRange, t: Traffic
) -> Work:
    """Scores, votes, top-k and the gathered window of one token in one layer."""
    width = config.num_kv_heads * config.head_dim
    rows = 2 * rows_before(around, selection) * width * (t.kv_bytes + t.gathered_bytes)
    count = around.num_candidates
    if count <= selection.top_k:
        return Work(rows)
    scores = t.decode_score_accesses * config.num_qo_heads * count * SCORE_BYTES
    flops = 2.0 * config.num_qo_heads * config.head_dim * count
    return Work(
        rows + count * width * t.kv_bytes + scores + _votes(config, selection, count), flops
    )


def decode_attention(
    config: ModelConfig, selection: SelectionConfig, around: ChunkRange, t: Traffic
) -> Work:
    """Attention of one token to a window that is there, in one layer."""
    rows = rows_before(around, selection) + 1
    row = config.num_qo_heads * config.head_dim
    width = config.num_kv_heads * config.head_dim
    return Work(2 * rows * width * t.gathered_bytes + 2 * row * t.compute_bytes, 4.0 * row * rows)


def rows_before(around: ChunkRange, selection: SelectionConfig) -> int:
    """Tokens that a chunk attends to before itself."""
    chosen = min(selection.top_k, around.num_candidates)
    return around.init_end + chosen + around.start - around.local_start


def _votes(config: ModelConfig, selection: SelectionConfig, num_candidates: int) -> float:
    """Votes are written once and read once for the top-k."""
    num_sets = config.num_kv_heads if selection.sets == "per_kv_head" else 1
    return 2.0 * num_sets * num_candidates * SCORE_BYTES

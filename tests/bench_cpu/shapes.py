"""What a prefilled token costs in theory: the products of its layers, and attention's budget."""

from __future__ import annotations

from tsdoc.kernels.selection import SelectionConfig
from tsdoc.models.config import ModelConfig


def products(config: ModelConfig) -> list[tuple[int, int]]:
    """Shapes [n, k] of one layer's weight matrices."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q_size = config.num_qo_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    return [
        (q_size, hidden),
        (kv_size, hidden),
        (kv_size, hidden),
        (hidden, q_size),
        (wide, hidden),
        (wide, hidden),
        (hidden, wide),
    ]


def flops_per_token(config: ModelConfig) -> float:
    """Multiplications and additions of a token behind a long prompt, at the default budget."""
    c = SelectionConfig()
    attended = c.n_init + c.top_k + c.n_local + c.chunk_size / 2
    linear = 2 * sum(n * k for n, k in products(config))
    attention = 4 * config.num_qo_heads * config.head_dim * attended
    return config.num_layers * (linear + attention)

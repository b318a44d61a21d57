"""What the queries of a layer ask about, known from its weights alone: for the key index."""

from __future__ import annotations

import torch

from tsdoc.engine.decoder import DecoderPart
from tsdoc.kernels.index import query_moment
from tsdoc.kernels.rope import RopeTable
from tsdoc.kernels.selection import token_queries

SAMPLE = 1024


def find_query_moment(
    decoder: DecoderPart, layer: int, rope: RopeTable, n_local: int
) -> torch.Tensor:
    """The moment of the queries of hidden states that favour no direction: random signs.

    An RMS norm leaves these as they are; what real hidden states have in common besides is not
    known before a document is read, and an index must not depend on what was read or asked first.

    Args:
        decoder: The model, all heads of it.
        layer: Which layer.
        rope: Table that covers n_local, where the model is.
        n_local: See `token_queries`.

    Returns:
        See `query_moment`.
    """
    config = decoder.config
    generator = torch.Generator().manual_seed(layer)
    shape = (SAMPLE, config.hidden_size)
    signs = 2 * torch.randint(2, shape, generator=generator) - 1
    with torch.inference_mode():
        hidden = signs.to(rope.cos.device, decoder.dtype)
        q, _, _ = decoder.project(layer, hidden)
        return query_moment(token_queries(q, rope, n_local), config.num_kv_heads)

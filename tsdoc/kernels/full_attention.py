"""The device's fastest attention over everything: what selection is measured against."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tsdoc.kernels.attention import chunk_attention


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of a chunk over every key before it and over itself.

    On CUDA it is cuDNN's, without a mask: the chunk's own causal square is a negligible part. K and
    V are given as if they had been rotated and kept: nothing is gathered.

    Args:
        q: [num_tokens, num_qo_heads, head_dim].
        k: [num_keys, num_kv_heads, head_dim]; the chunk's own keys are the last.
        v: Same shape.

    Returns:
        [num_tokens, num_qo_heads, head_dim].
    """
    q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
    if not q.is_cuda:
        num_before = k.shape[1] - q.shape[1]
        return chunk_attention(q, k, v, num_before=num_before).transpose(0, 1)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)
    return out[0].transpose(0, 1)

"""TokenSelect written out naively: every score, argsort, dense attention. Slow and obvious.

Independent of the engine: the model's own modules and rotary embedding do the work.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tsdoc.kernels.selection import SelectionConfig


def naive_forward(
    oracle: PreTrainedModel, ids: np.ndarray, chunks: list[tuple[int, int]], c: SelectionConfig
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Logits [num_tokens, vocab] and, per layer and chunk, the attended positions before it.

    The positions are [num_kv_heads, P]; for one set all rows are equal.
    """
    with torch.no_grad():
        hidden = oracle.model.embed_tokens(torch.from_numpy(ids.astype(np.int64)))
        attended = []
        for layer in oracle.model.layers:
            out, positions = _attention(oracle, layer, layer.input_layernorm(hidden), chunks, c)
            hidden = hidden + layer.self_attn.o_proj(out)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            attended.append(positions)
        return oracle.lm_head(oracle.model.norm(hidden)), attended


def _rope(oracle: PreTrainedModel, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = (t[0] for t in oracle.model.rotary_emb(x, positions[None]))
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _attention(
    oracle: PreTrainedModel,
    layer: Any,
    x: torch.Tensor,
    chunks: list[tuple[int, int]],
    c: SelectionConfig,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    config, attn = oracle.config, layer.self_attn
    d, group = attn.head_dim, config.num_attention_heads // config.num_key_value_heads
    q, k, v = (p(x).view(len(x), -1, d) for p in (attn.q_proj, attn.k_proj, attn.v_proj))
    if hasattr(attn, "q_norm"):
        q, k = attn.q_norm(q), attn.k_norm(k)
    scale = oracle.model.rotary_emb.attention_scaling
    out, all_positions = torch.zeros(len(x), q.shape[1], d), []
    for start, end in chunks:
        init_end = min(c.n_init, start)
        local_start = max(init_end, start - c.n_local)
        candidates = torch.arange(init_end, local_start)
        places = torch.arange(c.n_local, c.n_local + end - start)
        mean = _rope(oracle, q[start:end].transpose(0, 1), places).mean(1) * scale
        logits = torch.stack(
            [k[candidates, h // group] @ mean[h] / d**0.5 for h in range(q.shape[1])]
        )
        per_head = torch.softmax(logits, -1) if c.function != "topk" else logits
        if c.function == "head_vote":
            soft, per_head = per_head, torch.zeros_like(per_head)
            for h in range(q.shape[1]):
                winners = sorted(range(len(candidates)), key=lambda i: (-logits[h, i], i))
                per_head[h, winners[: c.top_k]] = 1
        rows = []
        for kv_head in range(k.shape[1]):
            heads = slice(kv_head * group, (kv_head + 1) * group)
            heads = heads if c.sets == "per_kv_head" else slice(None)
            ballot = per_head[heads].sum(0)
            tie = soft[heads].sum(0) if c.function == "head_vote" else torch.zeros(len(candidates))
            if c.smoothing > 1 and len(candidates):
                w = c.smoothing // 2
                ballot = torch.stack(
                    [ballot[max(0, i - w) : i + w + 1].max() for i in range(len(candidates))]
                )
            order = sorted(
                range(len(candidates)), key=lambda i: (-float(ballot[i]), -float(tie[i]), i)
            )
            chosen = candidates[sorted(order[: c.top_k])]
            rows.append(
                torch.cat((torch.arange(init_end), chosen, torch.arange(local_start, start)))
            )
        before = torch.stack(rows)
        all_positions.append(before)
        for h in range(q.shape[1]):
            index = torch.cat((before[h // group], torch.arange(start, end)))
            keys = _rope(oracle, k[index, h // group], torch.arange(len(index)))
            at = torch.arange(len(index) - (end - start), len(index))
            scores = _rope(oracle, q[start:end, h], at) @ keys.T / d**0.5
            scores += torch.full_like(scores, -torch.inf).triu(len(index) - (end - start) + 1)
            out[start:end, h] = torch.softmax(scores, -1) @ v[index, h // group]
    return out.flatten(1), all_positions

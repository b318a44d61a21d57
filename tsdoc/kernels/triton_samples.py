"""How much of exact selections' votes the key index catches on a device: a step made both ways."""

from __future__ import annotations

import torch

from tsdoc.kernels.index_use import IndexWatch
from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.triton.decode_scores import decode_votes
from tsdoc.kernels.triton.topk import make_space, select_top


class ExactSelection:
    """Selects exactly in steps that go by the key index, and compares.

    Args:
        pool: Whose keys are read.
        watch: Is told the shares.
        top_k: Tokens selected.
        num_sms: Multiprocessors of the device.
    """

    def __init__(self, pool: PagePool, watch: IndexWatch, top_k: int, num_sms: int) -> None:
        self._pool = pool
        self._watch = watch
        self._top_k = top_k
        self._num_sms = num_sms
        device = pool.page_table.device
        self._space = make_space(1, pool.capacity, top_k, device)
        self._tickets = torch.zeros(pool.keys[0].shape[1], dtype=torch.int32, device=device)
        self._found: dict[int, torch.Tensor] = {}

    def select(
        self,
        layer: int,
        query: torch.Tensor,
        meta: torch.Tensor,
        skip: torch.Tensor,
        allowed: torch.Tensor | None,
        chosen: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Positions [1, 1, top_k], num_selected of them written, unless this is a hit.

        Args:
            layer: Whose keys.
            query: [num_qo_heads, head_dim], times log2(e) / sqrt(head_dim).
            meta: [1, 4] int32: init_end, local_start, num_selected, num_before.
            skip: [1] int32; when it is not 0, nothing is computed.
            allowed: Running count of positions that may be selected; None is all.
            chosen: What the index selected: its share is noted. This step is no hit then.
        """
        pool = self._pool
        votes = decode_votes(
            query, pool.keys[layer], pool.page_table, meta, skip, self._space, self._tickets,
            length=pool.capacity, per_kv_head=False, allowed=allowed, num_sms=self._num_sms,
        )  # fmt: skip
        best = select_top(votes, meta, top_k=self._top_k, space=self._space, skip=skip)
        if chosen is not None:
            inside = torch.arange(self._top_k, device=meta.device) < meta[0, 2]
            taken, wanted = (
                votes[0, 0].gather(0, rows[0, 0].long().where(inside, 0)).where(inside, 0.0).sum()
                for rows in (chosen, best)
            )
            self._found[layer] = taken / wanted
        return best

    def note(self) -> None:
        """Tells the watch the shares of the step that has just been made."""
        if self._found:
            shares = torch.stack(list(self._found.values())).tolist()
            for layer, share in zip(self._found, shares, strict=True):
                self._watch.note(layer, share)
            self._found.clear()

"""What the caches of one CUDA device share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tsdoc.kernels.page_pool import PagePool
from tsdoc.kernels.ranks import Ranks
from tsdoc.kernels.transfer import Transfer
from tsdoc.kernels.triton_answers import DecodeStarter
from tsdoc.kernels.triton_index import DeviceIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheParts:
    """What a cache shares with the other caches of its backend.

    Attributes:
        pool: K and V.
        transfer: Between pool and pieces.
        compute_dtype: Type of queries and of the products.
        num_sms: Multiprocessors of the device.
        decodes: Starts answers.
        ranks: Those whose heads vote together.
        index: Of the keys in the pool; empty until an answer wants it.
    """

    pool: PagePool
    transfer: Transfer
    compute_dtype: torch.dtype
    device: torch.device
    num_sms: int
    decodes: DecodeStarter
    index: DeviceIndex
    ranks: Ranks

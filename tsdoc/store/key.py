"""What decides whether stored K and V may be reused: the model key and the token ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

FORMAT = 2
"""Version of everything in FORMAT.md; part of every model key."""

PAGE_SIZE = 256
"""Tokens per KV page, the unit of checksums; page p holds positions [256 p, 256 p + 256)."""

Ids = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint64]

_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelKey:
    """Everything besides token ids that K and V of a prefill depend on.

    Attributes:
        model: Fingerprint of weights, tokenizer, chat template and config.
        rope: RoPE type and parameters: see `RopeConfig.fields`.
        kv_dtype: Type of the stored K and V, "bfloat16" or "float32".
        compute_dtype: Type of the arithmetic.
        index: Kind of selection index; "exact" scores every cached token.
        layout: Version of the store's format.

    The other fields are those of `SelectionSettings`.
    """

    model: str
    rope: Mapping[str, str | int | float | bool] = field(hash=False)
    kv_dtype: str
    compute_dtype: str
    n_init: int
    n_local: int
    top_k: int
    chunk_size: int
    function: str
    sets: str
    smoothing: int
    index: str = "exact"
    layout: int = FORMAT

    @property
    def digest(self) -> str:
        """32 hex digits over all fields: the name of the key's directory."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """Shape and type of K, and of V, per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str

    def __post_init__(self) -> None:
        limits = ((self.num_layers, 4096), (self.num_kv_heads, 4096), (self.head_dim, 16_384))
        if not all(0 < value <= limit for value, limit in limits):
            raise ValueError(f"impossible KV shape {self}")
        if self.kv_dtype not in _DTYPES:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is not one of {sorted(_DTYPES)}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the arrays: bfloat16 is held as uint16 bit patterns."""
        return _DTYPES[self.kv_dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.num_layers * self.row_bytes


def as_ids(ids: npt.ArrayLike) -> Ids:
    """Returns token ids as a contiguous little-endian int32 array [num_tokens].

    Raises:
        ValueError: not one-dimensional, empty, or out of the range of int32.
    """
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError("token ids must be a non-empty one-dimensional array of integers")
    if array.dtype.itemsize > 4 and not 0 <= int(array.min()) <= int(array.max()) < 2**31:
        raise ValueError("token ids must fit int32")
    return np.ascontiguousarray(array, dtype="<i4")


def chunk_hashes(key: ModelKey, ids: Ids) -> Hashes:
    """Returns the rolling hash after every whole chunk, uint64 [num_tokens // chunk_size, 2].

    Row c covers the model key and ids [0, (c + 1) · chunk_size): two prompts that agree in row c
    agree, up to a collision, in everything before it.
    """
    size = key.chunk_size
    state = xxhash.xxh3_128(key.digest.encode())
    digests = bytearray()
    data = ids.data.cast("B")
    for start in range(0, len(ids) // size * size, size):
        state.update(data[4 * start : 4 * (start + size)])
        digests += state.digest()
    return np.frombuffer(bytes(digests), dtype="<u8").reshape(-1, 2)


def entry_id(digest: str, ids: Ids) -> str:
    """Returns the name of the entry that holds exactly these ids under a model key's digest."""
    state = xxhash.xxh3_128(digest.encode())
    state.update(len(ids).to_bytes(8, "little"))
    state.update(ids.data.cast("B"))
    return state.hexdigest()

"""Opens the safetensors files of a model directory: memory-mapped, tensors read when asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tsdoc.errors import ModelError

if TYPE_CHECKING:
    import torch

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20


def weight_files(directory: Path) -> list[Path]:
    """Returns the weight files of a model directory, sorted by name.

    Raises:
        ModelError: there are none, the index is damaged, or a file it names is missing.
    """
    index = directory / INDEX_FILE
    names = sorted(set(_weight_map(index).values())) if index.is_file() else [SINGLE_FILE]
    paths = [directory / name for name in names]
    for path in paths:
        if not path.is_file():
            raise ModelError(f"weights file {path.name} is missing", where=str(directory))
    return paths


def open_weights(directory: Path) -> Mapping[str, torch.Tensor]:
    """Opens all weights of a model directory.

    Returns:
        Name → tensor. A tensor is made on access, in its stored dtype, as a view of the mapped
        file: pages are read when they are used, and nothing is copied.

    Raises:
        ModelError: a file is missing or damaged, or files and index disagree.
    """
    return _Weights(weight_files(directory))


def stored_sizes(directory: Path) -> list[tuple[int, int]]:
    """Returns how many numbers each tensor has, and bits per number; torch is not needed for it.

    Raises:
        ModelError: as `open_weights`.
    """
    opened = [_open(path, "np") for path in weight_files(directory)]
    parts = [file.get_slice(name) for file in opened for name in file.keys()]  # noqa: SIM118
    return [(math.prod(part.get_shape()), _bits(part.get_dtype())) for part in parts]


def _bits(dtype: str) -> int:
    """Bits of one number of a safetensors type: "BF16" → 16, "F8_E4M3" → 8."""
    digits = re.search(r"\d+", dtype)
    return int(digits[0]) if digits else 8  # BOOL


class _Weights(Mapping[str, "torch.Tensor"]):
    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            opened = _open(path)
            for name in opened.keys():  # noqa: SIM118  (not a dict: it cannot be iterated)
                if name in self._files:
                    raise ModelError(f"tensor {name} is stored twice", where=str(path))
                self._files[name] = opened

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open(path: Path, framework: str = "pt") -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(path), framework=framework, device="cpu")
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"not a complete safetensors file ({error})",
            where=str(path),
            hint="Get the model again.",
        ) from error


def _weight_map(index: Path) -> dict[str, str]:
    try:
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise ModelError("the index is impossibly large", where=str(index))
        value = json.loads(index.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"the index cannot be read ({error})", where=str(index)) from error
    weight_map = value.get("weight_map") if isinstance(value, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError("the index names no weights", where=str(index))
    for name in weight_map.values():
        # An index may come from anywhere: it must not reach out of its own directory.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith("tensors"):
            raise ModelError(f"the index names an impossible file {name!r}", where=str(index))
    return weight_map

"""Seconds until weights that lie in files are on the device, and until they are hashed."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.bench_gpu.common import DEVICE, QWEN2_7B, Row
from tsdoc.engine.fused_decoder import FusedDecoder
from tsdoc.engine.random_weights import RandomWeights
from tsdoc.home import Home
from tsdoc.models.fingerprint import content_hashes
from tsdoc.models.weights import INDEX_FILE, open_weights, weight_files

NUM_FILES = 4


def weights() -> list[Row]:
    """Of files in the page cache: hashed, and loaded three times."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        num_bytes = _write(directory)
        begun = time.perf_counter()
        content_hashes(weight_files(directory), Home(directory / "home"))
        rows: list[Row] = [_row("hash", num_bytes, time.perf_counter() - begun)]
        for _ in range(3):
            begun = time.perf_counter()
            decoder = FusedDecoder(QWEN2_7B, open_weights(directory), torch.bfloat16, DEVICE)
            torch.cuda.synchronize()
            rows.append(_row("load", num_bytes, time.perf_counter() - begun))
            del decoder
    return rows


def _write(directory: Path) -> int:
    """Writes random weights; returns their bytes."""
    made = RandomWeights(QWEN2_7B, torch.bfloat16, DEVICE)
    names = list(made)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number in range(NUM_FILES):
        part = {name: made[name].cpu() for name in names[number::NUM_FILES]}
        file = f"model-{number}.safetensors"
        save_file(part, str(directory / file))
        weight_map |= dict.fromkeys(part, file)
        num_bytes += sum(tensor.nbytes for tensor in part.values())
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return num_bytes


def _row(what: str, num_bytes: int, seconds: float) -> Row:
    return {
        "what": what,
        "GB": num_bytes / 1e9,
        "s": seconds,
        "GB_per_s": num_bytes / seconds / 1e9,
    }

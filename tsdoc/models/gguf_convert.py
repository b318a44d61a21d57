"""Converts a GGUF file into a Hugging Face model directory, slice by slice.

Written with bounded memory: rows are read, dequantised to float32 and appended to
model.safetensors; neither file is mapped or held as a whole.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from tsdoc.errors import ModelError
from tsdoc.models.gguf_config import (
    ROPE_FREQS,
    TensorPlan,
    build_config,
    plan_tensors,
    supported_architecture,
)
from tsdoc.models.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from tsdoc.models.gguf_tokenizer import write_tokenizer
from tsdoc.models.safetensors_writer import SafetensorsWriter

CONVERTER_VERSION = 1  # a change of what is written needs a new number: directories carry it
_SLICE_NUMBERS = 4 << 20  # float32 numbers per slice: 16 MiB


def convert_gguf(
    path: Path, directory: Path, on_progress: Callable[[int, int], None] | None = None
) -> None:
    """Writes the model of the GGUF file `path` into the existing, empty `directory`.

    Args:
        path: A GGUF file; nothing in it is trusted.
        directory: Gets config.json, generation_config.json, tokenizer files, model.safetensors.
        on_progress: Called with (bytes read, bytes in all) of tensor data.

    Raises:
        ModelError: the file is damaged or of a kind that is not supported.
        OSError: writing failed (disk full).
    """
    with _naming(path):
        _convert(path, directory, on_progress or (lambda done, total: None))


def check_gguf(path: Path) -> None:
    """Refuses a GGUF file that cannot be converted, as far as its header tells.

    Raises:
        ModelError: the header is damaged or of a kind that is not supported.
        OSError: the temporary directory cannot be written.
    """
    with _naming(path), tempfile.TemporaryDirectory(prefix="tsdoc-") as work:
        _write_all_but_weights(path, Path(work))


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        where = error.where or str(path)
        raise ModelError(error.message, where=where, hint=error.hint) from error


def convert_tokenizer(path: Path, directory: Path) -> None:
    """Writes only the tokenizer files of a GGUF file, which may end behind its header.

    Raises:
        ModelError: the header is damaged or of a kind that is not supported.
        OSError: writing failed (disk full).
    """
    header = read_gguf_header(path, whole=False)
    write_tokenizer(header.metadata, directory, vocab_size=_vocab_size(header))


def _convert(path: Path, directory: Path, on_progress: Callable[[int, int], None]) -> None:
    header, plans = _write_all_but_weights(path, directory)
    total = sum(header.tensors[plan.source].num_bytes for plan in plans)
    done = 0
    shapes = {plan.target: plan.shape for plan in plans}
    with (
        path.open("rb") as file,
        SafetensorsWriter(directory / "model.safetensors", shapes) as writer,
    ):
        for plan in plans:
            tensor = header.tensors[plan.source]
            for rows in _dequantised(file, tensor, plan):
                writer.write(rows)
            done += tensor.num_bytes
            on_progress(done, total)
        writer.finish()


def _write_all_but_weights(path: Path, directory: Path) -> tuple[GgufHeader, list[TensorPlan]]:
    """Writes configuration and tokenizer; returns what the weights are to become."""
    header = read_gguf_header(path)
    supported_architecture(header)
    with path.open("rb") as file:
        factors = _rope_factors(file, header)
    config = build_config(header, rope_factors=factors, vocab_size=_vocab_size(header))
    plans = plan_tensors(header, config)
    eos_ids = write_tokenizer(header.metadata, directory, vocab_size=config["vocab_size"])
    config["eos_token_id"] = eos_ids[0]
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", {"eos_token_id": eos_ids})
    return header, plans


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _vocab_size(header: GgufHeader) -> int:
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError("tensor token_embd.weight is missing")
    return embedding.shape[0]


def _rope_factors(file: BinaryIO, header: GgufHeader) -> list[float] | None:
    tensor = header.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    return [float(x) for x in _read_rows(file, tensor, 0, tensor.num_rows).ravel()]


def _dequantised(
    file: BinaryIO, tensor: GgufTensor, plan: TensorPlan
) -> Iterator[npt.NDArray[np.float32]]:
    """Yields the tensor's numbers in order, in slices of whole rows (q and k: whole heads)."""
    if len(plan.shape) == 1:
        values = _read_rows(file, tensor, 0, 1).reshape(plan.shape)
        yield _restore_heads(values, plan.rotary_heads) if plan.rotary_heads else values
        return
    unit = plan.shape[0] // plan.rotary_heads if plan.rotary_heads else 1
    step = max(_SLICE_NUMBERS // tensor.shape[-1] // unit, 1) * unit
    for start in range(0, tensor.num_rows, step):
        rows = _read_rows(file, tensor, start, min(start + step, tensor.num_rows))
        yield _restore_heads(rows, len(rows) // unit) if plan.rotary_heads else rows


def _read_rows(file: BinaryIO, tensor: GgufTensor, start: int, end: int) -> npt.NDArray[np.float32]:
    """Returns rows [start, end) as float32, [end - start, row length]."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    row_bytes = tensor.num_bytes // tensor.num_rows
    file.seek(tensor.offset + start * row_bytes)
    raw = np.frombuffer(file.read((end - start) * row_bytes), dtype=np.uint8)
    if len(raw) != (end - start) * row_bytes:
        raise ModelError(f"not a complete GGUF file (tensor {tensor.name} is cut short)")
    try:
        with np.errstate(all="ignore"):  # damaged scales: refused below
            rows: npt.NDArray[np.float32] = dequantize(
                raw.reshape(-1, row_bytes), GGMLQuantizationType[tensor.type_name]
            )
    except NotImplementedError as error:
        raise ModelError(
            f"tensor {tensor.name} is stored as {tensor.type_name}, which is not supported"
        ) from error
    if not np.isfinite(rows).all():
        raise ModelError(f"tensor {tensor.name} holds numbers that are not finite")
    return rows


def _restore_heads(rows: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Undoes llama.cpp's row order of q and k.

    Per head it stores the rows of the two rotary halves alternately (0, d/2, 1, d/2 + 1, …);
    Hugging Face wants first half, then second half.
    """
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)

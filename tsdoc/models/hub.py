"""The Hugging Face hub: what a repository holds, and how its files get here."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tsdoc.errors import ModelError
from tsdoc.models.config import CONFIG_FILES
from tsdoc.models.download_plan import disk_errors
from tsdoc.models.fingerprint import TOKENIZER_FILES
from tsdoc.models.weights import INDEX_FILE, SINGLE_FILE
from tsdoc.terminal import visible_line

_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors", re.ASCII)
_SMALL_FILES = (*CONFIG_FILES, *TOKENIZER_FILES)
_PROBE_TIMEOUT_S = 4.0
_POLL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A model repository at a revision ("main", a tag, or a commit)."""

    repo: str
    revision: str

    @classmethod
    def parse(cls, source: str) -> HubModel:
        """Parses `hf:ORG/NAME[@REV]`.

        Raises:
            ModelError: it is written otherwise.
        """
        match = _REPO.fullmatch(source.removeprefix("hf:"))
        if match is None:
            raise ModelError("must be written hf:ORG/NAME or hf:ORG/NAME@REVISION", where=source)
        return cls(repo=match["repo"], revision=match["revision"] or "main")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubListing:
    """What the hub says about a repository: sizes in bytes by file name, and the licence."""

    sizes: dict[str, int]
    licence: str | None


class HubUnreachableError(ModelError):
    """The hub cannot be reached: no network, or it does not answer."""


class Hub(Protocol):
    """Where model repositories come from; the seam for tests."""

    @property
    def cache(self) -> Path:
        """Directory that downloads go to."""

    def cached(self, model: HubModel, *, with_weights: bool) -> Path | None:
        """Returns the directory of a model that is on this disk, without network, or None."""

    def describe(self, model: HubModel) -> HubListing:
        """Asks the hub about a model.

        Raises:
            HubUnreachableError: no answer within a few seconds.
            ModelError: no such repository or revision, or access is refused.
        """

    def download(
        self, model: HubModel, names: list[str], on_progress: Callable[[int], None]
    ) -> Path:
        """Downloads the named files, reporting bytes so far; returns their directory.

        Raises:
            ModelError: the download failed.
            ResourceError: the disk is full.
        """


def wanted_files(listing: HubListing, *, with_weights: bool) -> dict[str, int]:
    """Returns the files of a repository that tsdoc reads, with sizes; safetensors only.

    Raises:
        ModelError: there are no safetensors weights, or no tokenizer.json.
    """
    names = [name for name in _SMALL_FILES if name in listing.sizes]
    if "tokenizer.json" not in names or "config.json" not in names:
        raise ModelError("the repository holds no config.json or no tokenizer.json")
    if with_weights:
        if INDEX_FILE in listing.sizes:
            names += [INDEX_FILE, *filter(_SHARD.fullmatch, listing.sizes)]
        elif SINGLE_FILE in listing.sizes:
            names.append(SINGLE_FILE)
        else:
            raise ModelError("the repository holds no weights as safetensors")
    return {name: listing.sizes[name] for name in names}


class HuggingFaceHub:
    """The real hub; files go to Hugging Face's own cache, shared with other programs."""

    @property
    def cache(self) -> Path:
        """Hugging Face's cache directory."""
        from huggingface_hub import constants

        return Path(constants.HF_HUB_CACHE)

    def cached(self, model: HubModel, *, with_weights: bool) -> Path | None:
        """See `Hub`."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        from tsdoc.models.weights import weight_files

        with _mapped_errors(model):
            try:
                path = snapshot_download(
                    model.repo,
                    revision=model.revision,
                    local_files_only=True,
                    allow_patterns=list(_SMALL_FILES),
                )
            except LocalEntryNotFoundError:
                return None
        directory = Path(path)
        complete = all((directory / name).is_file() for name in ("config.json", "tokenizer.json"))
        if with_weights:
            try:
                weight_files(directory)
            except ModelError:
                return None
        return directory if complete else None

    def describe(self, model: HubModel) -> HubListing:
        """See `Hub`."""
        from huggingface_hub import HfApi

        with _mapped_errors(model):
            info = HfApi().model_info(
                model.repo,
                revision=model.revision,
                files_metadata=True,
                timeout=_PROBE_TIMEOUT_S,
            )
        card = info.card_data
        licence = card.get("license_name") or card.get("license") if card is not None else None
        return HubListing(
            sizes={file.rfilename: file.size or 0 for file in info.siblings or []},
            licence=str(licence) if licence else None,
        )

    def download(
        self, model: HubModel, names: list[str], on_progress: Callable[[int], None]
    ) -> Path:
        """See `Hub`."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        blobs = self.cache / f"models--{model.repo.replace('/', '--')}" / "blobs"
        with disk_errors(self.cache), _mapped_errors(model), _watched(blobs, on_progress):
            path = snapshot_download(model.repo, revision=model.revision, allow_patterns=names)
        return Path(path)


@contextlib.contextmanager
def _watched(blobs: Path, on_progress: Callable[[int], None]) -> Iterator[None]:
    """Reports once a second how many bytes `blobs` has grown by."""
    before = _bytes_in(blobs)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_POLL_S):
            on_progress(max(_bytes_in(blobs) - before, 0))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _bytes_in(directory: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


@contextlib.contextmanager
def _mapped_errors(model: HubModel) -> Iterator[None]:
    """Maps what huggingface_hub raises, in the order from special to general."""
    from huggingface_hub import errors

    where = f"hf:{model.repo}@{model.revision}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            "access to the repository has to be granted first",
            where=where,
            hint=f"Accept its terms at https://huggingface.co/{model.repo}, then `hf auth login`.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError("no such repository on the hub, or it is private", where=where) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError("no such revision in the repository", where=where) from error
    except errors.HFValidationError as error:
        raise ModelError("not a valid repository name", where=where) from error
    except (errors.HTTPError, errors.EntryNotFoundError, ConnectionError) as error:
        reason = visible_line(str(error) or type(error).__name__)[:200]
        raise HubUnreachableError(
            f"the Hugging Face hub cannot be reached ({reason})", where=where
        ) from error

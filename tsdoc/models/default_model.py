"""Which model `default` is: decided once by hardware and network, then recorded in TSDOC_HOME."""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tsdoc.errors import ModelError, UsageError
from tsdoc.home import Home, private_dir, write_error
from tsdoc.models.directory import check_model_path
from tsdoc.models.hub import Hub, HubModel
from tsdoc.models.profiles import check_settings, list_profiles, load_profile
from tsdoc.regular import read_own
from tsdoc.settings import ModelSettings

EMBEDDED = "embedded"
WITHOUT_GPU = "qwen2.5-0.5b-instruct"
_SCHEMA = "tsdoc.default-model/1"
_RESERVE_BYTES = 1 << 30
_KV_TOKENS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultModel:
    """What `default` stands for.

    Attributes:
        name: A profile name, `hf:ORG/NAME[@REV]`, or the absolute path of a directory or .gguf.
        reason: Why, in half a sentence.
    """

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Candidate:
    profile: str
    num_parameters: float
    kv_bytes_per_token: int

    @property
    def device_bytes(self) -> float:
        """Memory for bf16 weights (and a tenth for work space) and KV of a long document."""
        return 2.2 * self.num_parameters + self.kv_bytes_per_token * _KV_TOKENS + _RESERVE_BYTES


# The Apache-2.0 sizes of Qwen2.5-Instruct, largest first (3B and 72B have other licences).
_CANDIDATES = (
    _Candidate("qwen2.5-32b-instruct", 32.8e9, 262_144),
    _Candidate("qwen2.5-14b-instruct", 14.8e9, 196_608),
    _Candidate("qwen2.5-7b-instruct", 7.62e9, 57_344),
    _Candidate("qwen2.5-1.5b-instruct", 1.55e9, 28_672),
    _Candidate(WITHOUT_GPU, 0.5e9, 12_288),
)


def default_path(home: Home) -> Path:
    """Returns the file that records what `default` is."""
    return home.root / "default-model.json"


def read_default(home: Home) -> DefaultModel | None:
    """Returns the recorded default, or None when nothing was decided yet.

    Raises:
        ModelError: the record is damaged.
    """
    path = default_path(home)
    try:
        value = json.loads(read_own(path))
        return DefaultModel(name=str(value["name"]), reason=str(value["reason"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise ModelError(
            f"the record of the default model is damaged ({error})",
            where=str(path),
            hint="`tsdoc models use NAME` writes it anew.",
        ) from error


def record_default(home: Home, default: DefaultModel) -> None:
    """Writes the record, atomically.

    Raises:
        StoreError: it cannot be written.
        ResourceError: the disk is full.
    """
    path = default_path(home)
    directory = private_dir(home.root)
    text = json.dumps({"schema": _SCHEMA, "name": default.name, "reason": default.reason}) + "\n"
    try:
        handle, name = tempfile.mkstemp(prefix=".default-model-", dir=directory)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
    except OSError as error:
        raise write_error(error, path, "recording the default model") from error


def set_default(home: Home, name: str) -> DefaultModel | None:
    """Makes `name` the default model (`tsdoc models use`); `default` decides anew on next use.

    Args:
        home: Where it is recorded.
        name: A profile name, `hf:ORG/NAME[@REV]`, or the path of a directory or .gguf.

    Returns:
        What was recorded; None when the record was removed.

    Raises:
        UsageError: there is no such profile or path.
        ModelError: it is no valid hub name, or the path holds no model that tsdoc runs.
        StoreError: the record cannot be written or removed.
        ResourceError: the disk is full.
    """
    if name == "default":
        path = default_path(home)
        try:
            if os.path.lexists(path):
                path.unlink(missing_ok=True)
        except OSError as error:
            raise write_error(error, path, "removing the record of the default model") from error
        return None
    if not check_model_name(name):
        path = Path(name).expanduser().resolve()
        check_model_path(path)
        name = str(path)
    default = DefaultModel(name=name, reason="chosen with `tsdoc models use`")
    record_default(home, default)
    return default


def check_model_name(name: str) -> bool:
    """Checks that a command's argument names a model; returns whether by a profile or the hub.

    Raises:
        UsageError: it is no profile, and there is no such path.
        ModelError: it is no valid hub name.
    """
    if name.startswith("hf:"):
        HubModel.parse(name)
        return True
    names = [profile.name for profile in list_profiles()]
    if name in names:
        return True
    if not name.strip() or not Path(name).expanduser().exists():  # "" would be this directory
        near = difflib.get_close_matches(name, names, n=1)
        raise UsageError(
            "neither a profile nor a path",
            where=name,
            hint=(f"Did you mean {near[0]}? " if near else "")
            + "Give hf:ORG/NAME, the path of a directory or .gguf, or one of: "
            + f"{', '.join(n for n in names if n != 'default')}.",
        )
    return False


def settings_of(name: str) -> ModelSettings:
    """Returns the model settings that a profile name or a source stands for."""
    if name in {profile.name for profile in list_profiles()}:
        return check_settings(load_profile(name), where=f"profile {name}").model
    return ModelSettings(source=name)


def choose_default(hub: Hub, device_bytes: int, *, offline: bool) -> DefaultModel:
    """Decides what `default` is on this machine.

    Args:
        hub: Asked once, with a short timeout, unless the model is in its cache already.
        device_bytes: Memory of the GPU that the engine can use; 0 without one.
        offline: Only what is on this disk counts.
    """
    profile = WITHOUT_GPU
    reason = "no GPU"
    if device_bytes:
        fitting = [c.profile for c in _CANDIDATES if c.device_bytes <= device_bytes]
        profile = fitting[0] if fitting else WITHOUT_GPU
        reason = f"the largest that fits the GPU's {device_bytes / 1e9:.0f} GB"
    model = HubModel.parse(settings_of(profile).source)
    if hub.cached(model, with_weights=True):
        return DefaultModel(name=profile, reason=f"{reason}; in the cache already")
    if offline:
        return DefaultModel(name=EMBEDDED, reason="offline")
    try:
        hub.describe(model)
    except ModelError:  # no network, or a proxy or mirror that does not have it
        return DefaultModel(name=EMBEDDED, reason="the Hugging Face hub cannot be reached")
    return DefaultModel(name=profile, reason=reason)

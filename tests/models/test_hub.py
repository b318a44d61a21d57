"""The real client against a hub that is a function: no socket is opened."""

from __future__ import annotations

import errno
import hashlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _http, get_session, set_client_factory

from tsdoc.errors import ModelError, ResourceError
from tsdoc.models.hub import HubListing, HubModel, HubUnreachableError, HuggingFaceHub, wanted_files

httpx = importlib.import_module(type(get_session()).__module__.split(".")[0])
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = HubModel(repo="org/small", revision="main")
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": bytes(1000),
    "pytorch_model.bin": b"pickle",
    "README.md": b"text",
}


def answer(request: Any) -> Any:
    """The few routes of the hub that are used."""
    path = request.url.path
    listing = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
    tree = [
        {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
        for name, data in FILES.items()
    ]
    if path.startswith("/api/models/org/small/tree/"):
        return httpx.Response(200, json=tree)
    if path.startswith("/api/models/org/small"):
        card = {"license": "other", "license_name": "small-licence"}
        info = {"id": "org/small", "sha": COMMIT, "siblings": listing, "cardData": card}
        return httpx.Response(200, json=info)
    name = path.rsplit("/", 1)[-1]
    if path.startswith(f"/org/small/resolve/{COMMIT}/") and name in FILES:
        headers = {"ETag": f'"{hashlib.sha1(FILES[name]).hexdigest()}"', "X-Repo-Commit": COMMIT}
        return httpx.Response(200, headers=headers, content=FILES[name])
    return httpx.Response(404, headers={"X-Error-Code": "RepoNotFound"}, json={"error": "none"})


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Answers the client's requests by a function, with a cache of its own."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def use(handler: Callable[[Any], Any]) -> None:
        set_client_factory(lambda: httpx.Client(transport=httpx.MockTransport(handler)))

    use(answer)
    yield use
    set_client_factory(_http.default_client_factory)


def refuse(request: Any) -> Any:
    raise httpx.ConnectError("no route to host")


def test_only_safetensors_tokenizer_and_configuration_are_downloaded(
    serve: Callable[..., None],
) -> None:
    hub = HuggingFaceHub()
    assert hub.cached(MODEL, with_weights=True) is None
    listing = hub.describe(MODEL)
    assert listing.licence == "small-licence"
    wanted = wanted_files(listing, with_weights=True)
    assert wanted == {"config.json": 2, "tokenizer.json": 18, "model.safetensors": 1000}
    directory = hub.download(MODEL, list(wanted), lambda done: None)
    assert sorted(path.name for path in directory.iterdir()) == sorted(wanted)
    assert (directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    # From now on without network.
    serve(refuse)
    assert hub.cached(MODEL, with_weights=True) == directory


def test_a_tokenizer_alone_is_no_cached_model(serve: Callable[..., None]) -> None:
    hub = HuggingFaceHub()
    small = list(wanted_files(hub.describe(MODEL), with_weights=False))
    directory = hub.download(MODEL, small, lambda done: None)
    assert hub.cached(MODEL, with_weights=False) == directory
    assert hub.cached(MODEL, with_weights=True) is None


def test_no_network_is_told_apart_from_no_such_repository(serve: Callable[..., None]) -> None:
    hub = HuggingFaceHub()
    with pytest.raises(ModelError, match="no such repository") as caught:
        hub.describe(HubModel(repo="org/none", revision="main"))
    assert not isinstance(caught.value, HubUnreachableError)
    serve(refuse)
    with pytest.raises(HubUnreachableError, match="no route to host"):
        hub.describe(MODEL)
    with pytest.raises(HubUnreachableError):
        hub.download(MODEL, ["config.json"], lambda done: None)


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("GatedRepo", 403, "access to the repository has to be granted"),
        ("RevisionNotFound", 404, "no such revision"),
        ("", 500, "cannot be reached"),
    ],
)
def test_refusals_of_the_hub_are_explained(
    serve: Callable[..., None], code: str, status: int, words: str
) -> None:
    serve(lambda request: httpx.Response(status, headers={"X-Error-Code": code}, text="no"))
    with pytest.raises(ModelError, match=words):
        HuggingFaceHub().describe(MODEL)


def test_a_full_disk_is_a_resource_error(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(ResourceError, match="disk is full"):
        HuggingFaceHub().download(MODEL, ["config.json"], lambda done: None)


@pytest.mark.parametrize(
    ("source", "repo", "revision"),
    [("hf:a/b", "a/b", "main"), ("hf:Qwen/Qwen2.5-0.5B@v1/x", "Qwen/Qwen2.5-0.5B", "v1/x")],
)
def test_sources_are_parsed(source: str, repo: str, revision: str) -> None:
    assert HubModel.parse(source) == HubModel(repo=repo, revision=revision)


@pytest.mark.parametrize(
    "source", ["hf:", "hf:a", "hf:a/b/c", "hf:a/b@", "hf:a b/c", "hf:../x@y z"]
)
def test_malformed_sources_are_refused(source: str) -> None:
    with pytest.raises(ModelError, match="must be written"):
        HubModel.parse(source)


def test_shards_are_chosen_over_other_weights() -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    others = ["consolidated.safetensors", "original/model.pth", "sub/model.safetensors"]
    listing = HubListing(sizes=dict.fromkeys(names + shards + others, 1), licence=None)
    assert sorted(wanted_files(listing, with_weights=True)) == sorted(names + shards)


@pytest.mark.parametrize(
    ("missing", "words"),
    [("tokenizer.json", r"no tokenizer\.json"), ("model.safetensors", "no weights as safetensors")],
)
def test_repositories_without_what_is_read_are_refused(missing: str, words: str) -> None:
    sizes = {name: len(data) for name, data in FILES.items() if name != missing}
    with pytest.raises(ModelError, match=words):
        wanted_files(HubListing(sizes=sizes, licence=None), with_weights=True)

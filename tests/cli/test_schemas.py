"""What every command writes with --json, run for real on a small random model, is documented."""

from __future__ import annotations

import dataclasses
import io
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.schemas import SESSION, check, read_document, schemas
from tests.cli.test_help import ALL
from tests.profile.conftest import measure_little
from tests.session.conftest import model_directory
from tsdoc.cli.app import build_app
from tsdoc.cli.console import Terminal
from tsdoc.cli.edge import run_command
from tsdoc.cli.services import Services
from tsdoc.kernels.memory_plan import MemoryPlan

__all__ = ["model_directory"]

SMALL = [
    f"--set={setting}"
    for setting in (
        "chunk_size=128", "n_init=16", "n_local=64", "top_k=64", "prefill_block=256",
        "question_chunk_size=64",
    )
]  # fmt: skip
# A small random model says nothing that could be cited, and one run has no need of the others.
NOT_SEEN = {
    "warnings[]",
    "sentences[].place.",
    "nearest.",
    "sweeps[]",
    "notes[]",
    "differences[]",
    "fidelity[]",
    "estimate.device.",  # a GPU's; see the test of its fields
}

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("TSDOC_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run_it(*args: str, stdin: str = "", code: int = 0) -> dict[str, Any]:
        out, err = io.StringIO(), io.StringIO()
        terminal = Terminal(stdin=io.StringIO(stdin), stdout=out, stderr=err)
        ended = run_command(build_app(), [*args, "--json"], terminal=terminal, services=Services())
        assert ended == code, err.getvalue()
        value = json.loads(out.getvalue())
        assert isinstance(value, dict)
        return value

    return run_it


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    facts = "".join(f"Locker {n} holds {n * 37 % 101}.\n" for n in range(40))
    (shelf / "a.md").write_text(f"# Part one\n\n{facts}\n# Part two\n\n{facts}", "utf-8")
    (shelf / "b.txt").write_bytes(b"caf\xe9 au lait, d\xe9j\xe0 vu, \xe0 la carte\n" * 3)
    (shelf / "picture.bin").write_bytes(bytes(range(256)))
    return shelf


Steps = Callable[[Run, str, str], None]


def session_commands(go: Run, source: str, model: str) -> None:
    answering = ["--model", model, *SMALL, "--max-new-tokens", "4"]
    go("ask", source, "-q", "Who?", "-q", "Why?", "--evidence", "2", *answering)
    go("chat", source, "--name", "talk", *answering, stdin="Who?\n")
    go("chat", "--list")
    go("chat", "--forget", "talk")
    go("summarize", source, "--by", "section", *answering)
    go("ingest", source, "--model", model, *SMALL)


def reading_and_setup_commands(go: Run, source: str, model: str) -> None:
    go("tokens", source, "--model", model)
    go("text", source)
    go("models", "list")
    go("models", "get", model)
    go("models", "use", model)
    go("profiles", "list")
    go("profiles", "show", "tiny")
    go("config", "show")


def cache_commands(go: Run, source: str, model: str) -> None:
    go("models", "use", model)
    go("ingest", source, "--model", model, *SMALL)
    with (Path(source) / "b.txt").open("ab") as file:
        file.write(b"one line more\n" * 20)
    go("ingest", source, "--model", model, *SMALL)  # shares what it has in common
    entries = go("cache", "list")["entries"]
    go("cache", "show", entries[0]["entry_id"])
    kv = next((Path(source).parent / "home" / "store").rglob("kv.bin"))
    data = bytearray(kv.read_bytes())
    data[len(data) // 2] ^= 1
    kv.write_bytes(data)
    go("cache", "verify", code=5)
    go("cache", "repair")
    go("cache", "prune", "--max-bytes", "0")
    go("ingest", source, "--model", model, *SMALL)
    go("cache", "remove", "--all")


def measuring_commands(go: Run, source: str, model: str) -> None:
    go("profile", "--tokens", "300", "--model", model, *SMALL)
    go("eval", "--list")
    niah = ["--tasks", "niah_single_1", "--lengths", "512", "--items", "1"]
    go("eval", *niah, "--model", model, *SMALL)


GROUPS: dict[Steps, tuple[str, ...]] = {
    session_commands: ("ask", "chat", "summarize", "ingest"),
    reading_and_setup_commands: (
        "tokens", "text", "models.list", "models.get", "models.use", "profiles.list",
        "profiles.show", "config.show",
    ),
    cache_commands: (
        "cache.list", "cache.show", "cache.verify", "cache.repair", "cache.prune", "cache.remove",
    ),
    measuring_commands: ("profile", "eval"),
}  # fmt: skip


def test_every_command_has_a_schema_and_is_run_here() -> None:
    assert set(schemas()) == {f"tsdoc.{name.replace(' ', '.')}/1" for name in ALL}
    grouped = [f"tsdoc.{name}/1" for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(schemas())


@pytest.mark.parametrize("steps", GROUPS)
def test_commands_write_what_is_documented(
    run: Run, shelf: Path, model_directory: Path, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_little(monkeypatch)
    fields = schemas()
    seen: dict[str, set[str]] = defaultdict(set)
    wrong: set[str] = set()

    def go(*args: str, **options: Any) -> dict[str, Any]:
        value = run(*args, **options)
        schema = value["schema"]
        has, problems = check(value, fields[schema])
        seen[schema] |= has
        wrong.update(f"{schema}: {problem}" for problem in problems)
        return value

    steps(go, str(shelf), str(model_directory))
    anywhere = set().union(*seen.values())
    missing = set()
    for name in GROUPS[steps]:
        schema = f"tsdoc.{name}/1"
        has = seen[schema]
        if schema in SESSION:  # the first of them prefills for the others
            has |= anywhere & read_document()["A session"].keys()
        missing |= {f"{schema}: {path}" for path in fields[schema].keys() - has}
    assert wrong == set()
    assert {m for m in missing if not any(part in m for part in NOT_SEEN)} == set()


def test_the_plan_of_a_gpus_memory_is_as_documented() -> None:
    rows = read_document()["A session"]
    names = {name.removeprefix("estimate.device.") for name in rows if "estimate.device." in name}
    assert names == {field.name for field in dataclasses.fields(MemoryPlan)}


def test_errors_are_as_documented(cli: Cli) -> None:
    fields = read_document()["An error"]
    value = cli("ask", "missing.txt", "--json").json()
    assert check(value, fields) == (set(fields), [])

"""The store under the `tiny` model: damage, changed sources, several processes, a full disk.

Whatever happened to the store, the answer is a cold run's and what was reused is told truthfully.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.session.conftest import Recorder
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.models.locate import LocatedModel
from tsdoc.session import Answer, Session, open_session
from tsdoc.settings import Settings
from tsdoc.store import Store
from tsdoc.store.key import FORMAT

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(7200)]

CHUNK = 256
QUESTION = "What does locker 7 hold?"
SELECTION = {"chunk_size": CHUNK, "top_k": 512, "n_local": 256}


def facts(first: int, last: int) -> str:
    return "".join(
        f"Fact {i}: the locker {i} holds item {i * 37 % 101}.\n" for i in range(first, last)
    )


@pytest.fixture(scope="module")
def model(packaged_model: Callable[[str], LocatedModel]) -> Path:
    return packaged_model("tiny").directory


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def start(
    model: Path, home: Home, sources: Sequence[Path], reporter: Recorder, **groups: dict[str, Any]
) -> Session:
    settings = {
        "model": {"source": str(model)},
        "selection": SELECTION,
        "engine": {"prefill_block": CHUNK},
        "answer": {"max_new_tokens": 8},
        **groups,
    }
    return open_session(
        settings=Settings.model_validate(settings),
        home=home,
        sources=[str(source) for source in sources],
        ingest=IngestOptions(),
        reporter=reporter,
        offline=True,
    )


def ask(model: Path, home: Home, *sources: Path, **groups: dict[str, Any]) -> tuple[Answer, Any]:
    """Returns the answer with the warnings' codes, and what was prepared for it."""
    reporter = Recorder()
    with start(model, home, sources, reporter, **groups) as session:
        prepared = session.prepare()
        return session.ask(QUESTION, lambda text: None), (prepared, reporter.warnings)


def cold(model: Path, home: Home, *sources: Path) -> str:
    """The answer of a run that keeps nothing."""
    return ask(model, home, *sources, store={"enabled": False})[0].text


def files(home: Home) -> list[Path]:
    """The store's files with content, locks left out."""
    return [p for p in home.store.rglob("*") if p.is_file() and p.stat().st_size]


def cut(share: float) -> Callable[[Home], None]:
    def damage(home: Home) -> None:
        for path in files(home):
            os.truncate(path, int(path.stat().st_size * share))

    return damage


def flip(home: Home) -> None:
    rng = random.Random(3)
    for path in files(home):
        if path.suffix == ".bin":
            data = bytearray(path.read_bytes())
            for _ in range(10):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(data))


def lose(*names: str) -> Callable[[Home], None]:
    def damage(home: Home) -> None:
        for name in names:
            for path in home.store.rglob(name):
                path.unlink()

    return damage


def bump(change: int) -> Callable[[Home], None]:
    def damage(home: Home) -> None:
        for path in home.store.rglob("manifest.json"):
            text = path.read_text()
            path.write_text(text.replace(f'"format": {FORMAT}', f'"format": {FORMAT + change}'))

    return damage


DAMAGES: dict[str, Callable[[Home], None]] = {
    "cut to a half": cut(0.5),
    "cut by a little": cut(0.99),
    "flipped bytes": flip,
    "no K and V": lose("kv.bin"),
    "no journal": lose("journal.bin"),
    "no ids": lose("tokens.bin"),
    "no index": lose("manifest.json", "segment.json", "model.json"),
    "an older format": bump(-1),
    "a newer format": bump(1),
}


def test_damage_is_said_and_the_answer_is_a_cold_runs(
    model: Path, home: Home, tmp_path: Path
) -> None:
    document = tmp_path / "doc.txt"
    document.write_text(facts(0, 40), encoding="utf-8")
    expected = cold(model, home, document)
    assert ask(model, home, document)[0].text == expected
    for name, damage in DAMAGES.items():
        damage(home)
        answer, (_, warnings) = ask(model, home, document)
        assert answer.text == expected, name
        assert warnings or name == "no K and V", name
        if name != "a newer format":
            again, (prepared, warnings) = ask(model, home, document)
            assert (again.text, warnings, prepared.computed_tokens) == (expected, [], 0), name


def test_other_weights_at_the_same_path_reuse_nothing(
    model: Path, home: Home, tmp_path: Path
) -> None:
    document = tmp_path / "doc.txt"
    document.write_text(facts(0, 15), encoding="utf-8")
    mine = tmp_path / "model"
    shutil.copytree(model, mine)
    ask(mine, home, document)
    assert ask(mine, home, document)[1][0].computed_tokens == 0
    (weights,) = mine.glob("*.safetensors")
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 2 // 4 * 4)
        old = file.read(4 * 5000)
        file.seek(-len(old), os.SEEK_CUR)
        file.write(old[::-1] if old[::-1] != old else bytes(len(old)))
    _, (prepared, _) = ask(mine, home, document)
    assert prepared.reused_tokens == 0


def test_an_edit_late_in_a_repository_costs_a_quarter_at_most(
    model: Path, home: Home, tmp_path: Path
) -> None:
    root = tmp_path / "repository"
    root.mkdir()
    for number in range(10):
        text = facts(30 * number, 30 * number + 30)
        (root / f"file{number}.txt").write_text(text, encoding="utf-8")
    ask(model, home, root)
    edited = root / "file8.txt"
    edited.write_text(edited.read_text().replace("locker 245", "locker 7"), encoding="utf-8")
    answer, (prepared, _) = ask(model, home, root)
    assert prepared.prompt_tokens > 4000
    assert 0 < prepared.computed_tokens <= 0.25 * prepared.prompt_tokens
    assert prepared.reused_tokens + prepared.computed_tokens == prepared.prompt_tokens
    assert answer.text == cold(model, home, root)
    say(edit=[prepared.prompt_tokens, prepared.computed_tokens])


def test_a_longer_book_costs_its_tail_and_a_shorter_one_forgets(
    model: Path, home: Home, tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text(facts(0, 200), encoding="utf-8")
    _, (before, _) = ask(model, home, book)
    book.write_text(facts(0, 210), encoding="utf-8")
    longer, (prepared, _) = ask(model, home, book)
    added = prepared.prompt_tokens - before.prompt_tokens
    assert prepared.computed_tokens < added + 2 * CHUNK
    assert longer.text == cold(model, home, book)
    say(append=[prepared.prompt_tokens, added, prepared.computed_tokens])
    book.write_text(facts(0, 100), encoding="utf-8")
    shorter, (prepared, _) = ask(model, home, book)
    assert prepared.reused_tokens % CHUNK == 0
    assert shorter.text == cold(model, home, book)
    say(shorten=[prepared.prompt_tokens, prepared.computed_tokens])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB, where this user may mount one."""
    path = tmp_path / "small"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3M,mode=0700", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_on_a_full_disk_the_answer_still_comes_and_the_store_stays_valid(
    model: Path, home: Home, tmp_path: Path, small_disk: Path
) -> None:
    document = tmp_path / "doc.txt"
    document.write_text(facts(0, 15), encoding="utf-8")
    full = Home(small_disk)
    answer, (prepared, warnings) = ask(model, full, document)
    assert answer.text == cold(model, home, document)
    assert not prepared.kept
    codes = [code for code, _, _ in warnings]
    assert codes == ["not_kept"], warnings
    assert "the KV pages need" in warnings[0][2]
    assert Store(full.store).list() == []
    say(full=warnings[0][2])


def run(model: Path, home: Path, document: Path) -> subprocess.Popen[str]:
    sets = [f"{key}={value}" for key, value in SELECTION.items()] + [f"prefill_block={CHUNK}"]
    options = [part for value in [*sets, "threads=1"] for part in ("--set", value)]
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "tsdoc", "ask", str(document), QUESTION),
            *("--model", str(model), "--json", "--offline", "--max-new-tokens", "8", *options),
        ],
        env={**os.environ, "TSDOC_HOME": str(home), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=3600)
    assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def check_no_litter(home: Path) -> None:
    names = [p.name for p in home.rglob("*") if p.is_file()]
    assert names.count("kv.bin") == names.count("manifest.json") == 1
    assert not [n for n in names if n.startswith(".")]
    assert not [p for p in (home / "records" / "sources").iterdir() if p.name.startswith(".")]


def test_two_processes_that_ask_the_same_at_once_prefill_it_once(
    model: Path, tmp_path: Path
) -> None:
    document = tmp_path / "doc.txt"
    document.write_text(facts(0, 40), encoding="utf-8")
    reports = [finish(p) for p in [run(model, tmp_path / "home", document) for _ in range(2)]]
    computed = sorted(report["computed_tokens"] for report in reports)
    assert computed == [0, reports[0]["prompt_tokens"]]
    assert len({report["answers"][0]["text"] for report in reports}) == 1
    check_no_litter(tmp_path / "home")


def test_killing_some_of_four_does_not_disturb_the_others(model: Path, tmp_path: Path) -> None:
    document = tmp_path / "doc.txt"
    document.write_text(facts(0, 40), encoding="utf-8")
    home = tmp_path / "home"
    processes = [run(model, home, document) for _ in range(4)]
    while not any(p.stat().st_size > 48 for p in (home / "store").rglob("journal.bin")):
        time.sleep(0.05)
    for process in processes[:2]:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    texts = {finish(process)["answers"][0]["text"] for process in processes[2:]}
    last = finish(run(model, home, document))
    assert last["computed_tokens"] == 0
    assert texts == {last["answers"][0]["text"]}
    assert texts == {cold(model, Home(tmp_path / "other"), document)}
    check_no_litter(home)


def say(**figures: object) -> None:
    print(json.dumps(figures))  # noqa: T201 - shown with -s, for the record

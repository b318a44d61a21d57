"""A real process with the `tiny` model, stopped and killed in the middle of its prefill."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tsdoc.models.locate import LocatedModel
from tsdoc.store.journal import journal_header

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

BLOCK = 1024


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(5)
    path = tmp_path_factory.mktemp("document") / "facts.txt"
    lines = [f"Shelf {i} of the archive holds {rng.randrange(1000)} boxes." for i in range(240)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def start(document: Path, root: Path, model: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tsdoc", "ingest", str(document), "--model", str(model)]
    command += ["--set", f"prefill_block={BLOCK}", "--json", "--offline"]
    return subprocess.Popen(
        command,
        env={**os.environ, "TSDOC_HOME": str(root)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> dict[str, int]:
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    report: dict[str, int] = json.loads(out)
    return report


def kv_file(root: Path) -> Path:
    (path,) = (root / "store").rglob("kv.bin")
    return path


@pytest.fixture(scope="module")
def uninterrupted(
    document: Path,
    packaged_model: Callable[[str], LocatedModel],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """The model's directory, and the home of a run that nobody disturbed."""
    model = packaged_model("tiny").directory
    root = tmp_path_factory.mktemp("whole")
    report = finish(start(document, root, model))
    assert report["prompt_tokens"] > 3 * BLOCK
    return model, root


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGKILL])
def test_a_second_run_goes_on_and_writes_the_same_pages(
    stop: signal.Signals, document: Path, uninterrupted: tuple[Path, Path], tmp_path: Path
) -> None:
    model, whole = uninterrupted
    process = start(document, tmp_path, model)
    empty = len(journal_header("0" * 32))
    while not any(p.stat().st_size > empty for p in (tmp_path / "store").rglob("journal.bin")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(stop)
    _, err = process.communicate(timeout=120)
    assert process.returncode == (130 if stop is signal.SIGINT else -signal.SIGKILL)
    assert "Traceback" not in err
    report = finish(start(document, tmp_path, model))
    assert report["reused_tokens"] >= BLOCK
    assert report["computed_tokens"] == report["prompt_tokens"] - report["reused_tokens"]
    assert kv_file(tmp_path).read_bytes() == kv_file(whole).read_bytes()
    shutil.rmtree(tmp_path / "store")


@pytest.mark.slow
def test_kills_at_random_moments_lose_a_block_at_most(
    packaged_model: Callable[[str], LocatedModel],
) -> None:
    """A small `python -m tests.kill_prefill`, which says what is looked at."""
    model = packaged_model("tiny").directory
    command = [sys.executable, "-m", "tests.kill_prefill", "--count", "12", "--model", str(model)]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "12 kills" in done.stdout

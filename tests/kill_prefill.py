"""Kills real `tsdoc ask` processes at random moments and looks at what the next one makes of it.

    python -m tests.kill_prefill --count 200 --model DIRECTORY

DIRECTORY is a converted model, `tiny` say. One process imports everything and forks a child per
run, so that a run costs no import; the child is the command line itself. Two kills in three come at
a moment drawn from half the time of an undisturbed run, the others within 30 ms of a change to the
store's files. A document is asked about again and again until a run is left to finish, at most
`ROW` kills later.

After every kill: nothing committed was lost, and no more than one prefill block had been computed
beyond it. After every finished run: the pages, token ids and answer of an undisturbed run, reuse
reported truthfully, and no file beside those of one entry.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 256
NUM_LINES = 90  # about 1,500 tokens
QUESTION = "Which shelf holds the most boxes?"
NEAR_S = 0.03
ROW = 16
ENTRY_NAMES = {"manifest.json", "use.lock", "votes.bin", "writer.lock"}
SEGMENT_NAMES = {"segment.json", "kv.bin", "journal.bin", "tokens.bin", "write.lock"}


@dataclass
class Trial:
    """What all runs have in common, and what was seen so far."""

    work: Path
    model: Path
    chance: random.Random
    kills: int = 0
    finished: int = 0
    resumed_from: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    @property
    def document(self) -> Path:
        return self.work / "facts.txt"

    @property
    def home(self) -> Path:
        return self.work / "home"

    @property
    def log(self) -> Path:
        """Receives the first position of every block that a run computes."""
        return self.work / "blocks"


def write_document(path: Path) -> None:
    rng = random.Random(5)
    lines = [
        f"Shelf {i} of the archive holds {rng.randrange(1000)} boxes." for i in range(NUM_LINES)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def start(trial: Trial) -> int:
    """Forks a child that runs the command, and returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ["TSDOC_HOME"] = str(trial.home)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(trial.work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        run_command(trial)
    finally:
        os._exit(99)  # run_command ends the process itself


def run_command(trial: Trial) -> None:
    """Runs `tsdoc ask`; never returns."""
    from tsdoc.cli.app import main
    from tsdoc.engine.forward import Runner

    run_chunks = Runner.run_chunks

    def logged(self: Runner, cache: Any, ids: Any, start: int, *args: Any, **options: Any) -> Any:
        if not options["need_logits"]:
            with trial.log.open("a") as file:
                file.write(f"{start}\n")
        return run_chunks(self, cache, ids, start, *args, **options)

    Runner.run_chunks = logged  # type: ignore[method-assign]
    sets = [f"prefill_block={BLOCK}", f"chunk_size={BLOCK}", "top_k=512", "threads=1"]
    options = [part for value in sets for part in ("--set", value)]
    try:
        main(
            [
                *("ask", str(trial.document), QUESTION, "--model", str(trial.model)),
                *("--offline", "--json", "--max-new-tokens", "8", *options),
            ]
        )
    except SystemExit as done:
        sys.stdout.flush()
        os._exit(done.code if isinstance(done.code, int) else 1)


def finish(trial: Trial, pid: int) -> dict[str, Any]:
    """Waits for a run and returns its JSON."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise AssertionError(f"exit {code}: {(trial.work / 'stderr').read_text()}")
    report: dict[str, Any] = json.loads((trial.work / "stdout").read_text())
    return report


def state(home: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, sizes and times of the store's files: it changes when one is written."""
    found = []
    for directory, _, names in os.walk(home / "store"):
        for name in names:
            try:
                info = os.lstat(os.path.join(directory, name))  # noqa: PTH118 - thousands of times
            except FileNotFoundError:
                continue
            found.append((name, info.st_size, info.st_mtime_ns))
    return tuple(sorted(found))


def wait_for_the_moment(trial: Trial, pid: int, whole_s: float) -> bool:
    """Sleeps until the child is to be killed; False when it has ended before."""
    begun = time.monotonic()
    moment = trial.chance.uniform(0, whole_s)
    near = trial.chance.random() < 1 / 3
    before = state(trial.home)
    while not has_ended(pid):
        if near and time.monotonic() - begun > moment / 3 and state(trial.home) != before:
            time.sleep(trial.chance.uniform(0, NEAR_S))
            return True
        if time.monotonic() - begun > moment and not near:
            return True
        if near and time.monotonic() - begun <= moment / 3:
            before = state(trial.home)
        time.sleep(0.001)
    return False


def has_ended(pid: int) -> bool:
    info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    return info is not None


def committed(home: Path, num_tokens: int) -> int:
    """Tokens that the journal vouches for; tsdoc's own reading of it."""
    from tsdoc.store import Store

    (found,) = [e.committed_tokens for e in Store(home / "store").list()] or [0]
    assert found == num_tokens or found % BLOCK == 0
    return found


def computed(trial: Trial, num_tokens: int) -> int:
    """End of the last block that a run began."""
    lines = trial.log.read_text().split() if trial.log.exists() else []
    return min(num_tokens, int(lines[-1]) + BLOCK) if lines else 0


def check_files(home: Path) -> None:
    """One entry of one segment, and nothing that was left over."""
    names = [p.relative_to(home) for p in home.rglob("*") if p.is_file()]
    stores = [n for n in names if n.parts[0] == "store"]
    entries = {n.name for n in stores if "entries" in n.parts}
    segments = {n.name for n in stores if "segments" in n.parts}
    assert entries == ENTRY_NAMES, entries
    assert segments == SEGMENT_NAMES, segments
    assert len(stores) == len(ENTRY_NAMES) + len(SEGMENT_NAMES) + 2, stores
    kept = [p.name for p in (home / "records" / "sources").iterdir()]
    assert len(kept) == 1, kept
    assert not kept[0].startswith("."), kept


def pages(home: Path) -> list[bytes]:
    return [next((home / "store").rglob(n)).read_bytes() for n in ("kv.bin",)]


def kill_until_finished(trial: Trial, whole: dict[str, Any], whole_s: float, limit: int) -> None:
    """One document: killed up to `limit` times, then finished and compared."""
    shutil.rmtree(trial.home, ignore_errors=True)
    num_tokens = whole["prompt_tokens"]
    known = kills = 0
    while True:
        trial.log.unlink(missing_ok=True)
        last = kills == limit
        pid = start(trial)
        if not last and wait_for_the_moment(trial, pid, whole_s / 2 * (1 - known / num_tokens / 2)):
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if os.waitstatus_to_exitcode(status) == -signal.SIGKILL:
                kills += 1
                now = committed(trial.home, num_tokens)
                lost = max(computed(trial, num_tokens) - now, 0)
                assert now >= known, (now, known)
                assert lost <= BLOCK, (lost, now)
                known = now
                trial.lost.append(lost)
                continue
            raise AssertionError(f"ended with {status}")
        report = finish(trial, pid)
        break
    trial.kills += kills
    trial.finished += 1
    trial.resumed_from.append(known)
    assert report["reused_tokens"] == known, (report["reused_tokens"], known)
    assert report["computed_tokens"] == num_tokens - known
    assert report["answers"][0]["text"] == whole["answers"][0]["text"]
    assert [w for w in report["warnings"] if w["code"] != "answer_cut"] == []
    assert report["entry"] == whole["entry"]
    check_files(trial.home)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, required=True)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    import tsdoc.cli.app
    import tsdoc.engine.engine
    import tsdoc.session  # noqa: F401 - imported once for all children

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tsdoc-kill-") as name:
        trial = Trial(work=Path(name), model=arguments.model, chance=random.Random(arguments.seed))
        write_document(trial.document)
        begun = time.monotonic()
        whole = finish(trial, start(trial))
        whole_s = time.monotonic() - begun
        assert whole["reused_tokens"] == 0
        check_files(trial.home)
        expected = pages(trial.home)
        say(f"undisturbed: {whole['prompt_tokens']} tokens, {whole_s:.1f} s")
        while trial.kills < arguments.count:
            limit = min(ROW, arguments.count - trial.kills)
            kill_until_finished(trial, whole, whole_s, trial.chance.randint(min(4, limit), limit))
            assert pages(trial.home) == expected
            say(f"{trial.kills} kills, {trial.finished} finished, {time.monotonic() - begun:.0f} s")
        say(f"resumed from {sorted(trial.resumed_from)}")
        say(f"lost with a kill, tokens: at most {max(trial.lost)} of blocks of {BLOCK}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

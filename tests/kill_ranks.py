"""Kills ranks of real `tsdoc ask --parallel` processes, at every stage, and looks at what remains.

    python -m tests.kill_ranks --model DIRECTORY

DIRECTORY is a converted model, `tiny` say; on a GPU, `--device cuda --ranks 2 --lines 4000
--long-answer 20000` without one. Every rank is killed while ranks start, in the prefill,
in an answer whose document is kept, and the leader is interrupted as by Ctrl-C; `--random N` does
so N times to any rank at any moment. Each time: all processes end within 10 s, the exit code is
not 0, one line says why (none can, of a leader that was killed), and a run with another number of
ranks goes on from what was committed and says what an undisturbed run says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsdoc.store.journal import journal_header

LIMIT_S = 10.0
NUM_LINES = 140  # about 2,350 tokens
OPTIONS = ["prefill_block=512", "chunk_size=256", "top_k=512", "threads=1"]
OPTIONS += ["decode_weights=float32"]  # as several ranks do
EXACT = ["compute_dtype=float32", "kv_dtype=float32"]
STAGES = ("start", "prefill", "answer")


@dataclass
class Trial:
    """What all runs have in common.

    Attributes:
        is_random: The model is: a tie that rounds differently changes what it says.
    """

    work: Path
    model: Path
    is_random: bool
    device: str
    long_answer: int

    @property
    def home(self) -> Path:
        return self.work / "home"

    def start(self, num_ranks: int, *, streams: bool = False) -> subprocess.Popen[str]:
        """Starts a run that says JSON, or one with a long answer that comes word by word."""
        command = [sys.executable, "-m", "tsdoc", "ask", str(self.work / "facts.txt"), "Which?"]
        command += ["--model", str(self.model), "--offline", "--device", self.device]
        command += ["--parallel", str(num_ranks), "--max-new-tokens"]
        command += [str(self.long_answer)] if streams else ["8", "--json"]
        exact = EXACT if self.device == "cuda" else []
        command += [part for value in [*OPTIONS, *exact] for part in ("--set", value)]
        return subprocess.Popen(
            command,
            env={**os.environ, "TSDOC_HOME": str(self.home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, num_ranks: int) -> dict[str, Any]:
        process = self.start(num_ranks)
        out, err = process.communicate()
        assert process.returncode == 0, err
        report: dict[str, Any] = json.loads(out)
        return report

    def compare(self, again: dict[str, Any], whole: dict[str, Any]) -> None:
        found, expected = (report["answers"][0]["text"] for report in (again, whole))
        assert self.is_random or found == expected, (found, expected)
        if self.is_random:
            say(f"  the same text: {found == expected}")

    def committed_bytes(self) -> int:
        journals = (self.home / "store").rglob("journal.bin")
        return max((path.stat().st_size for path in journals), default=0)


def followers(pid: int) -> list[int]:
    """The other ranks of a leader, in their order; not what else it starts."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and state(int(path.name))[1] == pid:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                arguments = (path / "cmdline").read_bytes().split(b"\0")
                if any(b"follow_main" in argument for argument in arguments):
                    found[int(arguments[-3])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def state(pid: int) -> tuple[str, int]:
    """State and parent of a process; "X" when it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
    return fields[0], int(fields[1])


def wait_for(trial: Trial, process: subprocess.Popen[str], stage: str, num_ranks: int) -> None:
    """Returns when a run has come to a stage."""
    while process.poll() is None:
        started = len(followers(process.pid)) == num_ranks - 1
        if stage == "start" and started:
            time.sleep(0.5)
            return
        if stage == "prefill" and trial.committed_bytes() > len(journal_header("0" * 32)):
            return
        if stage == "answer" and started and process.stdout is not None:
            process.stdout.read(1)  # its first word, or all of an answer that has none
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate())


def kill(trial: Trial, stage: str, rank: int, how: signal.Signals, num_ranks: int) -> None:
    """One run, one death, and what comes after."""
    if stage != "answer":
        shutil.rmtree(trial.home / "store", ignore_errors=True)
    process = trial.start(num_ranks, streams=stage == "answer")
    wait_for(trial, process, stage, num_ranks)
    end(process, stage, rank, how, num_ranks)


def end(
    process: subprocess.Popen[str], when: str, rank: int, how: signal.Signals, num_ranks: int
) -> None:
    """Ends a rank of a run, and looks at how the others end."""
    others = followers(process.pid)
    os.kill(process.pid if rank == 0 else others[rank - 1], how)
    begun = time.monotonic()
    out, err = process.communicate()
    while any(state(pid)[0] not in "XZ" for pid in others):
        time.sleep(0.01)
    seconds = time.monotonic() - begun
    assert seconds < LIMIT_S, (seconds, err)
    expected = {0: -how if how == signal.SIGKILL else 130}.get(rank, 6)
    assert process.returncode == expected, (process.returncode, err)
    lines = [line for line in err.splitlines() if line.startswith("tsdoc:")]
    assert len(lines) == (0 if rank == 0 and how == signal.SIGKILL else 1), err
    if rank:
        assert f"rank {rank} of {num_ranks} ended (signal 9)" in lines[0], err
        assert when == "answer" or json.loads(out)["error"]["code"] == "rank"
    say(f"{when}, rank {rank}, {how.name}: ended after {seconds:.2f} s, exit {process.returncode}")


def kill_at_any_moment(trial: Trial, chance: random.Random, num_ranks: int, whole_s: float) -> bool:
    """One run from nothing and one death; False when the run was over before it."""
    shutil.rmtree(trial.home / "store", ignore_errors=True)
    process = trial.start(num_ranks)
    while process.poll() is None and len(followers(process.pid)) < num_ranks - 1:
        time.sleep(0.01)
    seconds = chance.uniform(0, whole_s)
    time.sleep(seconds)
    rank = chance.randrange(num_ranks)
    how = signal.SIGKILL if rank or chance.random() < 0.5 else signal.SIGINT
    if process.poll() is not None or len(followers(process.pid)) < num_ranks - 1:
        assert process.communicate() and process.returncode == 0
        return False
    end(process, f"after {seconds:.1f} s", rank, how, num_ranks)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="without one, a small random one is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lines", type=int, default=NUM_LINES)
    parser.add_argument("--long-answer", type=int, default=400)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    # Shells start background jobs deaf to Ctrl-C, and the processes started here inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tsdoc-ranks-") as name:
        trial = Trial(
            work=Path(name),
            model=arguments.model or random_model(Path(name) / "model"),
            is_random=arguments.model is None,
            device=arguments.device,
            long_answer=arguments.long_answer,
        )
        count = arguments.lines
        lines = [f"Shelf {i} of the archive holds {i * 37 % 1000} boxes." for i in range(count)]
        (trial.work / "facts.txt").write_text("\n".join(lines), encoding="utf-8")
        whole = trial.finish(1)
        for stage in filter(None, arguments.stages.split(",")):
            deaths = [(rank, signal.SIGKILL) for rank in range(arguments.ranks)]
            for rank, how in [*deaths, (0, signal.SIGINT)]:
                kill(trial, stage, rank, how, arguments.ranks)
                again = trial.finish(2 if rank else 1)
                trial.compare(again, whole)
                assert stage == "start" or again["reused_tokens"] >= 512
                say(f"  goes on from {again['reused_tokens']} tokens")
        if arguments.random:
            any_moment(trial, arguments.random, arguments.seed, arguments.ranks, whole)


def any_moment(trial: Trial, count: int, seed: int, num_ranks: int, whole: dict[str, Any]) -> None:
    """Kills `count` runs, each at a moment that `seed` decides."""
    chance = random.Random(seed)
    shutil.rmtree(trial.home / "store", ignore_errors=True)
    begun = time.monotonic()
    trial.finish(num_ranks)
    whole_s = time.monotonic() - begun
    for _ in range(count):
        if not kill_at_any_moment(trial, chance, num_ranks, whole_s):
            say("over before it")
            continue
        again = trial.finish(chance.choice((1, 2)))
        trial.compare(again, whole)
        say(f"  goes on from {again['reused_tokens']} tokens")


def random_model(directory: Path) -> Path:
    """Makes a small model that is fast on a GPU, with a tokenizer."""
    import torch

    from tests.prompt.vocabularies import make_byte_level
    from tests.tiny_models import make_oracle

    make_byte_level(directory)
    vocabulary = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    stop = len(vocabulary) + 3
    oracle = make_oracle(
        "qwen2", vocab_size=stop + 13, max_position_embeddings=8192, eos_token_id=stop
    )
    with torch.no_grad():
        oracle.lm_head.weight[stop] = 0.0  # never the likeliest: answers are as long as asked
    oracle.save_pretrained(directory)
    return directory


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

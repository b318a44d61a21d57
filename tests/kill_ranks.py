"""Kills ranks of real `tsdoc ask --parallel` processes, at every stage, and looks at what remains.

    python -m tests.kill_ranks --model DIRECTORY

DIRECTORY is a converted model, `tiny` say; without one, a small random one is made. On a GPU,
`--device cuda --ranks 2 --lines 4000`. In each stage every rank is killed (SIGKILL), told to end
(SIGTERM), and all are interrupted as by Ctrl-C (SIGINT to the terminal's group). `--random N` kills
N times, any rank at any moment.

Each time: all processes end within 10 s, the exit code is not 0, one line says why (none can, of a
leader that was killed), `tsdoc cache verify` finds nothing, and a run with another number of ranks
reuses all that was committed and says what an undisturbed run says. A run that had nothing left to
compute (`close`) may also end well.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 10.0
NUM_LINES = 140  # about 2,350 tokens
OPTIONS = ["prefill_block=512", "chunk_size=256", "top_k=512", "threads=1"]
OPTIONS += ["decode_weights=float32"]  # as several ranks do
EXACT = ["compute_dtype=float32", "kv_dtype=float32"]
FRESH = ("start", "meet", "load", "open", "prefill", "save")  # from nothing
KEPT = ("question", "answer", "evidence", "close")  # the document is in the store
STAGES = (*FRESH, *KEPT)
TIMES = {"prefill": 3, "save": 2, "answer": 3}  # how often a stage is come to
WAYS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


class Run:
    """One process of the command line and the ranks that it started.

    Attributes:
        pids: Of all ranks, once they have started; the leader's first.
    """

    def __init__(self, command: list[str], home: Path) -> None:
        self._said, fd = os.pipe()
        self._lines = os.fdopen(self._said, encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.said_stages", str(fd), *command],
            env={**os.environ, "TSDOC_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[fd],
            process_group=0,  # as a shell starts it: Ctrl-C goes to all of the group
        )
        os.close(fd)
        self.pids = [self.process.pid]

    def next_stage(self) -> str | None:
        """Waits for what the ranks do next; None once the leader has ended."""
        line = self._lines.readline()
        if not line:
            return None
        said = json.loads(line)
        if said["stage"] == "start":
            self.pids = [self.process.pid, *said["pids"]]
        stage: str = said["stage"]
        return stage

    def wait_for(self, stage: str, times: int) -> bool:
        """Returns when the ranks have come to a stage so many times; False if they never do."""
        while times and (found := self.next_stage()) is not None:
            times -= found == stage
        return not times

    def end(self) -> tuple[str, str, float]:
        """Waits for the end of all ranks; what the leader wrote, and how long it took."""
        begun = time.monotonic()
        with watched(self.pids) as ended:
            out, err = self.process.communicate()
            while ended():
                pass
        return out, err, time.monotonic() - begun

    def close(self) -> None:
        self._lines.close()
        self.process.kill()
        self.process.wait()


@contextmanager
def watched(pids: list[int]) -> Iterator[Any]:
    """Gives what waits until one more of `pids` has ended, and tells whether one had not."""
    poller, running = select.poll(), 0
    fds = []
    for pid in pids:
        try:
            fds.append(os.pidfd_open(pid))
        except ProcessLookupError:
            continue
        poller.register(fds[-1], select.POLLIN)
        running += 1

    def one_more() -> bool:
        nonlocal running
        if not running:
            return False
        for fd, _ in poller.poll(60_000) or [(0, 0)]:
            assert fd, "still running after a minute"
            poller.unregister(fd)
            running -= 1
        return True

    try:
        yield one_more
    finally:
        for fd in fds:
            os.close(fd)


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
    parallel: list[str]
    num_ranks: int

    @property
    def home(self) -> Path:
        return self.work / "home"

    def forget(self) -> None:
        shutil.rmtree(self.home / "store", ignore_errors=True)

    def start(self, parallel: list[str]) -> Run:
        command = ["ask", str(self.work / "facts.txt"), "Which?", "--json", "--offline"]
        command += ["--model", str(self.model), "--device", self.device]
        command += ["--max-new-tokens", "8", *parallel]
        exact = EXACT if self.device == "cuda" else []
        command += [part for value in [*OPTIONS, *exact] for part in ("--set", value)]
        return Run(command, self.home)

    def finish(self, num_ranks: int) -> dict[str, Any]:
        with closing(self.start(["--parallel", str(num_ranks)])) as run:
            while run.next_stage() is not None:
                pass
            out, err, _ = run.end()
            assert run.process.returncode == 0, err
        report: dict[str, Any] = json.loads(out)
        return report

    def compare(self, again: dict[str, Any], whole: dict[str, Any]) -> str:
        found, expected = (report["answers"][0]["text"] for report in (again, whole))
        assert self.is_random or found == expected, (found, expected)
        return "" if found == expected else ", another text"

    def check_store(self) -> int:
        """Verifies the store; the tokens that are committed."""
        done = subprocess.run(
            [sys.executable, "-m", "tsdoc", "cache", "verify", "--json"],
            env={**os.environ, "TSDOC_HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        from tsdoc.store import Store

        (committed,) = [e.committed_tokens for e in Store(self.home / "store").list()] or [0]
        return committed


def kill(run: Run, rank: int, how: signal.Signals) -> None:
    if how == signal.SIGINT:
        os.killpg(run.process.pid, how)
    else:
        os.kill(run.pids[rank], how)


def check_end(
    run: Run, when: str, rank: int, how: signal.Signals, num_ranks: int
) -> tuple[float, int]:
    """Looks at how all ranks end after one was killed: the seconds, and the exit code."""
    out, err, seconds = run.end()
    code = run.process.returncode
    assert seconds < LIMIT_S, (seconds, err)
    lines = [line for line in err.splitlines() if line.startswith("tsdoc:")]
    if code == 0 and when == "close":
        assert json.loads(out)["answers"], out
        return seconds, code
    if rank:
        assert code == 6, (code, err)
        assert f"rank {rank} of {num_ranks} ended (signal {how.value})" in lines[0], err
        assert json.loads(out)["error"]["code"] == "rank", out
    else:
        assert code == (-how if how == signal.SIGKILL else 130), (code, err)
    assert len(lines) == (0 if code == -signal.SIGKILL else 1), err
    assert "Traceback" not in err, err
    return seconds, code


def kill_in_stage(trial: Trial, stage: str, rank: int, how: signal.Signals) -> str:
    """One run and one death; what was seen."""
    if stage in FRESH:
        trial.forget()
    with closing(trial.start(trial.parallel)) as run:
        assert run.wait_for(stage, TIMES.get(stage, 1)), run.end()
        kill(run, rank, how)
        seconds, code = check_end(run, stage, rank, how, trial.num_ranks)
    return f"ended after {seconds:.2f} s, exit {code}"


def kill_at_any_moment(
    trial: Trial, chance: random.Random, whole_s: float
) -> tuple[str, int, signal.Signals] | None:
    """One run from nothing and one death; None when the run was over before it."""
    trial.forget()
    with closing(trial.start(trial.parallel)) as run:
        assert run.wait_for("start", 1), run.end()
        seconds = chance.uniform(0, whole_s)
        time.sleep(seconds)  # a moment that no stage names
        rank = chance.randrange(trial.num_ranks)
        how = chance.choice([signal.SIGKILL, signal.SIGTERM, *[signal.SIGINT] * (rank == 0)])
        if run.process.poll() is not None:
            return None
        try:
            kill(run, rank, how)
        except ProcessLookupError:
            return None  # it has just ended
        found, code = check_end(run, "close", rank, how, trial.num_ranks)
    return f"after {seconds:.1f} s: ended after {found:.2f} s, exit {code}", rank, how


def go_on(trial: Trial, rank: int, whole: dict[str, Any]) -> str:
    """A run of another number of ranks, after one that was killed; what was seen."""
    committed = trial.check_store()
    again = trial.finish(2 if rank else 1)
    assert again["reused_tokens"] == min(committed, whole["prompt_tokens"]), again
    return f"goes on from {committed} tokens{trial.compare(again, whole)}"


def main() -> None:
    arguments = parse()
    # Shells start background jobs deaf to Ctrl-C, and the processes started here inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tsdoc-ranks-") as name:
        trial = Trial(
            work=Path(name),
            model=arguments.model or random_model(Path(name) / "model"),
            is_random=arguments.model is None,
            device=arguments.device,
            parallel=["--parallel", str(arguments.ranks)]
            + ["--set", f"parallel.sequence={arguments.sequence}"] * (arguments.sequence > 1),
            num_ranks=arguments.ranks * arguments.sequence,
        )
        count = arguments.lines
        lines = [f"Shelf {i} of the archive holds {i * 37 % 1000} boxes." for i in range(count)]
        (trial.work / "facts.txt").write_text("\n".join(lines), encoding="utf-8")
        whole = trial.finish(1)
        ways = [WAYS[way] for way in arguments.ways.split(",")]
        for stage in filter(None, arguments.stages.split(",")):
            for how in ways:
                for rank in range(1 if how == signal.SIGINT else trial.num_ranks):
                    seen = kill_in_stage(trial, stage, rank, how)
                    say(f"{stage}, rank {rank}, {how.name}: {seen}; {go_on(trial, rank, whole)}")
        if arguments.random:
            any_moment(trial, arguments.random, arguments.seed, whole)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="without one, a small random one is made")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--lines", type=int, default=NUM_LINES)
    parser.add_argument("--ranks", type=int, default=3, help="of the tensor axis")
    parser.add_argument("--sequence", type=int, default=1)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def any_moment(trial: Trial, count: int, seed: int, whole: dict[str, Any]) -> None:
    """Kills `count` runs, each at a moment that `seed` decides."""
    chance = random.Random(seed)
    trial.forget()
    begun = time.monotonic()
    trial.finish(trial.num_ranks)
    whole_s = time.monotonic() - begun
    for _ in range(count):
        killed = kill_at_any_moment(trial, chance, whole_s)
        if killed is None:
            say("over before it")
            continue
        seen, rank, how = killed
        say(f"rank {rank}, {how.name}, {seen}; {go_on(trial, chance.choice((0, 1)), whole)}")


def random_model(directory: Path, **shape: Any) -> Path:
    """Makes a small model that is fast on a GPU, with a tokenizer."""
    import torch

    from tests.prompt.vocabularies import make_byte_level
    from tests.tiny_models import make_oracle

    make_byte_level(directory)
    vocabulary = json.loads((directory / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]
    stop = len(vocabulary) + 3
    shape = {"max_position_embeddings": 8192, **shape}
    oracle = make_oracle("qwen2", vocab_size=stop + 13, eos_token_id=stop, **shape)
    with torch.no_grad():
        oracle.lm_head.weight[stop] = 0.0  # never the likeliest: answers are as long as asked
    oracle.save_pretrained(directory)
    return directory


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

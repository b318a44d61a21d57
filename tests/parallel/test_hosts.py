"""Two torchruns on this machine, as on two: they equal one process, and end together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.equal_ranks import is_equal, said, write_document
from tests.kill_ranks import LIMIT_S, random_model
from tsdoc.errors import UsageError
from tsdoc.parallel.hosts import Hosts, rank_here
from tsdoc.parallel.job import Job
from tsdoc.store.journal import journal_header

SETS = ["kv_dtype=float32", "compute_dtype=float32", "decode_weights=float32", "threads=1"]
SETS += ["prefill_block=512", "chunk_size=256", "top_k=256", "n_init=64", "n_local=128"]
QUESTION = "Which shelf holds the brass compass?"


class Place:
    """A document, a model, and homes of their own for the hosts."""

    def __init__(self, work: Path, num_lines: int) -> None:
        self.work = work
        self.model = random_model(work / "model")
        write_document(work / "shelves.txt", num_lines)

    def arguments(self, mesh: str) -> list[str]:
        tensor, sequence = mesh.split("x")
        sets = [*SETS, f"parallel.tensor={tensor}", f"parallel.sequence={sequence}"]
        return [
            *("ask", str(self.work / "shelves.txt"), QUESTION, "--json", "--offline"),
            *("--model", str(self.model), "--device", "cpu", "--max-new-tokens", "8"),
            *(part for value in sets for part in ("--set", value)),
        ]

    def start(self, host: int, command: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env={
                **os.environ,
                "TSDOC_HOME": str(self.home(host)),
                "GLOO_SOCKET_IFNAME": "lo",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def home(self, host: int) -> Path:
        return self.work / f"home-{host}"

    def torchruns(self, mesh: str, each: int) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = ["--nnodes", "2", "--nproc-per-node", str(each)]
        options += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        return [
            self.start(
                host,
                [
                    *("torch.distributed.run", "--node-rank", str(host), *options),
                    *("-m", "tsdoc.hosts", *self.arguments(mesh)),
                ],
            )
            for host in (0, 1)
        ]

    def alone(self) -> dict[str, Any]:
        process = self.start(0, ["tsdoc", *self.arguments("1x1")])
        out, err = process.communicate()
        assert process.returncode == 0, err
        report: dict[str, Any] = json.loads(out)
        return report

    def pages(self, host: int) -> np.ndarray:
        (path,) = (self.home(host) / "store").rglob("kv.bin")
        return np.fromfile(path, dtype=np.float32)

    def committed_bytes(self) -> int:
        journals = (self.home(0) / "store").rglob("journal.bin")
        return max((path.stat().st_size for path in journals), default=0)


@pytest.fixture
def started() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "each", "lines"), [("2x1", 1, 90), ("2x2", 2, 330)])
def test_two_hosts_equal_one_process(
    mesh: str, each: int, lines: int, tmp_path: Path, started: ExitStack
) -> None:
    place = Place(tmp_path, lines)
    whole = place.alone()
    pages = place.pages(0)
    for computed in (whole["prompt_tokens"], 0):  # from nothing, then from what was kept
        if computed:
            shutil.rmtree(place.home(0) / "store")
        hosts = place.torchruns(mesh, each)
        for host in hosts:
            started.callback(host.kill)
        (out, err), (other_out, other_err) = [host.communicate() for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], (err, other_err)
        assert other_out == ""
        report = json.loads(out)
        assert report["computed_tokens"] == computed
        assert is_equal({"mesh": mesh}, {**report, "wall_s": 0}, said(whole))
        np.testing.assert_allclose(place.pages(0), pages, atol=1e-3)
    assert not (place.home(1) / "store").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("host", "how"), [(0, "SIGKILL"), (1, "SIGKILL"), (0, "SIGTERM")])
def test_all_end_with_one_and_what_was_prefilled_is_kept(
    host: int, how: str, tmp_path: Path, started: ExitStack
) -> None:
    place = Place(tmp_path, 330)
    hosts = place.torchruns("2x1", 1)
    for process in hosts:
        started.callback(process.kill)
    empty = len(journal_header("0" * 32))
    while place.committed_bytes() <= empty:
        assert hosts[0].poll() is None, hosts[0].communicate()
        time.sleep(0.01)
    workers = [psutil.Process(process.pid).children() for process in hosts]
    assert [len(children) for children in workers] == [1, 1]
    workers[host][0].send_signal(signal.Signals[how])
    begun = time.monotonic()
    errors = [process.communicate()[1] for process in hosts]
    assert time.monotonic() - begun < LIMIT_S
    assert all(process.returncode != 0 for process in hosts)
    assert not any(child.is_running() for children in workers for child in children)
    lines = [[line for line in err.splitlines() if line.startswith("tsdoc:")] for err in errors]
    assert len(lines[0]) == (0 if (host, how) == (0, "SIGKILL") else 1), errors[0]
    assert len(lines[1]) == (0 if host == 1 else 1), errors[1]
    again = place.alone()
    assert 512 <= again["reused_tokens"] < again["prompt_tokens"]


def test_without_torchrun_it_is_said_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="torchrun has not started this process"):
        rank_here()


def test_as_many_ranks_as_torchrun_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    job = Job(
        directory="", tensor=2, sequence=2, device="cpu", compute_dtype="float32",
        kv_dtype="float32", device_memory=None, threads=1, spread=True,
    )  # fmt: skip
    with pytest.raises(UsageError, match="torchrun has started 2 processes and the settings ask"):
        Hosts(job)

"""The reader process: its death names the unit and costs nothing else."""

from __future__ import annotations

import errno
import os
import sys
import textwrap
from pathlib import Path

import pytest

from tsdoc.errors import InputError, ResourceError
from tsdoc.ingest import worker as worker_module
from tsdoc.ingest.options import Limits
from tsdoc.ingest.worker import Worker

READER = """
    import os, signal, sys
    sys.path.append(sys.argv[1])
    from tsdoc.errors import InputError
    from tsdoc.ingest import worker_main

    def reader(request, begin):
        for number in range(request["done"], 5):
            unit = f"unit {number}"
            if unit in request["failed"]:
                yield {"failed": number}
                continue
            begin(unit, 0)
            if number == 2:
                trouble(request["trouble"])
            yield {"read": number, "pid": os.getpid()}

    def trouble(kind):
        if kind == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif kind == "exception":
            raise KeyError("deep inside")
        elif kind == "busy":
            while True:
                pass
        elif kind == "asleep":
            import time
            time.sleep(600)
        elif kind == "hungry":
            bytearray(1 << 30)
        elif kind == "noisy":
            os.write(1, b"stray output"); print("more")
        elif kind == "refuses":
            raise InputError("is not for me", hint="Try another.")

    worker_main._reader = lambda name: reader
    worker_main.main()
"""


@pytest.fixture(autouse=True)
def _made_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_START", textwrap.dedent(READER))


def limits(trouble: str = "none") -> Limits:
    """Short only where time is what runs out: on a busy machine a process starts in seconds."""
    return Limits(
        unit_cpu_s=0.3 if trouble == "busy" else 30.0,
        unit_wall_s=4.0 if trouble == "asleep" else 60.0,
        worker_bytes=256 << 20,
    )


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("crash", "crashed the reader (SIGSEGV)"),
        ("exception", "crashed the reader"),
        ("hungry", "needs too much memory"),
        ("busy", "took too long"),
        ("asleep", "did not answer"),
    ],
)
def test_a_dying_reader_loses_the_unit_it_was_at(trouble: str, reason: str) -> None:
    with Worker(limits(trouble)) as worker:
        reading = worker.read({"reader": "made", "trouble": trouble})
    numbers = [message.get("read", message.get("failed")) for message in reading.messages]
    assert numbers == [0, 1, 2, 3, 4]
    assert reading.messages[2] == {"failed": 2}
    assert reading.failed == {"unit 2": reason}
    assert reading.incomplete is None


def test_one_process_serves_many_requests_and_stray_output_does_no_harm() -> None:
    with Worker(limits()) as worker:
        first = worker.read({"reader": "made", "trouble": "noisy"})
        second = worker.read({"reader": "made", "trouble": "none"})
    assert len(first.messages) == len(second.messages) == 5
    assert {message["pid"] for message in first.messages + second.messages} == {
        first.messages[0]["pid"]
    }


def test_a_refusal_is_an_error_with_its_hint_and_the_process_lives_on() -> None:
    with Worker(limits()) as worker:
        with pytest.raises(InputError, match=r"is not for me\. Try another\."):
            worker.read({"reader": "made", "trouble": "refuses"})
        assert len(worker.read({"reader": "made", "trouble": "none"}).messages) == 5


def test_a_reader_that_dies_at_once_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_START", "raise SystemExit(3)")
    with Worker(limits()) as worker:
        reading = worker.read({"reader": "made", "trouble": "none"})
    assert reading.messages == []
    assert reading.incomplete == "crashed the reader"


def test_a_reader_that_dies_before_it_has_its_request_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "_START", "raise SystemExit(3)")
    with Worker(limits()) as worker:
        reading = worker.read({"reader": "made", "trouble": "x" * (4 << 20)})  # fills the pipe
    assert reading.incomplete == "crashed the reader"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems limit something else")
def test_a_limit_of_the_users_own_that_is_lower_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    start = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (200 << 20, 200 << 20))\n"
    code = textwrap.dedent(READER).replace(
        'yield {"read": number, ', 'yield {"limit": resource.getrlimit(resource.RLIMIT_DATA), '
    )
    monkeypatch.setattr(worker_module, "_START", start + code)
    with Worker(limits()) as worker:
        reading = worker.read({"reader": "made", "trouble": "none"})
    assert [message["limit"] for message in reading.messages] == [[200 << 20] * 2] * 5


def test_a_machine_that_starts_no_process_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr("tsdoc.ingest.worker.subprocess.Popen", refuse)
    with (
        Worker(limits()) as worker,
        pytest.raises(ResourceError, match=r"can be started \(Resource temporarily"),
    ):
        worker.read({"reader": "made", "trouble": "none"})


def test_starting_it_imports_neither_torch_nor_pydantic() -> None:
    import subprocess

    root = str(Path(worker_module.__file__).parents[2])
    code = (
        "import sys; sys.path.append(sys.argv[1]); import tsdoc.ingest.worker_main, "
        "tsdoc.ingest.pdf_child, tsdoc.ingest.sources; "
        "print({'torch', 'pydantic', 'pypdf', 'pypdfium2'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, root], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"

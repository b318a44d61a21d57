"""The leader's side of a team: announces every operation, and starts the ranks anew if it must."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from tsdoc.engine.query_log import QueryLog
from tsdoc.engine.selection_cache import SelectionCache
from tsdoc.errors import RankError
from tsdoc.kernels.devices import finish_work
from tsdoc.kernels.interface import DeviceCache
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.meeting import join_ranks
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.sharded_cache import ShardedCache, ShardedDecode
from tsdoc.parallel.alarm import Alarm
from tsdoc.parallel.hosts import Hosts
from tsdoc.parallel.job import Job, Shard, load_shard
from tsdoc.parallel.processes import POLL_S, Others, Processes

if TYPE_CHECKING:
    from tsdoc.engine.forward import Runner

# Operations that Ctrl-C waits for, so that a chat can go on; a GPU has all others done as soon.
SHORT = frozenset({"run_step", "run_device_step"})
LONG_ON_GPU = frozenset({"load"})
NOTICE_S = 1.0  # until it is known that a process has ended
Stateful = SelectionCache | QueryLog | ShardedDecode | ShardedCache


class Leader:
    """See `tsdoc.engine.team.Followers`; a context manager that ends them.

    Args:
        job: What is computed; the others are started and met before this returns.

    Attributes:
        mesh: All ranks, this one the first; it stays the same when they are started anew.

    Raises:
        RankError: a process ended before it was ready.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._on_gpu = job.device == "cuda"
        self._alarm = Alarm()
        self._own_kv = self._on_gpu or job.spread  # K and V are each rank's own
        self._caches: weakref.WeakKeyDictionary[DeviceCache, dict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()  # what followers keep the state of
        self._processes, self.mesh = self._meet()
        self._reset()

    def _reset(self) -> None:
        """Nothing has been made on the other ranks."""
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._next = 0
        self._dropped: list[int] = []
        self._broken = False

    def _meet(self) -> tuple[Others, Mesh]:
        job = self._job
        if job.spread:
            hosts = Hosts(job)
            return hosts, hosts.mesh
        processes = Processes(job)
        found: list[Mesh | BaseException] = []

        def join() -> None:
            try:
                found.append(join_ranks(processes.meeting, 0, job.tensor, job.sequence, job.device))
            except BaseException as error:  # noqa: BLE001 - raised again below
                found.append(error)

        try:
            processes.wait_until_ready()
            # Meeting cannot be interrupted, so it is left to a thread that can be given up.
            threading.Thread(target=join, name="tsdoc-meet", daemon=True).start()
            processes.wait_for(lambda: bool(found))
        except BaseException:
            processes.end()
            raise
        (mesh,) = found
        if isinstance(mesh, BaseException):
            processes.end()
            raise mesh
        if self._on_gpu:
            processes.on_lost = mesh.abort
        else:
            processes.met()
            processes.on_lost = self._alarm.ring
        return processes, mesh

    def load(self) -> Shard:
        """Loads this rank's part of the model, unless another rank is lost meanwhile.

        Raises:
            RankError: one was.
            ModelError: tensors are missing or misshapen.
            UsageError: there are more ranks than query heads.
        """
        return load_shard(self._job, self.mesh, self.check)

    def check(self) -> None:
        """Ends the other ranks where one of them is lost.

        Raises:
            RankError: one was.
        """
        if self._processes.has_lost():
            cause = self._processes.why()
            self._break()
            raise cause

    def renew(self) -> None:
        """See `Followers.renew`."""
        if not self._broken and self._processes.has_lost():
            self._break()

    def know(self, cache: DeviceCache, pieces: Sequence[KVPiece], runner: Runner) -> None:
        """See `Followers.know`."""
        self._caches[cache] = {
            "selection": asdict(runner.selection),
            "positions": runner.rope.cos.shape[0],
            "pieces": [_describe(piece, spread=self._job.spread) for piece in pieces],
        }

    @contextlib.contextmanager
    def together(self, operation: str, /, **arguments: object) -> Iterator[None]:
        """See `Followers.together`."""
        if not self._broken:
            self.check()
        self._refuse_stale(arguments)
        if self._broken:
            self._start_anew()
        short = operation not in LONG_ON_GPU if self._on_gpu else operation in SHORT
        with _held_interrupts(short), self._alarm.ending():
            try:
                values = {name: self._encode(name, value) for name, value in arguments.items()}
                gone, self._dropped = self._dropped, []
                self._processes.send({"do": operation, "drop": gone, **values})
                yield
                if self._on_gpu:
                    self._check_results(arguments)
            except RankError as error:
                cause = self._processes.why()  # a connection breaks before its process has ended
                self._break()
                raise cause from error
            except BaseException as error:
                lost = self._lost_behind(error)
                self._break()
                if lost is not None:
                    raise lost from error
                raise

    def _check_results(self, arguments: dict[str, object]) -> None:
        """A GPU computes on with whatever it has when another rank is lost.

        Raises:
            RankError: one was; what has been computed may be wrong.
        """
        if arguments.get("need_logits", True):  # else nobody looks at results before the next call
            finish_work()
        if self._processes.has_lost():
            raise self._processes.why()

    def _lost_behind(self, error: BaseException) -> RankError | None:
        """The lost rank that a GPU's complaint comes from: its memory was read from here."""
        if not self._on_gpu or not isinstance(error, RuntimeError):
            return None
        until = time.monotonic() + NOTICE_S
        while not self._processes.has_lost():
            if time.monotonic() > until:
                return None
            time.sleep(POLL_S)
        return self._processes.why()

    def _refuse_stale(self, arguments: dict[str, object]) -> None:
        """An answer cannot go on with ranks that do not know how it began.

        Raises:
            RankError: that would happen.
        """
        for value in arguments.values():
            if not isinstance(value, Stateful) or value not in self._begun:
                continue
            if self._broken or value not in self._numbers:
                raise RankError("the other processes were started anew", hint="Ask again.")

    def _encode(self, name: str, value: Any) -> object:
        """What stands for an argument in a message; objects are made there when first named."""
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, SelectionCache):
            return self._name(value, "reuse", {"theta": value.theta})
        if isinstance(value, QueryLog):
            fields = ("start", "question_end", "num_tokens")
            return self._name(value, "log", {field: getattr(value, field) for field in fields})
        if isinstance(value, ShardedDecode):
            cache = self._encode("cache", value.cache)
            return self._name(value, "decode", {"cache": cache, **value.begun})
        return self._name(value, "cache", self._caches[value]) if name == "cache" else value

    def _name(self, value: object, kind: str, made: dict[str, Any]) -> dict[str, int]:
        number = self._numbers.get(value)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[value] = number
            if kind != "cache" or self._own_kv:
                self._begun.add(value)
            weakref.finalize(value, self._dropped_in(), number)
            self._processes.send({"do": "make", "kind": kind, "number": number, **made})
        return {"object": number}

    def _dropped_in(self) -> Any:
        processes = self._processes

        def drop(number: int) -> None:
            if processes is self._processes:
                self._dropped.append(number)

        return drop

    def _start_anew(self) -> None:
        if self._job.spread:  # only torchrun can
            raise self._processes.why()
        self._processes.end()
        self._alarm = Alarm()
        processes, mesh = self._meet()
        self._processes = processes
        self.mesh.replace(mesh)
        self._reset()

    def _break(self) -> None:
        """The ranks are no longer at the same place: the others end, until they are needed."""
        self._broken = True
        self._alarm.notice()
        self._processes.end()
        self.mesh.abort()

    def close(self) -> None:
        """Ends the others."""
        self._alarm.notice()
        if not self._broken:
            self._processes.close()
            self.mesh.abort()
        self._broken = True

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _describe(piece: KVPiece, *, spread: bool) -> dict[str, Any]:
    file = piece.file
    if file is not None and not spread:
        return asdict(file)
    if piece.on_host and not spread:
        raise ValueError("these K and V are not in memory that ranks share")
    return {"start": piece.start, "capacity": piece.capacity}


@contextlib.contextmanager
def _held_interrupts(held: bool) -> Iterator[None]:
    """While entered, Ctrl-C is only noted, and takes effect at the end."""
    handler = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    if not held or not here or not callable(handler):
        yield
        return
    noted: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if noted:
            handler(*noted[0])

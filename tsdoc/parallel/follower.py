"""A follower's objects, and the operations it repeats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tsdoc.engine.forward import Runner
from tsdoc.engine.query_log import QueryLog
from tsdoc.engine.selection_cache import SelectionCache
from tsdoc.engine.team import Team
from tsdoc.kernels.interface import DeviceCache, DeviceDecode
from tsdoc.kernels.kv import DevicePiece, KVFile, KVPiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.rope import RopeTable, make_rope_table
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.shared_kv import FilePiece
from tsdoc.kernels.spread_cache import SpreadBackend
from tsdoc.parallel.job import Shard


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cache:
    """A cache and the runner it was made with."""

    cache: DeviceCache
    runner: Runner


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Decode:
    """An answer's steps on the device, and the runner that takes them."""

    decode: DeviceDecode
    runner: Runner


class Follower:
    """Does what messages say.

    Args:
        shard: This rank's part of the model.
        mesh: All ranks.
    """

    def __init__(self, shard: Shard, mesh: Mesh) -> None:
        self._shard = shard
        self._mesh = mesh
        self._objects: dict[int, Any] = {}
        self._ropes: dict[int, RopeTable] = {}
        self._makers: dict[str, Callable[..., object]] = {
            "cache": self._make_cache,
            "decode": self._make_decode,
            "log": self._make_log,
            "reuse": lambda theta: SelectionCache(theta, mesh),
        }

    def do(self, message: dict[str, Any]) -> None:
        """Repeats one operation, or makes an object that operations will name."""
        operation = message.pop("do")
        if operation == "make":
            maker = self._makers[message.pop("kind")]
            number = message.pop("number")
            self._objects[number] = maker(**self._decoded(message))
            return
        for number in message.pop("drop"):
            self._objects.pop(number, None)
        arguments = self._decoded(message)
        if operation == "run_device_step":
            step: _Decode = arguments.pop("decode")
            step.runner.run_device_step(step.decode, **arguments)
            return
        holder: _Cache = arguments.pop("cache")
        cache, runner = holder.cache, holder.runner
        if operation == "run_chunks":
            ids = torch.tensor(arguments.pop("ids"), dtype=torch.int64)
            runner.run_chunks(cache, ids, **arguments)
        elif operation == "run_step":
            runner.run_step(cache, **arguments)
        elif operation == "load":
            runner.load(cache, **arguments)
        elif operation == "save":
            runner.save(cache, **arguments).wait()
        elif operation == "soft_votes":
            runner.soft_votes(cache, **arguments)
        elif operation == "attention_mass":
            runner.attention_mass(cache, **arguments)
        else:
            raise ValueError(f"unknown operation {operation!r}")

    def _decoded(self, message: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a message, with objects for what stands for them."""
        return {name: self._decode(value) for name, value in message.items()}

    def _decode(self, value: object) -> object:
        if isinstance(value, dict) and value.keys() == {"object"}:
            return self._objects[value["object"]]
        return value

    def _make_cache(
        self, *, selection: dict[str, Any], positions: int, pieces: list[dict[str, Any]]
    ) -> _Cache:
        config = self._shard.config
        if positions not in self._ropes:
            self._ropes = {
                positions: make_rope_table(
                    config.rope, config.head_dim, positions, self._shard.backend.device
                )
            }
        runner = Runner(
            decoder=self._shard.decoder,
            selection=SelectionConfig(**selection),
            rope=self._ropes[positions],
            team=Team(mesh=self._mesh),
        )
        made = [self._make_piece(piece) for piece in pieces]
        cache = self._shard.backend.cache(made, runner.rope, runner.selection)
        return _Cache(cache=cache, runner=runner)

    def _make_piece(self, fields: dict[str, Any]) -> KVPiece:
        backend = self._shard.backend
        if isinstance(backend, SpreadBackend):
            return backend.own_piece(**fields)
        return FilePiece(KVFile(**fields)) if "path" in fields else DevicePiece(**fields)

    def _make_decode(self, *, cache: _Cache, **begun: Any) -> _Decode:
        decode = cache.cache.start_decode(**begun)
        if decode is None:
            raise ValueError("this device leaves decode steps to the host")
        return _Decode(decode=decode, runner=cache.runner)

    def _make_log(self, *, start: int, question_end: int, num_tokens: int) -> QueryLog:
        return QueryLog(
            self._shard.decoder,
            start=start,
            question_end=question_end,
            num_tokens=num_tokens,
            device=self._shard.backend.device,
        )

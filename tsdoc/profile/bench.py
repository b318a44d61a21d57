"""The engine on its bench: a loaded model, room for K and V, marks around every operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tsdoc.engine.decoder import DecoderPart
from tsdoc.engine.engine import Engine
from tsdoc.engine.generate import Generation, GenerationConfig
from tsdoc.kernels.devices import Device
from tsdoc.kernels.index_use import IndexConfig
from tsdoc.kernels.kv import KVPiece
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.shared_kv import make_piece
from tsdoc.kernels.timing import Timer, make_timer
from tsdoc.profile.prompt import ProfilePrompt, check_memory
from tsdoc.profile.timed import Recorder, TimedBackend, TimedDecoder
from tsdoc.session.loading import LoadedModel, load_model, load_random
from tsdoc.session.memory import ROOM
from tsdoc.session.resolving import index_config, kv_shape, model_key
from tsdoc.settings import ParallelSettings, Settings
from tsdoc.store.key import ModelKey

FILL_TOKENS = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is measured, and what it is measured with.

    Attributes:
        piece: Room for the prompt, a question and an answer.
        loaded: The model itself; engines made here see it through marks.
    """

    prompt: ProfilePrompt
    settings: Settings
    device: Device
    loaded: LoadedModel
    piece: KVPiece
    timer: Timer
    recorder: Recorder
    decoder: DecoderPart
    steps: DecoderPart | None
    backend: TimedBackend

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt.ids)

    @property
    def selection(self) -> SelectionConfig:
        """The settings' own."""
        return SelectionConfig(**self.settings.selection.model_dump())

    @property
    def block(self) -> int:
        """Tokens of a prefill block."""
        return self.settings.engine.prefill_block

    @property
    def index(self) -> IndexConfig | None:
        """How answers find candidates on a GPU; K and V in a CPU's memory have no index here."""
        index = index_config(self.settings.engine, self.device)
        applies = index is not None and index.applies(self.selection, self.num_tokens)
        return index if applies and self.device == "cuda" else None

    def engine(
        self, selection: SelectionConfig | None = None, index: IndexConfig | None = None
    ) -> Engine:
        """An engine with these selection settings, which reads all keys unless `index` is given.

        Raises:
            UsageError: they do not fit the model's window.
        """
        return Engine(
            self.decoder,
            selection or self.selection,
            max_tokens=self.num_tokens + ROOM,
            question_chunk_size=self.settings.engine.question_chunk_size,
            backend=self.backend,
            index=index,
            steps=self.steps,
        )

    def prefill(
        self,
        engine: Engine,
        end: int,
        start: int = 0,
        on_block: Callable[[int], None] | None = None,
    ) -> None:
        """Computes K and V of [start, end) and returns when the device has."""
        engine.prefill(
            [self.piece],
            self.prompt.ids[:end],
            start,
            prefill_block=self.block,
            on_block=on_block or (lambda end: None),
        )
        self.timer.synchronise()

    def generate(self, engine: Engine, start: int, theta: float | None, count: int) -> Generation:
        """An answer of `count` tokens to the prompt's question at `start`."""
        options = GenerationConfig(
            max_new_tokens=count,
            stop_ids=frozenset(),
            question_chunk_size=self.settings.engine.question_chunk_size,
            theta=theta,
        )
        return engine.generate([self.piece], self.prompt.question, start, options)


def set_up(prompt: ProfilePrompt, settings: Settings, device: Device) -> Bench:
    """Loads the model and makes room for K and V.

    Raises:
        ResourceError: weights, K or V do not fit in memory.
    """
    loaded = load(prompt, settings, device)
    check_memory(len(prompt.ids), prompt.config, settings, device)
    shape = kv_shape(prompt.config, settings.engine.kv_dtype)
    piece = make_piece(
        device,
        start=0,
        capacity=len(prompt.ids) + ROOM,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=shape.kv_dtype,
    )
    timer = make_timer(torch.device(device))
    recorder = Recorder(timer)
    return Bench(
        prompt=prompt,
        settings=settings,
        device=device,
        loaded=loaded,
        piece=piece,
        timer=timer,
        recorder=recorder,
        decoder=TimedDecoder(loaded.decoder, recorder),
        steps=TimedDecoder(loaded.steps, recorder) if loaded.steps is not None else None,
        backend=TimedBackend(loaded.backend, recorder),
    )


def load(prompt: ProfilePrompt, settings: Settings, device: Device) -> LoadedModel:
    """Loads the prompt's model, or makes random weights."""
    if prompt.located is None:
        return load_random(
            prompt.config, settings.engine, prompt.compute_dtype, device, name=prompt.name
        )
    loaded = load_model(
        prompt.located, settings.engine, prompt.compute_dtype, device, ParallelSettings()
    )
    return loaded


def prompt_key(prompt: ProfilePrompt, settings: Settings) -> ModelKey:
    """The key of the entry that the profile's own store gets."""
    located, config = prompt.located, prompt.config
    fingerprint = located.fingerprint if located else f"random-{config.fingerprint()}"
    return model_key(fingerprint, config, settings, prompt.compute_dtype)


def kv_bytes(prompt: ProfilePrompt, settings: Settings) -> int:
    """Bytes of K and V of the whole prompt."""
    shape = kv_shape(prompt.config, settings.engine.kv_dtype)
    return shape.token_bytes * len(prompt.ids)


def covering(selection: SelectionConfig, num_tokens: int) -> SelectionConfig:
    """A budget that covers the whole prompt: full attention."""
    return replace(selection, top_k=max(selection.top_k, num_tokens + ROOM))


def warm_up(bench: Bench) -> None:
    """Compiles what a prefill and an answer need: on CUDA, at every length that changes kernels.

    K and V are filled with noise for that; the prefill that counts overwrites them.
    """
    if bench.device == "cpu":
        return
    engine = bench.engine()
    _fill(bench, engine)
    last = max(0, (bench.num_tokens - 1) // bench.block * bench.block)
    starts, start = {0, last}, bench.block
    while start < last:
        starts.add(start)
        start *= 2
    for start in sorted(starts):
        bench.prefill(engine, min(start + bench.block, bench.num_tokens), start)
    for theta in (None, -1.0, bench.settings.engine.theta):
        list(bench.generate(engine, bench.num_tokens, theta, 4))
    bench.timer.synchronise()


def _fill(bench: Bench, engine: Engine) -> None:
    """Noise as K and V of the whole prompt."""
    config, device = bench.prompt.config, bench.backend.device
    cache = engine.cache([bench.piece])
    shape = (min(FILL_TOKENS, bench.num_tokens), config.num_kv_heads, config.head_dim)
    noise = torch.randn(shape, device=device, dtype=bench.decoder.dtype)
    for layer in range(config.num_layers):
        for start in range(0, bench.num_tokens, FILL_TOKENS):
            rows = noise[: bench.num_tokens - start]
            cache.write(layer, start, rows, rows)

"""The process that `tsdoc.profile.warm` starts: says on stdout what it has reached, and when."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Reads a job from stdin, loads the model, opens the entry and makes the first token."""
    job = json.load(sys.stdin)
    _reached("python")
    import torch  # noqa: F401 - the stage is its import

    import tsdoc.engine.engine
    import tsdoc.engine.generate
    import tsdoc.session.loading
    import tsdoc.store  # noqa: F401 - same

    _reached("imports")
    _answer(job)


def _answer(job: dict[str, Any]) -> None:
    import numpy as np

    from tsdoc.engine.engine import Engine
    from tsdoc.engine.generate import GenerationConfig
    from tsdoc.kernels.kv import MemoryPiece
    from tsdoc.kernels.selection import SelectionConfig
    from tsdoc.profile.bench import load, prompt_key
    from tsdoc.profile.prompt import reopen_prompt
    from tsdoc.session.memory import ROOM
    from tsdoc.session.resolving import kv_shape
    from tsdoc.settings import Settings
    from tsdoc.store import Store

    settings = Settings.model_validate(job["settings"])
    ids = np.load(job["ids"], allow_pickle=False)
    prompt = reopen_prompt(job["prompt"], settings, ids)
    loaded = load(prompt, settings, job["device"])
    _reached("model")
    entry = Store(Path(job["store"])).open(prompt_key(prompt, settings), ids)
    if entry is None:
        sys.exit("the entry was not found")
    _reached("open")
    shape = kv_shape(prompt.config, settings.engine.kv_dtype)
    tail = MemoryPiece(
        start=len(ids),
        capacity=ROOM,
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        kv_dtype=shape.kv_dtype,
    )
    with entry:
        engine = Engine(
            loaded.decoder,
            SelectionConfig(**settings.selection.model_dump()),
            max_tokens=len(ids) + ROOM,
            question_chunk_size=settings.engine.question_chunk_size,
            backend=loaded.backend,
            steps=loaded.steps,
        )
        options = GenerationConfig(
            max_new_tokens=1,
            stop_ids=frozenset(),
            question_chunk_size=settings.engine.question_chunk_size,
            theta=settings.engine.theta,
        )
        answer = engine.generate([*entry.pieces, tail], prompt.question, len(ids), options)
        next(iter(answer))
        _reached("first token")


def _reached(stage: str) -> None:
    sys.stdout.write(f"{stage}\t{time.time()}\n")
    sys.stdout.flush()

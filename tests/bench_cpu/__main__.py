"""Puts tsdoc and llama.cpp side by side on the CPU: same GGUF file, same text, same threads.

    python -m tests.bench_cpu --profile tiny --gguf SmolLM2.gguf --text book.txt \
        --llama-python /venv/with/llama-cpp-python/bin/python

llama.cpp prefills the text from its beginning with both of its flash-attention settings and stops
after `--llama-limit` seconds; what is left of the 32k is then reckoned from a straight line through
the times of its batches (every token attends to all before it), and said so. `--llama-limit 0` sets
no limit. tsdoc prefills all of it with `--whole`; without, one block is timed at several depths,
behind made-up K and V. Decode steps of tsdoc (`--decode`) come after a real prefill, or after the
first 32k tokens of an entry that `tsdoc ingest` made of the text (`--entry`); those of llama.cpp
after what it has prefilled, and beyond from a straight line again. All medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench_cpu.engine import BLOCK, Runs, product_rate
from tests.bench_cpu.shapes import flops_per_token
from tsdoc.home import find_home
from tsdoc.ingest.options import IngestOptions
from tsdoc.kernels.kv import KVPiece
from tsdoc.models.locate import LocatedModel, locate_model
from tsdoc.models.profiles import load_profile
from tsdoc.progress import Silent
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.session import open_session
from tsdoc.settings import ModelSettings, Settings
from tsdoc.store.piece import SegmentPiece

TOKENS = 32_768
QUESTION = "\nWhat happens in this text?\n"


def main() -> None:
    """Runs what is asked for and prints one JSON object a line, as soon as it is known."""
    options = _options()
    torch.set_num_threads(options.threads)
    model = locate_model(
        ModelSettings(**load_profile(options.profile)["model"]),
        find_home(),
        offline=True,
        confirm=lambda plan: False,
        on_progress=lambda stage, done, total: None,
    )
    tokenizer = TextTokenizer(model.directory)
    ids, _ = tokenizer.encode(options.text.read_text("utf-8"))
    if len(ids) < options.tokens:
        ids = np.tile(ids, -(-options.tokens // len(ids)))
    _say(
        profile=options.profile,
        tokens=options.tokens,
        threads=options.threads,
        python=platform.python_version(),
        torch=torch.__version__,
        processor=_processor(),
    )
    if not options.no_tsdoc:
        question = tokenizer.encode(QUESTION)[0].tolist()
        _say(tsdoc=_tsdoc(options, model, ids, question))
    if options.llama_python:
        for flash in (False, True):
            for batch in options.batch:
                name = f"llama.cpp flash={int(flash)} batch={batch}"
                _say(**{name: _llama(options, ids, flash=flash, batch=batch)})


def _say(**found: object) -> None:
    json.dump(found, sys.stdout)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _tsdoc(
    options: argparse.Namespace, model: LocatedModel, ids: np.ndarray, question: Sequence[int]
) -> dict[str, Any]:
    own, torchs = (product_rate(model.config, own=choice) for choice in (True, False))
    flops = flops_per_token(model.config)
    found: dict[str, Any] = {
        "gflops": round(own / 1e9, 1),
        "gflops_of_torch": round(torchs / 1e9, 1),
        "mflop_per_token": round(flops / 1e6, 1),
    }
    runs = Runs(model, options.threads)
    with ExitStack() as stack:
        pieces: list[KVPiece] = []
        if options.whole:
            piece, blocks = runs.prefill(ids[: options.tokens])
            pieces.append(piece)
            found["block_tokens_per_s"] = [round(BLOCK / seconds, 1) for seconds in blocks]
            rate = options.tokens / sum(blocks)
        else:
            rates = {}
            for start in options.depths:
                seconds = statistics.median(runs.block_s(ids, start, options.repeat))
                rates[start] = round(BLOCK / seconds, 1)
            found["tokens_per_s_at"] = rates
            inside = [one for start, one in rates.items() if start < options.tokens]
            rate = len(inside) / sum(1 / one for one in inside)
            if options.entry:
                pieces += _entry_pieces(options, stack)
        for name, theta in (("decode", 0.9), ("decode_selecting", None)):
            if options.decode and pieces:
                decoded = runs.decode(pieces, question, theta=theta, steps=options.decode)
                found[f"{name}_ms"] = round(1e3 * statistics.median(decoded.steps_s), 1)
                found[f"{name}_mean_ms"] = round(1e3 * statistics.fmean(decoded.steps_s), 1)
                found[f"{name}_hits"] = round(decoded.hit_ratio, 2)
    found["tokens_per_s"] = round(rate, 1)
    found["of_bound"] = round(rate * flops / own, 3)
    found["of_bound_by_torch"] = round(rate * flops / torchs, 3)
    return found


def _entry_pieces(options: argparse.Namespace, stack: ExitStack) -> list[KVPiece]:
    """The first tokens of the entry that the store has of the text."""
    settings = Settings.model_validate({"model": load_profile(options.profile)["model"]})
    session = stack.enter_context(
        open_session(
            settings=settings,
            home=find_home(),
            sources=[str(options.text)],
            ingest=IngestOptions(),
            reporter=Silent(),
            offline=True,
        )
    )
    session.prepare(must_keep=True)
    entry = session._kept.get().entry
    assert entry is not None
    return [
        SegmentPiece(segment, min(part.end, options.tokens))
        for segment, part in zip(entry.segments, entry.parts, strict=True)
        if segment.info.start < options.tokens
    ]


def _llama(
    options: argparse.Namespace, ids: np.ndarray, *, flash: bool, batch: int
) -> dict[str, Any]:
    job = {
        "gguf": str(options.gguf),
        "ids": ids[: options.tokens].tolist(),
        "threads": options.threads,
        "flash": flash,
        "batch": batch,
        "end": options.tokens,
        "limit_s": options.llama_limit or 1e9,
        "decode": 5,
    }
    script = Path(__file__).parent / "llama.py"
    done = subprocess.run(
        [options.llama_python, str(script)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(done.stdout)
    batches = np.array(answer["batches"])
    middle, per_token = batches[:, 0] + batches[:, 1] / 2, batches[:, 2] / batches[:, 1]
    last = int(batches[-1, 0] + batches[-1, 1])
    measured_s = float(batches[:, 2].sum())
    slope, base = np.polyfit(middle, per_token, 1)
    rest_s = base * (options.tokens - last) + slope * (options.tokens**2 - last**2) / 2
    at_4k = batches[middle < 4096]
    depths = sorted({at for at, _ in answer["decode"]})
    medians = [statistics.median(s for at, s in answer["decode"] if at == d) for d in depths]
    found = {
        "version": answer["version"],
        "system": answer["system"],
        "prefilled_tokens": last,
        "tokens_per_s_4k": round(float(at_4k[:, 1].sum() / at_4k[:, 2].sum()), 1),
        "tokens_per_s_so_far": round(last / measured_s, 1),
        "tokens_per_s": round(options.tokens / (measured_s + float(rest_s)), 1),
        "reckoned": last < options.tokens,
        "decode_ms": {d: round(1e3 * s, 1) for d, s in zip(depths, medians, strict=True)},
    }
    if len(depths) > 1:
        slope, base = np.polyfit(depths, medians, 1)
        found["decode_ms_at_end"] = round(1e3 * float(base + slope * options.tokens), 1)
    return found


def _processor() -> str:
    names = (
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        if line.startswith("model name")
    )
    return next(names, platform.processor())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--llama-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--llama-limit", type=float, default=60.0, help="seconds per setting")
    parser.add_argument("--batch", type=int, nargs="+", default=[512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--depths", type=int, nargs="+", default=[0, 8192, 16_384, 28_672])
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--decode", type=int, default=0, help="steps after a real prefill")
    parser.add_argument("--entry", action="store_true", help="decode from the store's entry")
    parser.add_argument("--no-tsdoc", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()

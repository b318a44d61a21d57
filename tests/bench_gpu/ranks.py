"""Several GPUs beside one: the same answers, and how much faster. One JSON line per figure.

    python -m tests.bench_gpu.ranks equal exchange qwen2_7b qwen2_7b_2m llama3_8b

Starts a process per GPU itself, first one, then `--ranks` of them, with random weights. `equal`
compares a small model in float32 with the CPU; `exchange` times what ranks say to each other;
the rest prefill so many tokens on the device alone and answer behind them: with every layer
selecting, with a Selection Cache of 0.9, and with every layer hitting. What does not fit the
devices' memory is said, and the next part goes on. With `--interpreter` everything is tiny, and
runs on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bench_gpu.common import PAPER, QWEN2_7B, Row, median_ms, random_ids
from tests.kernels.triton.interpreter import mend_interpreter
from tests.rank_processes import give, run_processes, take_task
from tsdoc.engine.engine import Engine
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.random_weights import RandomWeights
from tsdoc.engine.sharding import shard_model
from tsdoc.engine.team import Team
from tsdoc.errors import TsdocError
from tsdoc.kernels.devices import own_gpu
from tsdoc.kernels.kv import DevicePiece
from tsdoc.kernels.ranks import Mesh
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.shards import shard_groups
from tsdoc.models.config import ModelConfig, RopeConfig
from tsdoc.parallel.job import Job, make_on_device

LLAMA3_8B = ModelConfig(
    architecture="llama", num_layers=32, hidden_size=4096, intermediate_size=14_336,
    num_qo_heads=32, num_kv_heads=8, head_dim=128, vocab_size=128_256, norm_eps=1e-5,
    rope=RopeConfig(rope_type="default", theta=5e5), window=8192, tie_embeddings=False,
    qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False, eos_token_ids=(),
)  # fmt: skip
SHAPES = {"qwen2_7b": QWEN2_7B, "llama3_8b": LLAMA3_8B}
PARTS = {
    "qwen2_7b": ("qwen2_7b", 1 << 20),
    "qwen2_7b_2m": ("qwen2_7b", 1 << 21),
    "llama3_8b": ("llama3_8b", 1 << 20),
}
TINY: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 64, "intermediate_size": 96, "num_qo_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "vocab_size": 97,
}  # fmt: skip
SMALL = SelectionConfig(n_init=4, n_local=12, top_k=10, chunk_size=16)
PARTED_S = 270  # a part and number of ranks takes at most so long


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make_engine(task: dict[str, Any], mesh: Mesh, max_tokens: int) -> Engine:
    config, tiny = SHAPES[task["shape"]], task["tiny"]
    dtype = torch.bfloat16
    if tiny:
        config, dtype = dataclasses.replace(config, **TINY), torch.float32
    device = torch.device("cpu") if tiny else own_gpu()
    name = "float32" if tiny else "bfloat16"
    job = Job(
        directory="", tensor=mesh.tensor.size, sequence=1, device="cuda", compute_dtype=name,
        kv_dtype=name, device_memory=None, threads=1,
    )  # fmt: skip
    own = shard_model(config, mesh.tensor, shard_groups)
    made = make_on_device(job, mesh, own, RandomWeights(config, dtype, device), dtype, device)
    return Engine(
        made.decoder, SMALL if tiny else PAPER, max_tokens=max_tokens,
        question_chunk_size=16 if tiny else 512, backend=made.backend, team=Team(mesh=mesh),
    )  # fmt: skip


def timed(task: dict[str, Any], mesh: Mesh) -> list[Row]:
    """Prefill and answers of one part, on this rank."""
    num_tokens, block, count = task["tokens"], task["block"], task["count"]
    room = count + 32
    begun = time.perf_counter()
    engine = make_engine(task, mesh, num_tokens + room)
    piece = DevicePiece(start=0, capacity=num_tokens + room)
    engine.cache([piece])  # room for everything, or an error before anything is computed
    synchronize()
    row: Row = {"part": task["part"], "ranks": mesh.world.size, "tokens": num_tokens}
    row["weights_s"] = time.perf_counter() - begun
    ids = random_ids(num_tokens) % engine.runner.decoder.config.vocab_size
    warm_up = ids[: min(num_tokens, 3 * block)]
    engine.prefill([piece], warm_up, 0, prefill_block=block, on_block=lambda end: None)
    synchronize()
    begun, marks = time.perf_counter(), {}

    def on_block(end: int) -> None:
        marks[end] = time.perf_counter() - begun

    engine.prefill([piece], ids, 0, prefill_block=block, on_block=on_block)
    synchronize()
    row["prefill_s"] = time.perf_counter() - begun
    if torch.cuda.is_available():
        row["peak_GB"] = torch.cuda.max_memory_allocated() / 1e9
    rows: list[Row] = [row]
    for name, theta in (("selects", None), ("theta 0.9", 0.9), ("hits", -1.0)):
        rows.append({**row, "decode": name, **decode(engine, piece, num_tokens, theta, count)})
    return rows


def decode(engine: Engine, piece: DevicePiece, start: int, theta: float | None, count: int) -> Row:
    """Milliseconds per token of the second answer; the first compiles."""
    chunk = engine.runner.selection.chunk_size
    config = GenerationConfig(
        max_new_tokens=count, stop_ids=frozenset(), question_chunk_size=chunk, theta=theta
    )
    for _ in range(2):
        times, tokens, last = [], [], time.perf_counter()
        generation = engine.generate([piece], list(range(20)), start, config)
        for token in generation:
            now = time.perf_counter()
            times.append((now - last) * 1e3)
            last = now
            tokens.append(token)
    settled = times[4:] or times
    return {
        "ms_per_token": float(np.median(settled)), "p95_ms": float(np.quantile(settled, 0.95)),
        "first_token_ms": times[0], "hits": generation.reuse.num_hits,
        "lookups": generation.reuse.num_lookups, "answer": tokens[:16],
    }  # fmt: skip


def exchange(task: dict[str, Any], mesh: Mesh) -> list[Row]:
    """Milliseconds of single exchanges, in a graph: those of decode steps and of a block."""
    ranks, tiny = mesh.world, task["tiny"]
    device = torch.device("cpu") if tiny else own_gpu()
    kinds = {
        "sum of one hidden state": (ranks.sum, (1, 3584), torch.bfloat16),
        "sum of a block's hidden states": (ranks.sum, (8192, 3584), torch.bfloat16),
        "sum of one row of votes": (ranks.sum, (1, 1 << 20), torch.float32),
        "shares of 16 rows of votes": (ranks.sum_share, (16, 1 << 20), torch.float32),
        "gather of two numbers": (ranks.gather, (2,), torch.float32),
    }
    rows: list[Row] = []
    for name, (call, shape, dtype) in kinds.items():
        x = torch.zeros(shape, dtype=dtype, device=device)
        call(x)
        ms = None if tiny else captured_ms(partial(call, x))
        rows.append({"part": "exchange", "what": name, "ranks": ranks.size, "ms": ms})
    return rows


def captured_ms(call: Callable[[], object]) -> float:
    """Median of a graph of one exchange; NCCL looks at its events from a thread of its own."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return median_ms(graph.replay)


def equal(options: argparse.Namespace) -> list[Row]:
    """An answer in float32: of one and of several ranks with Triton's kernels, beside the CPU's."""
    from tests.engine import test_rank_processes as small
    from tests.tiny_models import token_ids
    from tsdoc.models.config import read_config

    where = {"kernels": "triton", "device": "cpu" if options.interpreter else "cuda"}
    split, new = (64, 4) if options.interpreter else (300, 12)
    with tempfile.TemporaryDirectory() as name:
        directory = small.save_model(Path(name), 23)
        config = read_config(directory)
        task = small.make_task(
            directory, ids=token_ids(split + 10, seed=24).tolist(), split=split, new=new,
            theta=0.5, selection=asdict(SMALL),
        )  # fmt: skip
        expected = small.alone(task, small.make_pieces(config, task))
        rows: list[Row] = []
        for count in (1, options.ranks):
            pieces = small.make_pieces(config, task)
            found = small.together({**task, **where}, pieces, count, 1)
            differences = [
                np.abs(np.subtract(f["logits"], expected["logits"])).max() for f in found
            ]
            rows.append(
                {
                    "part": "equal", "ranks": count,
                    "same_tokens": all(f["tokens"] == expected["tokens"] for f in found),
                    "same_hits": all(f["hits"] == expected["hits"] for f in found),
                    "largest_difference_of_logits": float(max(differences)),
                    "ranks_agree": all(f["logits"] == found[0]["logits"] for f in found),
                }
            )  # fmt: skip
    return rows


def run_part(part: str, options: argparse.Namespace) -> list[Row]:
    if part == "equal":
        return equal(options)
    tiny = options.interpreter
    task: dict[str, Any] = {"part": part, "device": "cpu" if tiny else "cuda", "tiny": tiny}
    if part == "exchange":
        return run_processes(__spec__.name, task, options.ranks, timeout_s=PARTED_S)[0]["rows"]
    shape, tokens = PARTS[part]
    task |= {
        "shape": shape, "tokens": options.tokens or (64 if tiny else tokens),
        "block": 32 if tiny else options.block, "count": 2 if tiny else options.count,
    }  # fmt: skip
    rows: list[Row] = []
    for count in options.sizes:
        try:
            found = run_processes(__spec__.name, task, count, timeout_s=PARTED_S)
        except RuntimeError as error:
            rows.append({"part": part, "ranks": count, "error": str(error)[-1500:]})
            continue
        errors = [one["error"] for one in found if "error" in one]
        if errors:
            rows.append({"part": part, "ranks": count, "error": errors[0]})
            continue
        answers = [[row.get("answer") for row in one["rows"]] for one in found]
        rows += [{**row, "ranks_agree": answers == answers[:1] * count} for row in found[0]["rows"]]
    return rows + compare(rows, part)


def compare(rows: list[Row], part: str) -> list[Row]:
    """How many times faster several ranks are than one."""
    times = {(row.get("decode"), row["ranks"]): row for row in rows if "error" not in row}
    found: list[Row] = []
    for (kind, count), row in times.items():
        one = times.get((kind, 1))
        if count == 1 or one is None:
            continue
        name = "ms_per_token" if kind else "prefill_s"
        before, now = one[name], row[name]
        assert isinstance(before, float)
        assert isinstance(now, float)
        what = f"decode, {kind}" if kind else "prefill"
        found.append({"part": part, "what": what, "ranks": count, "times_faster": before / now})
    return found


def work() -> None:
    task, mesh = take_task()
    if task["tiny"]:
        mend_interpreter()
    try:
        give({"rows": exchange(task, mesh) if task["part"] == "exchange" else timed(task, mesh)})
    except TsdocError as error:  # on all ranks alike: their memory is
        give({"error": str(error)})


def show(row: Row) -> None:
    short = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
    sys.stdout.write(json.dumps(short) + "\n")
    sys.stdout.flush()


def main() -> None:
    if len(sys.argv) == 6 and sys.argv[5].startswith("{"):
        work()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=["equal", "exchange", *PARTS])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", help="numbers of ranks to time, instead of 1 and --ranks")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--block", type=int, default=8192)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--interpreter", action="store_true")
    options = parser.parse_args()
    if options.interpreter:
        os.environ["TRITON_INTERPRET"] = "1"
    sizes = options.sizes or f"1,{options.ranks}"
    options.sizes = [int(size) for size in sizes.split(",")]
    if not options.interpreter and (found := count_devices()) < max(options.sizes):
        parser.error(f"there are {found} GPUs")
    for part in options.parts:
        for row in run_part(part, options):
            show(row)


def count_devices() -> int:
    """Asked of a process of its own: this one takes no memory of a GPU."""
    ask = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    return int(subprocess.run(ask, capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()

"""Any number of ranks beside one, as real `tsdoc ask --parallel` processes on one document.

    python -m tests.equal_ranks --model DIRECTORY --write 2x1 1x2 --read 1x1 4x1

DIRECTORY is a converted model, `tiny` say; without one, a small random one is made. Meshes are
tensor x sequence. Each of `--write` prefills from nothing and answers; then each of `--read`
answers from what that one kept, and has nothing to compute. All must say what one process says that
prefilled by itself: the words, the steps and hits of the Selection Cache, the passages. What is
kept must be the same up to rounding; the largest difference is said. All in float32, every key
scored; one JSON line per row.

Tokens that are alike have equal keys in the first layer, and their votes tie. Of those at the
boundary of a selection the first are selected, by any number of ranks; what a random model says
hangs on that (`--set top_k=512` makes it select). Where a product's rows are rounded by their place
(`tsdoc.kernels.products`), such keys can differ in the last bit: then a tie may still fall another
way, and of a long document K and V, or a hit of the Selection Cache, differ by more than rounding.

Ranks of the sequence axis have stretches of 4,096 tokens, so each of S has some of more than
4,096 x (S - 1); `--lines` makes the document as long (15 to 32 tokens each), and a shorter one is
refused.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.kill_ranks import random_model
from tsdoc.kernels.token_share import SHARE_TOKENS

SETS = ["compute_dtype=float32", "kv_dtype=float32", "decode_weights=float32"]
QUESTION = "Which shelf holds the brass compass?"
NOUNS = [
    "ledger",
    "lantern",
    "map",
    "compass",
    "sextant",
    "globe",
    "letter",
    "medal",
    "rope",
    "bell",
]
KINDS = ["brass", "torn", "silver", "wooden", "painted", "broken", "small", "heavy", "old", "blue"]


@dataclass
class Trial:
    """What all runs have in common."""

    document: Path
    home: Path
    model: Path
    options: list[str]

    def ask(self, mesh: str) -> dict[str, Any]:
        """One run; what it reported."""
        tensor, sequence = mesh.split("x")
        command = ["ask", str(self.document), QUESTION, "--json", "--offline"]
        command += ["--model", str(self.model), "--device", "cpu"]
        sets = [*SETS, *self.options, f"parallel.tensor={tensor}", f"parallel.sequence={sequence}"]
        begun = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "tsdoc", *command, *(p for s in sets for p in ("--set", s))],
            env={**os.environ, "TSDOC_HOME": str(self.home)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return {**report, "wall_s": round(time.monotonic() - begun, 1)}

    def forget(self) -> None:
        shutil.rmtree(self.home / "store", ignore_errors=True)

    def kept(self) -> np.memmap[Any, np.dtype[np.float32]]:
        """K and V of the one entry."""
        (path,) = (self.home / "store").rglob("kv.bin")
        return np.memmap(path, dtype=np.float32, mode="r")


def said(report: dict[str, Any]) -> dict[str, Any]:
    """What must be the same, of one answer."""
    (answer,) = report["answers"]
    passages = (answer.get("evidence") or {}).get("passages", [])
    return {
        "text": answer["text"],
        "tokens": answer["generated_tokens"],
        "selection_cache": answer["selection_cache"],
        "passages": [passage["text"] for passage in passages],
    }


def is_equal(row: dict[str, Any], report: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Shows a row, and whether a report says what is expected."""
    found = said(report)
    differs = {name: (found[name], expected[name]) for name in expected}
    differs = {name: both for name, both in differs.items() if both[0] != both[1]}
    shown = {**row, "equal": not differs, **({"differs": differs} if differs else {})}
    sys.stdout.write(json.dumps({**shown, "wall_s": report["wall_s"]}, ensure_ascii=False) + "\n")
    sys.stdout.flush()
    return not differs


def write_document(path: Path, num_lines: int) -> None:
    """Lines of which no two are alike."""
    rng = random.Random(11)
    lines = []
    for number in range(num_lines):
        thing = f"{rng.choice(KINDS)} {rng.choice(NOUNS)}"
        lines.append(f"{rng.randrange(10_000)}: shelf {number} holds the {thing}.")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    assert one.shape == other.shape
    step = 1 << 24
    parts = range(0, len(one), step)
    return max(float(np.abs(one[i : i + step] - other[i : i + step]).max()) for i in parts)


def run(trial: Trial, work: Path, writers: list[str], readers: list[str]) -> bool:
    alone = trial.ask("1x1")
    longest = max(int(mesh.split("x")[1]) for mesh in [*writers, *readers])
    assert alone["prompt_tokens"] > SHARE_TOKENS * (longest - 1), (
        "a rank has no tokens: more --lines"
    )
    expected = said(alone)
    reference = work / "kv.bin"
    np.asarray(trial.kept()).tofile(reference)
    pages = np.memmap(reference, dtype=np.float32, mode="r")
    row = {
        "wrote": "1x1",
        "tokens": alone["prompt_tokens"],
        "largest_kv": float(np.abs(pages).max()),
    }
    equal = [is_equal(row, alone, expected)]
    for writer in writers:
        if writer != "1x1":
            trial.forget()
            report = trial.ask(writer)
            assert report["computed_tokens"] == report["prompt_tokens"]
            difference = largest_difference(trial.kept(), pages)
            equal.append(is_equal({"wrote": writer, "kv_differs_by": difference}, report, expected))
        for reader in readers:
            report = trial.ask(reader)
            assert report["computed_tokens"] == 0, report
            equal.append(is_equal({"wrote": writer, "read": reader}, report, expected))
    return all(equal)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="without one, a small random one is made")
    parser.add_argument("--heads", default="6/2", help="query / KV heads of the random one")
    parser.add_argument("--write", nargs="+", default=["2x1", "3x1", "4x1", "1x2", "2x2"])
    parser.add_argument("--read", nargs="*", default=[])
    parser.add_argument("--lines", type=int, default=140)
    parser.add_argument("--new", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--set", action="append", default=[], help="further settings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tsdoc-equal-") as name:
        work = Path(name)
        queries, keys = map(int, arguments.heads.split("/"))
        shape = {"num_attention_heads": queries, "num_key_value_heads": keys}
        shape["max_position_embeddings"] = 1 << 15
        model = arguments.model or random_model(work / "model", **shape)
        write_document(work / "shelves.txt", arguments.lines)
        options = [f"max_new_tokens={arguments.new}", *arguments.set]
        trial = Trial(work / "shelves.txt", work / "home", model, options)
        return 0 if run(trial, work, arguments.write, arguments.read) else 1


if __name__ == "__main__":
    sys.exit(main())

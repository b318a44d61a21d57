"""Measures a follow-up question on a document that is in the store already.

    TSDOC_HOME=… python -m tests.bench_store SOURCE... --profile embedded [--cold] [--index none]

Prints the seconds of each stage, which share of K and V was checked (and so read) and which share
the rows that were used are of it, after each of two questions, and what came from the disk.
`--cold` first asks the kernel to forget the cached pages of the store's files.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tsdoc.home import find_home
from tsdoc.ingest.options import IngestOptions
from tsdoc.kernels.piece_rows import PieceRows
from tsdoc.models.profiles import load_profile
from tsdoc.progress import Silent
from tsdoc.session import open_session
from tsdoc.settings import Settings
from tsdoc.store import Entry
from tsdoc.store.index_file import IndexLayout
from tsdoc.store.key import PAGE_SIZE
from tsdoc.store.piece import SegmentPiece


def forget(root: Path) -> None:
    for path in root.rglob("*.bin"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def bytes_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def checked_bytes(entry: Entry) -> dict[str, int]:
    """Bytes of K and V whose pages or units were checked, of the index, and of all K and V."""
    found = {"checked": 0, "index": 0, "all": 0}
    for segment in entry.segments:
        page_bytes = PAGE_SIZE * segment.info.shape.row_bytes
        found["checked"] += int(segment.verified.sum()) * page_bytes
        checks = segment.units()
        if checks is not None:
            found["checked"] += int(checks.verified.sum()) * (page_bytes // segment.units_per_page)
        found["all"] += segment.verified.size * page_bytes
        if segment.index() is not None:
            found["index"] += IndexLayout(info=segment.info).num_bytes
    return found


class UsedRows:
    """Notes which rows of K, and which of V, were used, of pieces of the store."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], set[int]] = {}
        take = PieceRows._take

        def note(
            rows: PieceRows, layer: int, positions: torch.Tensor, out: Sequence[torch.Tensor]
        ) -> None:
            kept = [piece for piece in rows.pieces if isinstance(piece, SegmentPiece)]
            end = max(piece.start + piece.capacity for piece in kept)
            inside = positions[positions < end].tolist()
            for kind in range(len(out)):  # K, or K and V
                self._rows.setdefault((layer, kind), set()).update(inside)
            take(rows, layer, positions, out)

        PieceRows._take = note  # type: ignore[method-assign, assignment]

    def count(self) -> int:
        """Rows of K and of V together."""
        return sum(len(rows) for rows in self._rows.values())


def at_text(times: list[float]) -> Callable[[str], None]:
    """Notes the process's CPU time at every piece of an answer."""
    return lambda text: times.append(time.process_time())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--profile", default="embedded")
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--index", default="int4")
    parser.add_argument("--candidates", type=int)
    parser.add_argument("--reread-tokens", type=int, help="0 reads nothing again")
    parser.add_argument("--evidence", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--question", default="Who is the heroine, and where does she live?")
    arguments = parser.parse_args()
    home = find_home()
    if arguments.cold:
        forget(home.store)
    engine: dict[str, object] = {
        "index": arguments.index,
        "index_candidates": arguments.candidates,
    }
    if arguments.reread_tokens is not None:
        engine["reread_tokens"] = arguments.reread_tokens
    settings = Settings.model_validate(
        {
            **load_profile(arguments.profile),
            "answer": {"max_new_tokens": arguments.tokens, "evidence": arguments.evidence},
            "engine": engine,
        }
    )
    used = UsedRows()
    begun, read = time.perf_counter(), bytes_from_disk()
    with open_session(
        settings=settings,
        home=home,
        sources=arguments.sources,
        ingest=IngestOptions(),
        reporter=Silent(),
        offline=True,
    ) as session:
        opened_s = time.perf_counter() - begun
        prepared = session.prepare()
        assert prepared.computed_tokens == 0, "not in the store"
        prepared_s = time.perf_counter() - begun - opened_s
        session._engines.make(len(session.prompt.ids) + 1000)  # load the weights
        from_disk, answers, cpu_s, shares = [], [], [], []
        entry = session._kept.entry
        assert entry is not None
        for _ in range(2):
            before, begun_s = bytes_from_disk(), time.process_time()
            times: list[float] = []
            answers.append(session.ask(arguments.question, at_text(times)))
            from_disk.append(bytes_from_disk() - before)
            cpu_s.append(round(times[0] - begun_s, 2))
            checked = checked_bytes(entry)
            half_row = entry.segments[0].info.shape.row_bytes // 2
            used_bytes = used.count() * half_row
            held = checked["checked"]
            shares.append(
                {
                    "units": round(held / checked["all"], 3),
                    "units_and_index": round((held + checked["index"]) / checked["all"], 3),
                    "rows_used": round(used_bytes / checked["all"], 3),
                }
            )
    index = session._engines.make(1).index
    report = {
        "prompt_tokens": prepared.prompt_tokens,
        "open_session_s": round(opened_s, 2),
        "open_entry_s": round(prepared_s, 3),
        "weights_s": round(session.times_s["model_load"], 2),
        "first_token_s": [round(answer.times_s["first_token"], 2) for answer in answers],
        "first_token_cpu_s": cpu_s,
        "generated_tokens": answers[0].generated_tokens,
        "kv_bytes": checked["all"],
        "checked_shares": shares,
        "decode_ms_per_token": [
            round(1e3 * a.times_s["decode"] / max(a.generated_tokens - 1, 1)) for a in answers
        ],
        "answers": [answer.text for answer in answers],
        "caught_by_the_index": None if index is None else index.mean_share,
        "from_disk_bytes": from_disk,
        "opening_from_disk_bytes": bytes_from_disk() - read - sum(from_disk),
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

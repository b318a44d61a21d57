"""Feeds mutated documents to every reader: `python -m tests.fuzz_readers --minutes 10 --seed 1`.

Originals are the real documents beside the repository where they lie there, and made ones of every
kind. A run fails on any error that is not a `TsdocError`, on a reader process that ends by an
exception of its own, on a unit of work that takes over 5 s of CPU, and on memory over the limit.
Inputs that fail are kept under --keep. The same seed gives the same inputs in the same order.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.ingest.making import lines, make_docx, make_epub, make_pdf, nav_point
from tsdoc.errors import TsdocError
from tsdoc.ingest.document import Document
from tsdoc.ingest.options import IngestOptions, Limits
from tsdoc.ingest.sources import read_sources

REAL = Path(__file__).resolve().parents[2] / "shared" / "real"
LARGEST = 1 << 20  # larger originals would be read too seldom
HANG_S = 5.0
BATCH = 16  # files that share a reader process, whose start takes as long as reading them
OVERHEAD_BYTES = 128 << 20  # a reader process before it reads anything
INTERESTING = (
    *(
        b"\0",
        b"\xff" * 4,
        b"\x7f\xff\xff\xff",
        b"9" * 20,
        b"-1",
        b"%s%n",
        b"../" * 9,
        b"<",
        b"&#0;",
    ),
    *(b"<![CDATA[", b"<!DOCTYPE x [<!ENTITY a 'b'>]>", b"<<", b">>", b"endstream", b"obj", b"("),
    *(b"]]>", b"\xed\xa0\x80", b"\xe2\x80\xae", b"\x1b[2J", b"{", b"[" * 50, b'"', b"\\u", b"xref"),
)
Mutation = Callable[[random.Random, bytearray], None]


@dataclass
class Tally:
    """What came out so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""


def originals() -> dict[str, bytes]:
    """Returns whole files by name; the suffix says the reader."""
    found = {}
    if REAL.is_dir():
        for path in sorted(REAL.rglob("*")):
            if path.suffix in (".pdf", ".epub", ".txt") and path.stat().st_size <= LARGEST:
                found[path.name] = path.read_bytes()
        with zipfile.ZipFile(REAL / "epub" / "live-manual.en.epub") as archive:
            pages = [name for name in archive.namelist() if name.endswith(".xhtml")]
            for number, name in enumerate(sorted(pages)[:20]):
                found[f"page{number}.html"] = archive.read(name)
    return found | made()


def made() -> dict[str, bytes]:
    """Returns a small file of every kind."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        paragraph = "<w:p><w:r><w:t>Some text</w:t></w:r></w:p>"
        table = f"<w:tbl><w:tr><w:tc>{paragraph}</w:tc></w:tr></w:tbl>"
        style = '<w:style w:styleId="H"><w:name w:val="heading 1"/></w:style>'
        title = paragraph.replace("<w:p>", '<w:p><w:pPr><w:pStyle w:val="H"/></w:pPr>')
        make_docx(root / "d", (title + paragraph * 5 + table) * 20, styles=style)
        chapters = {f"c{n}.xhtml": f"<h1 id='a'>Title {n}</h1><p>Text" for n in range(9)}
        contents = "".join(nav_point(f"Title {n}", f"c{n}.xhtml#a") for n in range(9))
        make_epub(root / "e", chapters, ncx=contents)
        cells: list[dict[str, object]] = [{"cell_type": "markdown", "source": ["# T\n", "x"]}] * 9
        output = {"output_type": "stream", "text": ["out\n"]}
        cells += [{"cell_type": "code", "source": "f()", "outputs": [output]}] * 9
        book = json.dumps({"nbformat": 4, "cells": cells})
        pdf = make_pdf(
            [lines(f"Chapter {n}", "Text of it") for n in range(9)],
            outline=[(f"Chapter {n}", n) for n in range(9)],
            labels="0 <</S/r>> 4 <</S/D>>",
        )
        return {
            "made.docx": (root / "d").read_bytes(),
            "made.epub": (root / "e").read_bytes(),
            "made.pdf": pdf,
            "made.ipynb": book.encode(),
            "made.md": ("# One\n\ntext\n\n```\n# no\n```\n\nTwo\n---\n" * 40).encode(),
            "koi8.txt": ("Привет, как дела?\n" * 40).encode("koi8-r"),
            "wide.txt": ("wide text\n" * 40).encode("utf-16"),
            "made.html": b"<h1>One</h1><ul><li>a<li>b</ul><table><tr><td>1<td>2</table>" * 40,
        }


def mutate(rng: random.Random, name: str, data: bytes) -> bytes:
    """Returns a damaged copy: of the bytes, or of a member of an archive, which stays one."""
    if name.endswith((".epub", ".docx")) and rng.random() < 0.75:
        return _mutate_member(rng, data)
    return _mutate_bytes(rng, data)


def _mutate_member(rng: random.Random, data: bytes) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(target, "w") as new:
        members = old.infolist()
        texts = [m for m in members if m.filename.endswith((".xhtml", ".xml", ".opf", ".ncx"))]
        chosen = rng.choice(texts).filename
        for member in members:
            content = old.read(member)
            if member.filename == chosen:
                if rng.random() < 0.05:
                    continue
                content = _mutate_bytes(rng, content)
            new.writestr(member.filename, content)
    return target.getvalue()


def _mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16, 64))):
        rng.choice(MUTATIONS)(rng, changed)
    return bytes(changed)


def _flip(rng: random.Random, data: bytearray) -> None:
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _insert(rng: random.Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    data[at:at] = rng.choice(INTERESTING)


def _overwrite(rng: random.Random, data: bytearray) -> None:
    piece = rng.choice(INTERESTING)
    at = rng.randint(0, len(data))
    data[at : at + len(piece)] = piece


def _cut_out(rng: random.Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    del data[at : at + rng.randint(1, 200)]


def _repeat(rng: random.Random, data: bytearray) -> None:
    at = rng.randint(0, len(data))
    piece = data[at : at + rng.randint(1, 400)]
    data[at:at] = piece * rng.randint(1, 20)


def _swap_number(rng: random.Random, data: bytearray) -> None:
    """Puts another number where the file has one."""
    at = rng.randint(0, len(data))
    digits = [n for n in range(at, min(at + 400, len(data))) if 48 <= data[n] <= 57]
    if digits:
        data[digits[0]] = 48 + rng.randrange(10)


def _truncate(rng: random.Random, data: bytearray) -> None:
    if rng.random() < 0.2:
        del data[rng.randint(0, len(data)) :]


MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _insert, _overwrite, _cut_out, _repeat, _swap_number, _truncate),
)


def check(document: Document) -> None:
    """Raises AssertionError for a document that is not what `Document` promises."""
    for section in document.sections:
        assert section.text.strip()
        for marks in (section.pages, section.lines, section.cells):
            starts = [mark.start for mark in marks]
            assert starts == sorted(starts)
            assert not starts or (starts[0] == 0 and starts[-1] <= len(section.text))
    for number, section in enumerate(document.sections):
        document.locate(number, len(section.text) - 1)


def read_batch(folder: Path, tally: Tally) -> dict[Path, str]:
    """Reads a folder with one reader process; returns what is wrong, by file.

    One in which anything is wrong, or slow, is read again file by file.
    """
    began = _cpu_s()
    wrong = _read(folder, tally)
    if wrong is None and _cpu_s() - began < HANG_S:
        return {}
    found = {}
    for path in sorted(folder.iterdir()):
        began = _cpu_s()
        said = _read(path, Tally())
        seconds = _cpu_s() - began
        if seconds > tally.slowest_s:
            tally.slowest_s, tally.slowest = seconds, path.name
        if said is not None:
            found[path] = said
    if wrong is not None and not found:
        found[next(folder.iterdir())] = f"{wrong} (one of these files, beside the others)"
    return found


def _read(path: Path, tally: Tally) -> str | None:
    """Reads a file or folder; returns what is wrong with how that went, or None."""
    try:
        document = read_sources([str(path)], IngestOptions())
        check(document)
    except TsdocError as error:
        tally.outcomes["refused"] += 1
        return _crashed([error.message], tally)
    except Exception as error:  # noqa: BLE001 - what is looked for
        return f"{type(error).__name__}: {error}"
    for file in document.files:
        tally.outcomes[f"{file.kind} read"] += 1
    for skipped in document.skipped:
        tally.outcomes[f"{skipped.name.rpartition('.')[2]} {skipped.reason}"] += 1
    for warning in document.warnings:
        tally.outcomes[f"warning {warning.code}"] += 1
    return _crashed([warning.message for warning in document.warnings], tally)


def _crashed(messages: Sequence[str], tally: Tally) -> str | None:
    """Counts ends of reader processes; returns the first that was an exception of tsdoc's own."""
    own = None
    for message in messages:
        for end in ("crashed the reader", "took too long", "did not answer", "too much memory"):
            if end in message:
                tally.outcomes[f"reader process: {message[message.index(end) :][:60]}"] += 1
        if "crashed the reader" in message and "(SIG" not in message:
            own = own or message
    return own


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime + time.process_time()


def _inputs(seed: int) -> Iterator[tuple[int, str, bytes]]:
    """Yields (number, name of the original, mutated content) without end."""
    rng = random.Random(seed)
    by_kind: dict[str, list[tuple[str, bytes]]] = {}
    for name, data in originals().items():
        by_kind.setdefault(name.rpartition(".")[2], []).append((name, data))
    for number in itertools.count():
        kinds = sorted(by_kind)
        name, data = rng.choice(by_kind[kinds[number % len(kinds)]])
        yield number, name, mutate(rng, name, data)


def main() -> int:
    """Runs until the time is over; returns 1 after a failure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "tsdoc-fuzz")
    options = parser.parse_args()
    options.keep.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    end = time.monotonic() + 60 * options.minutes
    inputs = _inputs(options.seed)
    while time.monotonic() < end:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            for _ in range(BATCH):
                number, name, data = next(inputs)
                (root / f"{number}-{name}").write_bytes(data)
            for path, said in read_batch(root, tally).items():
                tally.failures.append(f"{path.name}: {said}")
                shutil.copy(path, options.keep / f"seed{options.seed}-{path.name}")
                sys.stdout.write(f"{tally.failures[-1]}\n")
                sys.stdout.flush()
    return report(tally)


def report(tally: Tally) -> int:
    """Writes what came out; returns the exit code."""
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    for outcome, count in sorted(tally.outcomes.items()):
        sys.stdout.write(f"{count:6} {outcome}\n")
    sys.stdout.write(
        f"slowest file {tally.slowest_s:.1f} s of CPU ({tally.slowest}); "
        f"largest reader process {peak >> 20} MiB; {len(tally.failures)} failures\n"
    )
    return int(bool(tally.failures) or peak > Limits().worker_bytes + OVERHEAD_BYTES)


if __name__ == "__main__":
    sys.exit(main())

"""Five passkeys in a million tokens of real text: kept by one process, answered by another.

    python -m tests.passkeys moby-dick.txt northanger-abbey.txt --profile embedded --tokens 1000000

The texts are repeated up to the wanted length, each passkey stands at its depth. One process
prefills and keeps (`tsdoc ingest`), a new one answers all questions (`tsdoc ask`). Beside it, the
same questions with an oracle selection: candidates restricted to the text around the passkey, so
that what is still wrong is the model's fault and not the selection's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from tsdoc.home import find_home
from tsdoc.ingest.options import IngestOptions
from tsdoc.models.profiles import load_profile
from tsdoc.progress import Silent
from tsdoc.session import Session, open_session
from tsdoc.settings import Settings

CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Kyoto")
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
AROUND = 512  # tokens on either side of a passkey that the oracle may select
CHARS_PER_TOKEN = 4.2  # of English prose, to begin with


@dataclass(frozen=True, slots=True, kw_only=True)
class Passkey:
    """One planted fact; `depth` is the share of the text before it."""

    city: str
    code: str
    depth: float

    @property
    def sentence(self) -> str:
        return (
            f"The pass key of the {self.city} gate is {self.code}. Remember it: "
            f"{self.code} is the pass key of the {self.city} gate."
        )

    @property
    def question(self) -> str:
        return f"What is the pass key of the {self.city} gate?"


def make_text(sources: Sequence[Path], num_chars: int, keys: Sequence[Passkey]) -> str:
    """Paragraphs of the sources, repeated up to `num_chars`, with the passkeys in between."""
    paragraphs: list[str] = []
    texts = [source.read_text("utf-8").split("\n\n") for source in sources]
    size = 0
    for paragraph in itertools.chain.from_iterable(itertools.cycle(texts)):
        if size >= num_chars:
            break
        paragraphs.append(paragraph)
        size += len(paragraph) + 2
    ends = np.cumsum([len(paragraph) + 2 for paragraph in paragraphs])
    for key in reversed(keys):
        paragraphs.insert(int(np.searchsorted(ends, key.depth * size)), key.sentence)
    return "\n\n".join(paragraphs)


def run_tsdoc(*arguments: str) -> tuple[dict[str, object], float]:
    """Runs a command in a new process; returns its JSON and the seconds it took."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tsdoc", *arguments, "--json"], capture_output=True, check=False
    )
    if done.returncode != 0:
        sys.exit(done.stdout.decode() + done.stderr.decode())
    return json.loads(done.stdout), time.perf_counter() - begun


def tokens_around(session: Session, sentence: str) -> tuple[int, int]:
    """Prompt positions around `sentence`, which occurs once."""
    arrays = session.prompt.map.arrays
    for number, section in enumerate(session.document.sections):
        at = section.text.find(sentence)
        if at < 0:
            continue
        first, last = arrays.section_tokens[number : number + 2] - arrays.section_tokens[0]
        starts = arrays.char_start[first:last]
        offset = int(arrays.content[number][0]) + at
        middle = int(arrays.section_tokens[number]) + int(np.searchsorted(starts, offset))
        return middle - AROUND, middle + AROUND
    raise LookupError(sentence)


def ask_oracle(
    document: Path, profile: str, device: str, keys: Sequence[Passkey]
) -> dict[str, str]:
    """Answers with candidates restricted to the text around the passkey, by city."""
    settings = Settings.model_validate(
        {**load_profile(profile), "engine": {"device": device}, "answer": {"max_new_tokens": 32}}
    )
    with open_session(
        settings=settings, home=find_home(), sources=[str(document)], ingest=IngestOptions(),
        reporter=Silent(), offline=True,
    ) as session:  # fmt: skip
        return {
            key.city: session.ask(
                key.question,
                lambda text: None,
                allowed=[tokens_around(session, key.sentence)],
            ).text
            for key in keys
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--profile", default="embedded")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="at least so many")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=Path("passkeys"), help="folder for the text")
    options = parser.parse_args()
    rng = random.Random(19)
    keys = [
        Passkey(city=city, code=str(rng.randrange(10_000, 100_000)), depth=depth)
        for city, depth in zip(CITIES, DEPTHS, strict=True)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    document = options.out / "text.txt"
    common = (str(document), "--profile", options.profile)
    num_chars = int(options.tokens * CHARS_PER_TOKEN)
    for _ in range(3):  # the texts' own ratio of characters to tokens is found by counting
        document.write_text(make_text(options.sources, num_chars, keys), encoding="utf-8")
        counted, _ = run_tsdoc("tokens", *common)
        total = int(counted["tokens"])  # type: ignore[call-overload]
        if total >= options.tokens:
            break
        num_chars = int(num_chars * options.tokens / total * 1.002)
    running = ("--device", options.device, "--set", f"max_prompt_tokens={total + 10_000}")
    kept, ingest_s = run_tsdoc("ingest", *common, *running)
    questions = itertools.chain.from_iterable(("-q", key.question) for key in keys)
    said, ask_s = run_tsdoc("ask", *common, *running, "--max-new-tokens", "32", *questions)
    oracle = ask_oracle(document, options.profile, options.device, keys)
    rows = [
        {
            **asdict(key),
            "answer": answer["text"],
            "right": key.code in answer["text"],
            "oracle_answer": oracle[key.city],
            "oracle_right": key.code in oracle[key.city],
            "first_token_s": answer["times_s"]["first_token"],
        }
        for key, answer in zip(keys, said["answers"], strict=True)  # type: ignore[call-overload]
    ]
    sys.stdout.write(
        json.dumps(
            {
                "profile": options.profile,
                "tokens": total,
                "ingest_s": ingest_s,
                "ingest": kept,
                "ask_s": ask_s,
                "reused_tokens": said["answers"][0]["reused_tokens"],  # type: ignore[index]
                "right": sum(row["right"] for row in rows),
                "oracle_right": sum(row["oracle_right"] for row in rows),
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()

"""Results: one line of JSON per item, written as they come; cells with intervals from them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tsdoc.errors import ResourceError, UsageError

FORMAT = "tsdoc.eval.items/1"
Z95 = 1.959964
NUM_DEPTHS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemResult:
    """One question, answered and scored.

    Attributes:
        haystack: Names the haystack: everything that decides its text and questions.
        item: Number of the question within it.
        prefill_s: Of the whole haystack.
        first_s: From the question to the first token.
        decode_s: For the tokens after the first.
        lookups: Selections asked for during decoding.
        hits: Those that the Selection Cache answered.
        sampled: Selections that were made by the key index and exactly as well.
        caught: Mean over these of the share of the exact selection's votes that the index caught;
            None where there is none.
    """

    policy: str
    task: str
    length: int
    haystack: str
    item: int
    depth: float | None
    score: float
    prediction: str
    answers: tuple[str, ...]
    prompt_tokens: int
    generated_tokens: int
    prefill_s: float
    first_s: float
    decode_s: float
    lookups: int
    hits: int
    sampled: int = 0
    caught: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The items of one policy, task and length; `low` and `high` bound the score at 95 %.

    Attributes:
        sampled: Of all items together; `caught` is the mean over these.
        depths: Score and number of items for each fifth of the haystack; score None where empty.
    """

    policy: str
    task: str
    length: int
    n: int
    score: float
    low: float
    high: float
    depths: tuple[tuple[float | None, int], ...]
    prefill_s: float
    first_s: float
    token_s: float | None
    hit_ratio: float | None
    sampled: int
    caught: float | None


class ResultFile:
    """Items kept in a file, so that an interrupted run goes on where it was.

    Args:
        path: The file; made where it is missing. None keeps nothing.
        header: What all its items have in common: model, settings, source.

    Raises:
        UsageError: the file belongs to another run, or is no such file.
        ResourceError: it cannot be written.
    """

    def __init__(self, path: Path | None, header: Mapping[str, Any]) -> None:
        self.path = path
        self.items: list[ItemResult] = []
        if path is None:
            return
        first = {"schema": FORMAT, **header}
        if path.exists() and path.stat().st_size:
            self.items = _read(path, first)
            self._append("")  # a line that a killed run did not finish ends here
        else:
            self._append(json.dumps(first))

    def answered(self, policy: str, haystack: str) -> set[int]:
        """Numbers of the questions of a haystack that a policy has answered."""
        return {i.item for i in self.items if (i.policy, i.haystack) == (policy, haystack)}

    def add(self, item: ItemResult) -> None:
        """Keeps an item."""
        self.items.append(item)
        if self.path is not None:
            self._append(json.dumps(asdict(item)))

    def _append(self, line: str) -> None:
        assert self.path is not None  # noqa: S101 - asked before
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        # One call: several processes may append to the same file.
        try:
            number = os.open(self.path, flags, 0o600)
            try:
                os.write(number, f"{line}\n".encode())
            finally:
                os.close(number)
        except OSError as error:
            raise ResourceError(
                f"results cannot be kept ({error.strerror})",
                where=str(self.path),
                hint="Keep them elsewhere with --out FILE, or not at all with --no-store.",
            ) from error


def _read(path: Path, header: Mapping[str, Any]) -> list[ItemResult]:
    try:
        lines = path.read_text("utf-8").splitlines()
        first = json.loads(lines[0])
    except (OSError, UnicodeDecodeError, ValueError, IndexError) as error:
        raise UsageError("is no file of results", where=str(path)) from error
    if first != json.loads(json.dumps(header)):
        raise UsageError(
            "holds results of another model, document or settings",
            where=str(path),
            hint="Choose another --out.",
        )
    names = {field.name for field in fields(ItemResult)}
    needed = {field.name for field in fields(ItemResult) if field.default is MISSING}
    items: dict[tuple[str, str, int], ItemResult] = {}
    for line in lines[1:]:
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # the line that a killed run did not finish
        if isinstance(entry, dict) and needed <= entry.keys() <= names:
            item = ItemResult(**{**entry, "answers": tuple(entry["answers"])})
            items[item.policy, item.haystack, item.item] = item
    return list(items.values())


def make_cells(items: Sequence[ItemResult]) -> list[Cell]:
    """Summarises items, in the order in which policies, tasks and lengths first appear."""
    groups: dict[tuple[str, str, int], list[ItemResult]] = {}
    for item in items:
        groups.setdefault((item.policy, item.task, item.length), []).append(item)
    return [_cell(key, group) for key, group in groups.items()]


def _cell(key: tuple[str, str, int], items: Sequence[ItemResult]) -> Cell:
    n = len(items)
    mean = sum(item.score for item in items) / n
    low, high = wilson(mean, n)
    haystacks = {item.haystack: item.prefill_s for item in items}
    more = sum(max(0, item.generated_tokens - 1) for item in items)
    lookups = sum(item.lookups for item in items)
    return Cell(
        policy=key[0],
        task=key[1],
        length=key[2],
        n=n,
        score=mean,
        low=low,
        high=high,
        depths=tuple(_at_depth(items, number) for number in range(NUM_DEPTHS)),
        prefill_s=sum(haystacks.values()) / len(haystacks),
        first_s=sum(item.first_s for item in items) / n,
        token_s=sum(item.decode_s for item in items) / more if more else None,
        hit_ratio=sum(item.hits for item in items) / lookups if lookups else None,
        sampled=sum(item.sampled for item in items),
        caught=mean_caught(items),
    )


def mean_caught(parts: Sequence[ItemResult | Cell]) -> float | None:
    """`caught` of several items or cells together: each selection that was sampled counts once."""
    sampled = sum(part.sampled for part in parts)
    return sum(p.sampled * p.caught for p in parts if p.caught) / sampled if sampled else None


def _at_depth(items: Sequence[ItemResult], number: int) -> tuple[float | None, int]:
    scores = [
        item.score
        for item in items
        if item.depth is not None and min(int(item.depth * NUM_DEPTHS), NUM_DEPTHS - 1) == number
    ]
    return (sum(scores) / len(scores) if scores else None, len(scores))


def wilson(mean: float, n: int) -> tuple[float, float]:
    """95 % interval of a share after Wilson (1927); for partial scores it is on the safe side."""
    if n == 0:
        return 0.0, 1.0
    z2 = Z95**2
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_difference(
    ours: Sequence[ItemResult], theirs: Sequence[ItemResult]
) -> tuple[float, float, float, int] | None:
    """Mean difference over the items both have answered, its 95 % interval, and their number.

    The interval is the normal one of paired differences, within [-1, 1]; None with fewer than two
    pairs.
    """
    other = {(item.task, item.haystack, item.item): item.score for item in theirs}
    differences = [
        item.score - other[key]
        for item in ours
        if (key := (item.task, item.haystack, item.item)) in other
    ]
    n = len(differences)
    if n < 2:
        return None
    mean = sum(differences) / n
    variance = sum((value - mean) ** 2 for value in differences) / (n - 1)
    half = Z95 * math.sqrt(variance / n)
    return mean, max(-1.0, mean - half), min(1.0, mean + half), n

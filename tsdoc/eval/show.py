"""A report as rows of a table, lines, JSON, and heat maps of length by depth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from tsdoc.eval.request import Difference, EvalReport
from tsdoc.eval.results import NUM_DEPTHS, Cell, mean_caught, wilson


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """A square of a heat map; `level` is 0 to 10, or None without items."""

    level: int | None
    text: str
    tip: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Scores of one policy and task; a row for each length, a square for each fifth of the text."""

    policy: str
    task: str
    depths: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Square, ...]], ...]


def table_rows(report: EvalReport) -> Iterator[tuple[str, ...]]:
    """Yields a row for each cell: by task and length, policies below one another."""
    order = {key: number for number, key in enumerate(_keys(report))}
    for cell in sorted(report.cells, key=lambda c: order[c.task, c.length]):
        yield (
            cell.task,
            length_name(cell.length),
            cell.policy,
            f"{100 * cell.score:.0f}",
            f"{100 * cell.low:.0f}–{100 * cell.high:.0f}",
            f"{cell.n}",
            _seconds(cell.prefill_s),
            _seconds(cell.first_s),
            "" if cell.token_s is None else f"{1000 * cell.token_s:.0f} ms",
        )


def fidelity_rows(report: EvalReport) -> Iterator[tuple[str, ...]]:
    """Yields a row for each policy and length."""
    for row in sorted(report.fidelity, key=lambda row: row.length):
        yield (
            row.policy,
            length_name(row.length),
            f"{row.n}",
            f"{row.kl:.4f}",
            f"{row.kl_high:.3f}",
            f"{100 * row.same:.0f} %",
            f"{100 * row.low:.0f}–{100 * row.high:.0f}",
            f"{row.perplexity:.2f}",
            f"{row.full_perplexity:.2f}",
            "" if row.recall is None else f"{100 * row.recall:.1f} %",
        )


def summary_lines(report: EvalReport) -> Iterator[str]:
    """Yields, for each length and policy, the score over all tasks in words.

    Then, where the document is longer than what was measured of it, how all of it is measured.
    """
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in report.cells:
        groups.setdefault((cell.length, cell.policy), []).append(cell)
    several = len({cell.policy for cell in report.cells}) > 1
    for (length, policy), cells in sorted(groups.items(), key=lambda group: group[0][0]):
        n = sum(cell.n for cell in cells)
        mean = sum(cell.score * cell.n for cell in cells) / n
        low, high = wilson(mean, n)
        where = f"{length:,} tokens" if length else "the files' lengths"
        if report.document:
            where += f" of {report.document}"
        by = f" with {policy}" if several else ""
        yield (
            f"At {where}{by}: {100 * mean:.0f} % right "
            f"(95 %: {100 * low:.0f} to {100 * high:.0f}, n = {n}){_caught(cells)}"
        )
    longest = max((length for length, _ in groups), default=0)
    if report.document and 0 < longest < report.document_tokens:
        yield (
            f"All of {report.document} is {report.document_tokens:,} tokens long, which may be "
            "harder: `--lengths all` measures that"
        )


def _caught(cells: list[Cell]) -> str:
    share = mean_caught(cells)
    if share is None:
        return ""
    return f"; the key index caught {100 * share:.1f} % of the votes that exact selections catch"


def difference_line(difference: Difference) -> str:
    """Returns how far a policy is from another in words."""
    d = difference
    return (
        f"{d.policy} against {d.other}: {100 * d.mean:+.1f} points "
        f"(95 %: {100 * d.low:+.1f} to {100 * d.high:+.1f}, n = {d.n} pairs)"
    )


def report_json(report: EvalReport) -> dict[str, object]:
    """Returns the report as JSON, with every item."""
    document = None
    if report.document is not None:
        document = {"name": report.document, "tokens": report.document_tokens}
    return {
        "model": {"name": report.model, "licence": report.licence, "window": report.window},
        "device": report.device,
        "document": document,
        "cells": [asdict(cell) for cell in report.cells],
        "differences": [asdict(difference) for difference in report.differences],
        "items": [asdict(item) for item in report.items],
        "fidelity": [asdict(row) for row in report.fidelity],
        "results": None if report.path is None else str(report.path),
    }


def heat_maps(report: EvalReport) -> list[HeatMap]:
    """Returns a map for each policy and task whose answers lie at a depth."""
    maps: dict[tuple[str, str], list[Cell]] = {}
    for cell in report.cells:
        if any(n for _, n in cell.depths):
            maps.setdefault((cell.task, cell.policy), []).append(cell)
    return [
        HeatMap(
            policy=policy,
            task=task,
            depths=tuple(_depth_name(number) for number in range(NUM_DEPTHS)),
            rows=tuple(
                (length_name(cell.length), tuple(_squares(cell)))
                for cell in sorted(cells, key=lambda cell: cell.length)
            ),
        )
        for (task, policy), cells in maps.items()
    ]


def length_name(length: int) -> str:
    """Returns "8k", "1M", "5,000", or "files" where each item has its own."""
    if not length:
        return "files"
    if length % (1 << 20) == 0:
        return f"{length >> 20}M"
    return f"{length >> 10}k" if length % 1024 == 0 else f"{length:,}"


def _squares(cell: Cell) -> Iterator[Square]:
    for number, (value, n) in enumerate(cell.depths):
        if value is None:
            yield Square(level=None, text="", tip="no question here")
            continue
        low, high = wilson(value, n)
        yield Square(
            level=round(10 * value),
            text=f"{100 * value:.0f}",
            tip=f"{100 * value:.0f} % right at {_depth_name(number)} of {cell.length:,} tokens\n"
            f"95 %: {100 * low:.0f} to {100 * high:.0f}, n = {n}",
        )


def _depth_name(number: int) -> str:
    step = 100 // NUM_DEPTHS
    return f"{number * step}–{(number + 1) * step} %"


def _keys(report: EvalReport) -> list[tuple[str, int]]:
    return list(dict.fromkeys((cell.task, cell.length) for cell in report.cells))


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"

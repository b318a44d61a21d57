"""How much of exact selections' votes the key index catches, on a document that is in the store.

    TSDOC_HOME=… python -m tests.index_share SOURCE... --profile embedded [--candidates 2 3]

Every selection of question and answer is made both ways, of short prompts too, which otherwise are
selected from exactly. Prints the share of the votes for the exactly selected tokens that the
index's selections have: mean, worst layer, worst selection. With `--floor` the same questions are
asked once more, each layer's first selection made both ways: those below the floor are counted, and
how many selections they made by the index after that. On a GPU decode steps alone go by the index;
they run without a graph here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch

from tsdoc.engine.engine import Engine
from tsdoc.home import find_home
from tsdoc.ingest.options import IngestOptions
from tsdoc.kernels.index import QueryMoments
from tsdoc.kernels.index_use import IndexConfig, IndexWatch, Selecting
from tsdoc.models.profiles import load_profile
from tsdoc.progress import Silent
from tsdoc.session import Session, open_session
from tsdoc.settings import Settings

QUESTIONS = (
    "Who is the main character, and where does he or she live?",
    "What happens in the third chapter?",
    "How often is the word letter used, and by whom?",
)


@contextmanager
def every_step_sampled() -> Iterator[None]:
    """Makes every step of a GPU's answers both ways, as the first of each is."""
    from tsdoc.kernels.triton_decode import DecodeSteps

    run = DecodeSteps.run

    def run_sampled(
        self: DecodeSteps, step: Callable[[torch.Tensor], torch.Tensor], token: int
    ) -> torch.Tensor:
        self._is_sampled = self._exact is not None
        return run(self, step, token)

    with patch.object(DecodeSteps, "run", run_sampled):
        yield


class Always(IndexConfig):
    """An index that is used for short prompts too."""

    def applies(self, config: Selecting, num_tokens: int) -> bool:
        return num_tokens > self.candidates * config.top_k


class Shares(IndexWatch):
    """Keeps every share, by layer; with `is_strict` a layer below the floor is not trusted."""

    def __init__(
        self, config: IndexConfig, moments: QueryMoments, *, is_strict: bool = False
    ) -> None:
        super().__init__(config, moments)
        self.by_layer: dict[int, list[float]] = {}
        self._is_strict = is_strict

    def is_trusted(self, layer: int) -> bool:
        return not self._is_strict or super().is_trusted(layer)

    def note(self, layer: int, share: float) -> None:
        self.by_layer.setdefault(layer, []).append(share)
        super().note(layer, share)

    def summary(self) -> dict[str, object]:
        """Figures over all selections, and of the layer where the index catches least."""
        means = {layer: sum(s) / len(s) for layer, s in self.by_layer.items()}
        worst = min(means, key=lambda layer: means[layer])
        return {
            "candidates": self.config.few,
            "selections": sum(len(s) for s in self.by_layer.values()),
            "mean": round(sum(means.values()) / len(means), 4),
            "worst_layer": round(means[worst], 4),
            "which": worst,
            "worst_selection": round(min(min(s) for s in self.by_layer.values()), 4),
        }

    def distrusted(self) -> dict[str, object]:
        """Layers below the floor, and how many selections by the index they made afterwards."""
        known = IndexWatch.is_trusted
        below = {layer: s for layer, s in self.by_layer.items() if not known(self, layer)}
        floor = self.config.floor
        first = {
            layer: next(n for n in range(1, len(s) + 1) if sum(s[:n]) / n < floor)
            for layer, s in below.items()
        }
        return {
            "floor": floor,
            "layers_below": sorted(below),
            "by_the_index_after_that": sum(len(below[layer]) - n for layer, n in first.items()),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--profile", default="embedded")
    parser.add_argument("--candidates", type=float, nargs="+", default=[3.0])
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--floor", type=float)
    options = parser.parse_args()
    settings = Settings.model_validate(
        {
            **load_profile(options.profile),
            "answer": {"max_new_tokens": options.tokens, "evidence": 0},
            # So that short prompts have an index too.
            "engine": {"theta": None, "index": "int4", "index_candidates": 1},
        }
    )
    with open_session(
        settings=settings, home=find_home(), sources=options.sources, ingest=IngestOptions(),
        reporter=Silent(), offline=True,
    ) as session:  # fmt: skip
        prepared = session.prepare()
        engine = session._engines.make(len(session.prompt.ids) + 1000)
        for candidates in options.candidates:
            shares = Shares(make_config(candidates), engine.query_moment)
            on_gpu = engine.backend.device.type == "cuda"
            with every_step_sampled() if on_gpu else nullcontext():
                ask(session, engine, shares)
            show({"tokens": prepared.prompt_tokens, **shares.summary()})
            if options.floor is not None and not on_gpu:
                config = make_config(candidates, floor=options.floor)
                strict = Shares(config, engine.query_moment, is_strict=True)
                ask(session, engine, strict)
                show(strict.distrusted())


def make_config(candidates: float, floor: float = 0.95) -> Always:
    """Whole multiples of top_k on a GPU."""
    whole = max(1, int(candidates))
    return Always(candidates=whole, few=candidates, sample=1, floor=floor)


def show(row: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def ask(session: Session, engine: Engine, watch: IndexWatch) -> None:
    """Asks all questions by an index that `watch` looks at."""
    engine.index = watch
    for question in QUESTIONS:
        session.ask(question, lambda text: None)


if __name__ == "__main__":
    main()

"""How much of exact selections' votes the key index catches, on a document that is in the store.

    TSDOC_HOME=… python -m tests.index_share SOURCE... --profile embedded [--candidates 2 3]

Every selection of question and answer is made both ways. Prints the share of the votes for the
exactly selected tokens that the index's selections have: mean, worst layer, worst selection.
"""

from __future__ import annotations

import argparse
import json
import sys

from tsdoc.home import find_home
from tsdoc.ingest.options import IngestOptions
from tsdoc.kernels.index_use import IndexConfig, IndexWatch
from tsdoc.models.profiles import load_profile
from tsdoc.progress import Silent
from tsdoc.session import open_session
from tsdoc.settings import Settings

QUESTIONS = (
    "Who is the main character, and where does he or she live?",
    "What happens in the third chapter?",
    "How often is the word letter used, and by whom?",
)


class Shares(IndexWatch):
    """Keeps every share, by layer."""

    def __init__(self, config: IndexConfig) -> None:
        super().__init__(config)
        self.by_layer: dict[int, list[float]] = {}

    def note(self, layer: int, share: float) -> None:
        self.by_layer.setdefault(layer, []).append(share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--profile", default="embedded")
    parser.add_argument("--candidates", type=int, nargs="+", default=[2])
    parser.add_argument("--tokens", type=int, default=8)
    options = parser.parse_args()
    settings = Settings.model_validate(
        {
            **load_profile(options.profile),
            "answer": {"max_new_tokens": options.tokens, "evidence": 0},
            "engine": {"theta": None, "index": "int4"},
        }
    )
    with open_session(
        settings=settings, home=find_home(), sources=options.sources, ingest=IngestOptions(),
        reporter=Silent(), offline=True,
    ) as session:  # fmt: skip
        prepared = session.prepare()
        engine = session._engines.make(len(session.prompt.ids) + 1000)
        for candidates in options.candidates:
            shares = Shares(IndexConfig(candidates=candidates, sample=1))
            engine.index = shares
            for question in QUESTIONS:
                session.ask(question, lambda text: None)
            means = {layer: sum(s) / len(s) for layer, s in shares.by_layer.items()}
            worst = min(means, key=lambda layer: means[layer])
            row = {
                "tokens": prepared.prompt_tokens,
                "candidates": candidates,
                "selections": sum(len(s) for s in shares.by_layer.values()),
                "mean": round(sum(means.values()) / len(means), 4),
                "worst_layer": round(means[worst], 4),
                "which": worst,
                "worst_selection": round(min(min(s) for s in shares.by_layer.values()), 4),
            }
            sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()

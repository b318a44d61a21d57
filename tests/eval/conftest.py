from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.session.conftest import Recorder, home, model_directory
from tsdoc.eval.evaluate import evaluate
from tsdoc.eval.request import EvalReport, EvalRequest
from tsdoc.eval.run import OnKept
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.prompt.chat import ChatTemplate, load_template
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.settings import Settings

__all__ = ["home", "model_directory"]

SMALL: dict[str, dict[str, Any]] = {
    "selection": {"n_init": 16, "n_local": 64, "top_k": 64, "chunk_size": 128},
    "engine": {
        "prefill_block": 256,
        "question_chunk_size": 64,
        "reread_tokens": 0,
        "device": "cpu",
    },
}


@pytest.fixture(scope="session")
def tokenizer(model_directory: Path) -> TextTokenizer:
    return TextTokenizer(model_directory)


@pytest.fixture(scope="session")
def template(model_directory: Path, tokenizer: TextTokenizer) -> ChatTemplate:
    return load_template(model_directory, tokenizer, home=None)


@pytest.fixture
def run_eval(home: Home, model_directory: Path) -> Callable[..., EvalReport]:
    """Evaluates the small random model; keyword arguments are the request's."""

    def run(
        reporter: Recorder | None = None,
        *,
        kv_dtype: str = "bfloat16",
        on_kept: OnKept = lambda kept, total: None,
        **request: Any,
    ) -> EvalReport:
        exact = {"kv_dtype": kv_dtype, "compute_dtype": "float32", "decode_weights": kv_dtype}
        groups = {**SMALL, "engine": {**SMALL["engine"], **exact}}
        settings = Settings.model_validate({**groups, "model": {"source": str(model_directory)}})
        return evaluate(
            EvalRequest(**{"items": 2, "haystacks": 1, **request}),
            settings=settings,
            home=home,
            ingest=IngestOptions(),
            reporter=reporter or Recorder(),
            offline=True,
            on_kept=on_kept,
        )

    return run

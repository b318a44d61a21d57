"""The packaged model with full attention says what transformers says on the same items."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.session.conftest import Recorder
from tsdoc.eval.evaluate import evaluate
from tsdoc.eval.plan import Plan
from tsdoc.eval.request import EvalRequest
from tsdoc.eval.tasks import find_task
from tsdoc.home import Home
from tsdoc.ingest.options import IngestOptions
from tsdoc.models.locate import LocatedModel
from tsdoc.prompt.chat import load_template
from tsdoc.prompt.tokenizer import TextTokenizer
from tsdoc.settings import Settings

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]


def test_full_attention_says_what_transformers_says(
    packaged_model: Callable[[str], LocatedModel], tmp_path: Path
) -> None:
    directory = packaged_model("tiny").directory
    tasks = ("niah_single_2", "passkey")
    engine = {"kv_dtype": "float32", "compute_dtype": "float32", "device": "cpu"}
    report = evaluate(
        EvalRequest(tasks=tasks, lengths=(700,), items=2, haystacks=1, policies=("full",)),
        settings=Settings.model_validate({"model": {"source": str(directory)}, "engine": engine}),
        home=Home(tmp_path),
        ingest=IngestOptions(),
        reporter=Recorder(),
        offline=True,
    )
    tokenizer = TextTokenizer(directory)
    template = load_template(directory, tokenizer, home=None)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    plan = Plan(
        tasks=tuple(map(find_task, tasks)), lengths=(700,), items=2, haystacks=1, seed=0,
        backgrounds=(), document=(),
    )  # fmt: skip
    said = {}
    for job in plan.jobs():
        haystack = job.build(tokenizer, template)
        for number, question in enumerate(haystack.questions):
            ids = np.concatenate((haystack.ids, haystack.question_ids[number]))
            prompt = torch.from_numpy(ids.astype(np.int64))[None]
            with torch.no_grad():
                out = model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    do_sample=False,
                    max_new_tokens=question.max_new_tokens,
                )
            said[job.name, number] = tokenizer.decode(out[0, prompt.shape[1] :].numpy())
    assert {(item.haystack, item.item): item.prediction for item in report.items} == said
    print(said)  # noqa: T201 - shown with -s, for the record

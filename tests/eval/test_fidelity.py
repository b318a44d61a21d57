"""Divergence from full attention: none where everything is seen, and what is left out counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.eval.test_policies import IDS, context, ignore, model
from tsdoc.errors import UsageError
from tsdoc.eval.policies import ModelContext, parse_policy
from tsdoc.eval.policies.attending import PolicyRun
from tsdoc.eval.policies.recall import Recall
from tsdoc.eval.request import EvalReport
from tsdoc.settings import SelectionSettings

__all__ = ["context", "model"]

Run = Callable[..., EvalReport]


@pytest.mark.parametrize("policy", ["full", "snapkv:top_k=3000", "tokenselect:top_k=3000"])
def test_fed_tokens_give_the_logits_of_transformers(
    policy: str, context: ModelContext, model: torch.nn.Module
) -> None:
    run = parse_policy(policy, context.settings).start(context)
    run.prefill(IDS[:300], ignore)
    followed = run.follow(IDS[300:312])
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS[:312].astype("int64"))[None]).logits[0, 300:]
    torch.testing.assert_close(followed.logits, expected, rtol=2e-4, atol=2e-4)


def test_a_policy_that_sees_everything_does_not_diverge(run_eval: Run) -> None:
    report = run_eval(
        fidelity=True,
        lengths=(700, 900),
        policies=("full", "tokenselect:top_k=4096", "tokenselect", "streaming_llm"),
        kv_dtype="float32",
    )
    rows = {(row.policy, row.length): row for row in report.fidelity}
    assert len(rows) == 8
    for length in (700, 900):
        for policy in ("full", "tokenselect:top_k=4096"):
            row = rows[policy, length]
            assert (row.n, row.same) == (64, 1.0)
            assert abs(row.kl) < 1e-5
            assert row.perplexity == pytest.approx(row.full_perplexity, rel=1e-4)
        bounded = rows["tokenselect", length]
        assert bounded.kl > 1e-3
        assert bounded.recall is not None
        assert 0.1 < bounded.recall < 1.0
        assert len(bounded.recall_by_layer) == 3
        assert rows["tokenselect:top_k=4096", length].recall == 1.0
        assert rows["streaming_llm", length].recall is None


def test_beyond_the_window_there_is_nothing_to_compare_with(run_eval: Run) -> None:
    with pytest.raises(UsageError, match="no measure beyond"):
        run_eval(fidelity=True, lengths=(5000,))


@pytest.mark.parametrize("sets", ["one", "per_kv_head"])
def test_recall_is_the_attention_on_what_is_selected(context: ModelContext, sets: str) -> None:
    """More is covered with a larger budget, and all of it when everything is selected."""
    covered = []
    for top_k in (8, 64, 300):
        probe = Recall()
        budget = SelectionSettings(n_init=8, n_local=32, top_k=top_k, chunk_size=32, sets=sets)  # type: ignore[arg-type]
        run = PolicyRun(context, probe, budget)
        run.prefill(IDS[:330], ignore)
        run.follow(IDS[330:336])
        covered.append(probe.by_layer())
    for few, more, everything in zip(*covered, strict=True):
        assert 0 < few < more < everything == 1.0

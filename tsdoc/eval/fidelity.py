"""How close a policy stays to full attention on real text, token by token, within the window.

A text is prefilled under each policy; what follows in it is then fed token by token, as an answer
is generated. Compared are the distributions of each next token: Kullback-Leibler divergence,
whether the likeliest token is the same, and the likelihood of the text itself.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tsdoc.errors import UsageError
from tsdoc.eval.background import Kind, make_background
from tsdoc.eval.policies import ModelContext, PolicyChoice, parse_policy
from tsdoc.eval.results import wilson
from tsdoc.progress import Reporter
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.prompt.tokenizer import Ids, TextTokenizer

if TYPE_CHECKING:
    import torch

FOLLOWED = 64  # tokens of each text that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """A policy at a length.

    Attributes:
        n: Tokens compared.
        kl: Mean divergence of the policy from full attention, in nats.
        kl_high: Its 95th percentile.
        same: Share of tokens whose likeliest successor is the same, with its 95 % interval.
        perplexity: Of the text under the policy.
        full_perplexity: Under full attention.
        recall: Share of the true attention that falls on tokens the selection attends to; None for
            policies that are not TokenSelect's.
        recall_by_layer: The same for each layer.
        hit_ratio: Selections answered by the Selection Cache.
    """

    policy: str
    length: int
    n: int
    kl: float
    kl_high: float
    same: float
    low: float
    high: float
    perplexity: float
    full_perplexity: float
    recall: float | None
    recall_by_layer: tuple[float, ...]
    hit_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text cut in two: what is prefilled, and what is followed token by token."""

    before: Ids
    after: Ids


def measure_fidelity(
    choices: Sequence[PolicyChoice],
    lengths: Sequence[int],
    texts: Callable[[int], Sequence[Text]],
    context: ModelContext,
    reporter: Reporter,
) -> list[Fidelity]:
    """Compares each policy with full attention at each length.

    Raises:
        UsageError: a length is outside the model's trained window.
        ResourceError: memory does not suffice.
    """
    window = context.config.window
    if max(lengths) > window:
        raise UsageError(
            f"full attention is no measure beyond the model's trained window of {window:,} tokens",
            hint="Choose shorter --lengths.",
        )
    reporter.start("fidelity", len(lengths) * (len(choices) + 1), "runs")
    results, done = [], 0
    for length in lengths:
        made = texts(length)
        full = parse_policy("full", context.settings).start(context)
        expected = []
        for text in made:
            full.prefill(text.before, _ignore)
            expected.append(full.follow(text.after).logits)
        done += 1
        reporter.advance(done)
        for choice in choices:
            results.append(_measure(choice, length, made, expected, context))
            done += 1
            reporter.advance(done)
    reporter.finish()
    return results


def make_texts(
    length: int,
    count: int,
    kinds: Sequence[Kind],
    document: Sequence[str],
    *,
    seed: int,
    tokenizer: TextTokenizer,
    template: ChatTemplate,
) -> list[Text]:
    """Texts of `length` tokens each, the template's head included.

    Raises:
        UsageError: the document is shorter.
    """
    texts = []
    for number in range(count):
        rng = random.Random(f"fidelity/{seed}/{length}/{number}")  # noqa: S311 - to be repeatable
        parts: list[Ids] = [template.head_ids]
        missing = length - template.head_ids.size
        for piece in make_background(kinds[number % len(kinds)], rng, document):
            if missing <= 0:
                break
            ids, _ = tokenizer.encode(piece)
            parts.append(ids)
            missing -= ids.size
        if missing > 0:
            raise UsageError(f"the source is shorter than {length:,} tokens")
        ids = np.concatenate(parts)[:length]
        texts.append(Text(before=ids[:-FOLLOWED], after=ids[-FOLLOWED:]))
    return texts


def _measure(
    choice: PolicyChoice,
    length: int,
    texts: Sequence[Text],
    expected: Sequence[torch.Tensor],
    context: ModelContext,
) -> Fidelity:
    import torch

    contender = choice.start(context)
    divergences, same, ours_nll, full_nll, lookups, hits = [], 0, [], [], 0, 0
    for text, full in zip(texts, expected, strict=True):
        contender.prefill(text.before, _ignore)
        followed = contender.follow(text.after)
        lookups, hits = lookups + followed.lookups, hits + followed.hits
        p, q = full.log_softmax(dim=-1), followed.logits.log_softmax(dim=-1)
        divergences.append((p.exp() * (p - q)).sum(dim=-1))
        same += int((p.argmax(dim=-1) == q.argmax(dim=-1)).sum())
        # The logits of a token are about its successor.
        after = torch.from_numpy(text.after[1:].astype(np.int64)).unsqueeze(1)
        ours_nll.append(-q[:-1].gather(1, after))
        full_nll.append(-p[:-1].gather(1, after))
    kl = torch.cat(divergences)
    low, high = wilson(same / kl.numel(), kl.numel())
    recalls = _recall(choice, texts, context)
    return Fidelity(
        policy=choice.label,
        length=length,
        n=kl.numel(),
        kl=float(kl.mean()),
        kl_high=float(kl.quantile(0.95)),
        same=same / kl.numel(),
        low=low,
        high=high,
        perplexity=math.exp(float(torch.cat(ours_nll).mean())),
        full_perplexity=math.exp(float(torch.cat(full_nll).mean())),
        recall=sum(recalls) / len(recalls) if recalls else None,
        recall_by_layer=recalls,
        hit_ratio=hits / lookups if lookups else None,
    )


def _recall(
    choice: PolicyChoice, texts: Sequence[Text], context: ModelContext
) -> tuple[float, ...]:
    """By layer, what TokenSelect's selection would attend to of full attention's own mass."""
    if choice.selection is None:
        return ()
    from tsdoc.eval.policies.attending import PolicyRun
    from tsdoc.eval.policies.recall import Recall

    budget = choice.selection
    probe = Recall()
    run = PolicyRun(context, probe, budget)
    for text in texts:
        run.prefill(text.before, _ignore)
        run.follow(text.after)
    return probe.by_layer()


def _ignore(done: int) -> None:
    """Takes progress that is not shown."""

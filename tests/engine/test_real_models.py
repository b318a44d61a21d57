"""The packaged models against transformers: float32 logits, greedy tokens, bfloat16 K and V."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers

from tests.tiny_models import memory_piece
from tsdoc.engine.decoder import Decoder
from tsdoc.engine.engine import Engine
from tsdoc.engine.generate import GenerationConfig
from tsdoc.engine.selection_cache import SelectionCache
from tsdoc.kernels.selection import SelectionConfig
from tsdoc.kernels.torch_cache import TorchBackend
from tsdoc.models.locate import LocatedModel
from tsdoc.models.weights import open_weights
from tsdoc.prompt.tokenizer import TextTokenizer

pytestmark = [pytest.mark.model, pytest.mark.timeout(3000)]

NUM_PROMPTS = 20
NUM_NEW = 8
COVERING = SelectionConfig(top_k=6000, chunk_size=128)


@dataclass
class Pair:
    weights: Mapping[str, torch.Tensor]
    engine: Engine
    oracle: transformers.PreTrainedModel
    prompts: list[np.ndarray]


@pytest.fixture(
    scope="module",
    params=["tiny", pytest.param("embedded", marks=pytest.mark.slow)],
)
def pair(
    request: pytest.FixtureRequest, packaged_model: Callable[[str], LocatedModel]
) -> Iterator[Pair]:
    model = packaged_model(request.param)
    weights = open_weights(model.directory)
    decoder = Decoder(model.config, weights, torch.float32)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(
        model.directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    yield Pair(
        weights=weights,
        engine=Engine(decoder, COVERING, max_tokens=4096, question_chunk_size=128),
        oracle=oracle,
        prompts=make_prompts(TextTokenizer(model.directory)),
    )


def make_prompts(tokenizer: TextTokenizer) -> list[np.ndarray]:
    """What tsdoc is for: a text, a question that it answers, and the answer's beginning."""
    rng = random.Random(0)
    people = ["Anna", "Boris", "Chidi", "Dora", "Emil", "Farah", "Goro", "Hanna"]
    places = ["Lisbon", "Oslo", "Nairobi", "Quito", "Kyoto", "Tunis", "Perth", "Lima"]
    things = ["violin", "map", "lantern", "letter", "bicycle", "camera", "compass", "kettle"]
    prompts = []
    for _ in range(NUM_PROMPTS):
        rng.shuffle(people)
        rng.shuffle(places)
        rng.shuffle(things)
        coins = rng.sample(range(10, 90), len(people))
        facts = list(zip(people, places, things, coins, strict=True))
        text = "\n".join(
            f"{who} went to {where} and bought a {what} for {price} coins."
            for who, where, what, price in facts
        )
        who, *_ = rng.choice(facts)
        text += f"\nQuestion: Where did {who} go, what did {who} buy, and for how many coins?"
        ids, _ = tokenizer.encode(f"{text}\nAnswer: {who} went to")
        prompts.append(ids)
    return prompts


def run(
    pair: Pair, prompt: np.ndarray, kv_dtype: str, follow: list[int] | None = None
) -> tuple[list[int], torch.Tensor]:
    """Goes on from a prompt for NUM_NEW steps, greedily or along the tokens of `follow`.

    Returns:
        The most likely token of each step, and the logits [NUM_NEW, vocab_size] behind them.
    """
    engine = pair.engine
    piece = memory_piece(engine, len(prompt) + NUM_NEW, kv_dtype=kv_dtype)
    split = len(prompt) // 2
    engine.prefill([piece], prompt[:split], 0, prefill_block=256, on_block=lambda end: None)
    cache = engine.cache([piece])
    ids, at = prompt[split:].tolist(), split
    tokens: list[int] = []
    rows: list[torch.Tensor] = []
    while len(tokens) < NUM_NEW:
        chunk = [(at, at + len(ids))]
        logits = engine.runner.run_chunks(cache, torch.tensor(ids), at, chunk, need_logits=True)
        assert logits is not None
        at += len(ids)
        rows.append(logits)
        tokens.append(int(logits.argmax()))
        ids = [tokens[-1] if follow is None else follow[len(tokens) - 1]]
    return tokens, torch.stack(rows)


def oracle_greedy(pair: Pair, prompt: np.ndarray) -> list[int]:
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    with torch.no_grad():
        out = pair.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def test_float32_logits_and_greedy_tokens_equal_transformers(pair: Pair) -> None:
    config = GenerationConfig(
        max_new_tokens=NUM_NEW, stop_ids=frozenset(), question_chunk_size=128, theta=0.9
    )
    for prompt in pair.prompts[:4]:
        expected_tokens = oracle_greedy(pair, prompt)
        tokens, logits = run(pair, prompt, "float32")
        assert tokens == expected_tokens
        piece = memory_piece(pair.engine, len(prompt) + NUM_NEW)
        assert list(pair.engine.generate([piece], prompt.tolist(), 0, config)) == tokens
        sequence = np.concatenate((prompt, np.array(tokens[:-1], dtype=np.int32)))
        with torch.no_grad():
            ids = torch.from_numpy(sequence.astype(np.int64))[None]
            expected = pair.oracle(ids).logits[0, len(prompt) - 1 :]
        assert (logits - expected).abs().max() <= 1e-3


def test_bfloat16_keys_and_values_keep_the_greedy_tokens(
    pair: Pair, record_property: Callable[[str, object], None]
) -> None:
    divergences = []
    for prompt in pair.prompts:
        tokens, logits = run(pair, prompt, "float32")
        rounded_tokens, rounded_logits = run(pair, prompt, "bfloat16", tokens)
        assert rounded_tokens == tokens
        exact = torch.log_softmax(logits, dim=-1)
        rounded = torch.log_softmax(rounded_logits, dim=-1)
        divergences.append((exact.exp() * (exact - rounded)).sum(-1).mean())
    mean = float(torch.stack(divergences).mean())
    record_property("mean_kl", mean)
    assert mean <= 1e-3


def test_products_in_bfloat16_keep_the_clear_tokens(
    pair: Pair, record_property: Callable[[str, object], None]
) -> None:
    """Weights and what they multiply, K and V and attention: as on a CPU with tiles for it."""
    config, dtype = pair.engine.runner.decoder.config, torch.bfloat16
    engine = Engine(
        Decoder(config, pair.weights, dtype),
        COVERING,
        max_tokens=4096,
        question_chunk_size=128,
        backend=TorchBackend(num_kv_heads=config.num_kv_heads, dtype=dtype),
    )
    half, divergences = dataclasses.replace(pair, engine=engine), []
    for prompt in pair.prompts:
        tokens, logits = run(pair, prompt, "float32")
        _, rounded_logits = run(half, prompt, "bfloat16", tokens)
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 0.5
        assert torch.equal(rounded_logits.argmax(-1)[clear], torch.tensor(tokens)[clear])
        whole, rounded = (torch.log_softmax(rows, dim=-1) for rows in (logits, rounded_logits))
        divergences.append((whole.exp() * (whole - rounded)).sum(-1).mean())
    mean = float(torch.stack(divergences).mean())
    record_property("mean_kl", mean)
    assert mean <= 2e-3


def test_weights_in_bfloat16_keep_the_clear_tokens_of_steps(
    pair: Pair, record_property: Callable[[str, object], None]
) -> None:
    exact = pair.engine
    assert isinstance(exact.runner.decoder, Decoder)
    narrow = Engine(
        exact.runner.decoder,
        COVERING,
        max_tokens=4096,
        question_chunk_size=128,
        steps=exact.runner.decoder.narrowed(),
    )

    def by_steps(engine: Engine, prompt: np.ndarray, follow: list[int]) -> torch.Tensor:
        piece = memory_piece(engine, len(prompt) + NUM_NEW)
        engine.prefill([piece], prompt[:-1], 0, prefill_block=256, on_block=lambda end: None)
        cache, reuse = engine.cache([piece]), SelectionCache(0.9)
        tokens = [int(prompt[-1]), *follow[:-1]]
        return torch.stack(
            [
                engine.runner.run_step(cache, token, at, reuse)
                for at, token in enumerate(tokens, len(prompt) - 1)
            ]
        )

    divergences = []
    for prompt in pair.prompts[:8]:
        tokens, logits = run(pair, prompt, "float32")
        assert torch.allclose(by_steps(exact, prompt, tokens), logits, atol=1e-3)
        found = by_steps(narrow, prompt, tokens)
        best = logits.topk(2).values
        clear = best[:, 0] - best[:, 1] > 0.5
        assert torch.equal(found.argmax(-1)[clear], torch.tensor(tokens)[clear])
        whole, rounded = torch.log_softmax(logits, dim=-1), torch.log_softmax(found, dim=-1)
        divergences.append((whole.exp() * (whole - rounded)).sum(-1).mean())
    mean = float(torch.stack(divergences).mean())
    record_property("mean_kl", mean)
    assert mean <= 1e-3

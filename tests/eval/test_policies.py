"""Policies on a small random model: against transformers, full attention, and naive arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.eval.conftest import SMALL
from tests.tiny_models import make_config, make_oracle, token_ids
from tsdoc.engine.decoder import Decoder
from tsdoc.engine.forward import chunk_bounds
from tsdoc.errors import UsageError
from tsdoc.eval.policies import POLICIES, ModelContext, parse_policy
from tsdoc.eval.policies.attending import PolicyRun, Scene
from tsdoc.eval.policies.blocks import block_range
from tsdoc.eval.policies.cache import PolicyCache
from tsdoc.eval.policies.full import FullAttention
from tsdoc.eval.policies.infllm import InfLLM
from tsdoc.eval.policies.oracle import Oracle
from tsdoc.eval.policies.quest import QuestPages
from tsdoc.eval.policies.self_extend import SelfExtend
from tsdoc.eval.policies.snapkv import SnapKV
from tsdoc.eval.policies.streaming import StreamingLLM
from tsdoc.kernels.rope import make_rope_table, rotate
from tsdoc.kernels.selection import selection_query
from tsdoc.kernels.torch_cache import TorchBackend
from tsdoc.models.config import ModelConfig
from tsdoc.prompt.chat import ChatTemplate
from tsdoc.settings import SelectionSettings, Settings

OTHERS = [name for name, policy in POLICIES.items() if policy.made_of]
SEEING_ALL = {
    "full": "full",
    "full_ntk": "full_ntk",
    "oracle": "oracle:top_k=3000",
    "oracle sharing": "oracle:top_k=3000,share=4",
    "streaming_llm": "streaming_llm:top_k=3000",
    "infllm": "infllm:n_local=3000",
    "quest": "quest:top_k=3000",
    "snapkv": "snapkv:top_k=3000",
    "self_extend": "self_extend:neighbours=32",
    "tokenselect": "tokenselect:top_k=3000",
    "head_vote": "head_vote:top_k=3000",
}
KV, HEADS, DIM = 2, 6, 16


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_oracle("qwen2")


@pytest.fixture
def context(model: transformers.PreTrainedModel, template: ChatTemplate) -> ModelContext:
    config = make_config(model)
    engine = {**SMALL["engine"], "kv_dtype": "float32", "prefill_block": 256}
    selection = {"n_init": 8, "n_local": 32, "top_k": 32, "chunk_size": 32}
    return ModelContext(
        config=config,
        settings=Settings.model_validate({"engine": engine, "selection": selection}),
        decoder=Decoder(config, model.state_dict(), torch.float32),
        backend=TorchBackend(num_kv_heads=config.num_kv_heads),
        template=template,
        max_tokens=4000,
    )


IDS = token_ids(420)
QUESTIONS = (IDS[390:420], IDS[395:407])


@pytest.fixture(scope="module")
def expected_answers(model: transformers.PreTrainedModel) -> list[list[int]]:
    """Six greedy tokens behind each question."""
    answers = []
    for question in QUESTIONS:
        text = np.concatenate((IDS[:390], question)).tolist()
        for _ in range(6):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        answers.append(text[-6:])
    return answers


def ignore(done: int) -> None:
    pass


@pytest.mark.parametrize("policy", SEEING_ALL.values(), ids=SEEING_ALL)
def test_a_policy_that_sees_everything_answers_as_transformers(
    policy: str, context: ModelContext, expected_answers: list[list[int]]
) -> None:
    run = parse_policy(policy, context.settings).start(context)
    run.prefill(IDS[:390], ignore)
    for question, expected in zip(QUESTIONS, expected_answers, strict=True):
        assert list(run.answer(question, 6).tokens) == expected


@pytest.mark.parametrize(
    "policy", [p for p in SEEING_ALL.values() if "head_vote" not in p and "tokens" not in p]
)
def test_its_logits_are_those_of_transformers(
    policy: str, context: ModelContext, model: transformers.PreTrainedModel
) -> None:
    ids = token_ids(300)
    run = parse_policy(policy, context.settings).start(context)
    assert isinstance(run, PolicyRun)
    run.prefill(ids[:256], ignore)
    logits = run.forward(ids[256:], 256, [(256, 300)], num_logits=44)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 256:]
    torch.testing.assert_close(logits, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("policy", OTHERS)
def test_questions_do_not_disturb_each_other(policy: str, context: ModelContext) -> None:
    ids = token_ids(480)
    questions = [ids[400:440], ids[440:452], ids[400:440]]
    run = parse_policy(policy, context.settings).start(context)
    run.prefill(ids[:400], ignore)
    first, _, again = (run.answer(question, 8).tokens for question in questions)
    assert first == again
    fresh = parse_policy(policy, context.settings).start(context)
    fresh.prefill(ids[:400], ignore)
    assert fresh.answer(questions[0], 8).tokens == first


@pytest.mark.parametrize("policy", OTHERS)
def test_another_haystack_starts_afresh(policy: str, context: ModelContext) -> None:
    ids, other = token_ids(460), token_ids(460, seed=1)
    run = parse_policy(policy, context.settings).start(context)
    run.prefill(other[:440], ignore)
    run.answer(other[440:], 4)
    run.prefill(ids[:400], ignore)
    fresh = parse_policy(policy, context.settings).start(context)
    fresh.prefill(ids[:400], ignore)
    assert run.answer(ids[400:430], 8).tokens == fresh.answer(ids[400:430], 8).tokens


def test_an_answer_after_tokenselects_prefill_reads_its_keys(context: ModelContext) -> None:
    ids = token_ids(430)
    both = parse_policy("full:prefill=tokenselect", context.settings)
    run = both.start(context)
    seeing_all = dataclasses.replace(
        context, settings=context.settings.model_copy(
            update={"selection": SelectionSettings(n_init=8, n_local=32, top_k=3000, chunk_size=32)}
        ),
    )  # fmt: skip
    covering = both.start(seeing_all)
    full = parse_policy("full", context.settings).start(context)
    replies = []
    for contender in (run, covering, full):
        contender.prefill(ids[:400], ignore)
        replies.append(contender.answer(ids[400:], 10).tokens)
    assert replies[1] == replies[2]
    assert replies[0] != replies[2]


@pytest.mark.gpu
@pytest.mark.parametrize("policy", [*OTHERS, "oracle:share=4", "full:prefill=tokenselect"])
def test_policies_answer_alike_on_a_gpu(
    policy: str, context: ModelContext, model: transformers.PreTrainedModel
) -> None:
    from tsdoc.engine.fused_decoder import FusedDecoder
    from tsdoc.kernels.triton_backend import TritonBackend

    device, config = torch.device("cuda"), context.config
    on_gpu = dataclasses.replace(
        context,
        decoder=FusedDecoder(config, model.state_dict(), torch.float32, device),
        backend=TritonBackend(
            config, kv_dtype="float32", compute_dtype=torch.float32, device=device
        ),
    )
    answers = []
    for where in (context, on_gpu):
        run = parse_policy(policy, context.settings).start(where)
        run.prefill(IDS[:390], ignore)
        answers.append([run.answer(question, 6).tokens for question in QUESTIONS])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("infllm:page_size=3", "no setting page_size"),
        ("infllm:prefill=tokenselect", "no setting prefill"),
        ("quest:page_size=x", "whole number"),
        ("snapkv:prefill=full", "only be tokenselect"),
        ("oracle:theta=0.5", "no setting theta"),
        ("streaming_llm:top_k=-1", "greater than 0"),
    ],
)
def test_settings_that_do_not_exist_are_refused(
    text: str, message: str, context: ModelContext
) -> None:
    with pytest.raises(UsageError, match=message):
        parse_policy(text, context.settings)


# Each policy's arithmetic against the same written out naively, in one layer.

LENGTH = 288


class Layer:
    """Random K and V of one layer, in a cache and as plain tensors."""

    def __init__(self, config: ModelConfig, length: int = LENGTH, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.config = dataclasses.replace(config, num_layers=1)
        self.rope = make_rope_table(config.rope, DIM, 1000)
        self.k, self.v = (
            torch.randn(length, KV, DIM, generator=generator) * gain for gain in (1.5, 1.0)
        )
        self.q = torch.randn(length, HEADS, DIM, generator=generator) * 1.5
        self.cache = PolicyCache(
            self.config,
            kv_dtype=torch.float32,
            compute_dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.cache.reserve(length)
        self.cache.write(0, 0, self.k, self.v)

    def scene(self, length: int = LENGTH, **budget: Any) -> Scene:
        base = {"n_init": 8, "n_local": 32, "top_k": 48, "chunk_size": 16}
        return Scene(
            config=self.config,
            budget=SelectionSettings(**{**base, **budget}),
            device=torch.device("cpu"),
            num_tokens=length,
        )

    def attend(
        self,
        rows: Callable[[int, int], torch.Tensor],
        scores: Callable[[int, int, torch.Tensor], torch.Tensor],
        first: int,
        last: int,
    ) -> torch.Tensor:
        """Softmax attention of tokens [first, last): `rows` and `scores` of (token, head)."""
        out = torch.zeros(last - first, HEADS, DIM)
        for token in range(first, last):
            for head in range(HEADS):
                index = rows(token, head)
                weights = torch.softmax(scores(token, head, index) / DIM**0.5, dim=0)
                out[token - first, head] = weights @ self.v[index, head * KV // HEADS]
        return out

    def compact(self, scene: Scene, token: int, head: int, index: torch.Tensor) -> torch.Tensor:
        """Scores at positions counted along `index`, whose last entry is the token itself."""
        rope = self.rope
        at = torch.arange(len(index))
        keys = rope.rotate(self.k[index, head * KV // HEADS], at)
        return keys @ rope.rotate(self.q[token, head][None], at[-1:])[0]

    def turned(self, scene: Scene, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return rotate(x, self.rope.cos[at], self.rope.sin[at])


@pytest.fixture
def layer(context: ModelContext) -> Layer:
    return Layer(context.config)


def chunk_start(token: int, size: int = 16) -> int:
    return token // size * size


def test_streaming_attends_to_sinks_and_the_recent_tokens(layer: Layer) -> None:
    policy, scene = StreamingLLM(), layer.scene()
    policy.begin(scene)
    got = policy.attend(0, layer.q[256:], layer.cache, chunk_bounds(256, LENGTH, 16))

    def rows(token: int, head: int) -> torch.Tensor:
        start = chunk_start(token)
        return torch.cat((torch.arange(8), torch.arange(start - 80, token + 1)))

    expected = layer.attend(rows, lambda t, h, i: layer.compact(scene, t, h, i), 256, LENGTH)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("share", [1, 4])
@pytest.mark.parametrize("in_window", [True, False])
def test_the_oracle_takes_the_tokens_of_most_attention(
    layer: Layer, share: int, in_window: bool
) -> None:
    scene = layer.scene(length=LENGTH if in_window else 5000)
    policy = Oracle(share=share)
    policy.begin(scene)
    got = policy.attend(0, layer.q[256:], layer.cache, chunk_bounds(256, LENGTH, 16))

    def mass(token: int, begin: int, kv: int) -> torch.Tensor:
        total = torch.zeros(begin - 32 - 8)
        for head in range(kv * HEADS // KV, (kv + 1) * HEADS // KV):
            at = torch.arange(token + 1)
            if not in_window:  # outside of the local window all keys stand at its edge
                at = torch.where(at < begin - 32, 0, at - (begin - 32))
            keys = layer.turned(scene, layer.k[: token + 1, kv], at)
            query = layer.turned(scene, layer.q[token, head], at[-1])
            total += torch.softmax(keys @ query / DIM**0.5, dim=0)[8 : begin - 32]
        return total

    def rows(token: int, head: int) -> torch.Tensor:
        begin, kv = chunk_start(token, share), head * KV // HEADS
        sharing = range(begin, begin + share)
        votes = torch.stack([mass(t, begin, kv) for t in sharing]).sum(dim=0)
        best = votes.topk(48).indices.sort().values + 8
        return torch.cat((torch.arange(8), best, torch.arange(begin - 32, token + 1)))

    expected = layer.attend(rows, lambda t, h, i: layer.compact(scene, t, h, i), 256, LENGTH)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_quest_takes_the_pages_of_the_highest_bounds(layer: Layer) -> None:
    scene = layer.scene()
    policy = QuestPages(page_size=8)
    policy.begin(scene)
    got = policy.attend(0, layer.q[256:], layer.cache, chunk_bounds(256, LENGTH, 16))

    def rows(token: int, head: int) -> torch.Tensor:
        start, kv = chunk_start(token), head * KV // HEADS
        query = selection_query(layer.q[start : start + 16], scene.rope(200), 32)
        bounds = []
        for page in range(1, (start - 32) // 8):
            keys = layer.k[8 * page : 8 * page + 8, kv]
            low, high = keys.amin(0), keys.amax(0)
            group = query[3 * kv : 3 * kv + 3]
            bounds.append(sum(torch.maximum(q * low, q * high).sum() for q in group))
        best = 1 + torch.tensor(bounds).topk(6).indices.sort().values
        chosen = (8 * best[:, None] + torch.arange(8)).flatten()
        local = torch.arange((start - 32) // 8 * 8, token + 1)
        return torch.cat((torch.arange(8), chosen, local))

    expected = layer.attend(rows, lambda t, h, i: layer.compact(scene, t, h, i), 256, LENGTH)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_infllm_takes_the_blocks_whose_representatives_match(layer: Layer) -> None:
    scene = layer.scene()
    policy = InfLLM(block_size=8, num_representatives=2)
    policy.begin(scene)
    got = policy.attend(0, layer.q, layer.cache, chunk_bounds(0, LENGTH, 16))[256:]
    judged = torch.zeros(KV, LENGTH)
    everywhere = torch.arange(LENGTH)
    for head in range(HEADS):
        q = layer.turned(scene, layer.q[:, head], everywhere)
        k = layer.turned(scene, layer.k[:, head * KV // HEADS], everywhere)
        for key in range(LENGTH):
            judged[head * KV // HEADS, key] += (q[key + 1 : key + 33] @ k[key]).sum()

    def far(start: int) -> torch.Tensor:
        query = layer.q[start : start + 16].mean(0)
        scores = []
        for block in range(1, (start - 32) // 8):
            score = torch.tensor(0.0)
            for kv in range(KV):
                best = judged[kv, 8 * block : 8 * block + 8].topk(2).indices + 8 * block
                for head in range(3 * kv, 3 * kv + 3):
                    score = score + (layer.k[best, kv] @ query[head]).sum()
            scores.append(score)
        best = 1 + torch.stack(scores).topk(6).indices.sort().values
        return torch.cat((torch.arange(8), (8 * best[:, None] + torch.arange(8)).flatten()))

    chosen = {start: far(start) for start in range(256, LENGTH, 16)}

    def rows(token: int, head: int) -> torch.Tensor:
        start = chunk_start(token)
        return torch.cat((chosen[start], torch.arange((start - 32) // 8 * 8, token + 1)))

    def scores(token: int, head: int, index: torch.Tensor) -> torch.Tensor:
        num_far = len(chosen[chunk_start(token)])
        keys = layer.k[index, head * KV // HEADS]
        at_edge = layer.turned(scene, layer.q[token, head], torch.tensor(32))
        own = layer.turned(scene, layer.q[token, head], torch.tensor(token))
        near = layer.turned(scene, keys[num_far:], index[num_far:])
        return torch.cat((keys[:num_far] @ at_edge, near @ own))

    expected = layer.attend(rows, scores, 256, LENGTH)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_snapkv_keeps_what_the_last_queries_look_at(layer: Layer) -> None:
    scene = layer.scene(n_init=8, n_local=8, top_k=48)
    policy = SnapKV(observed=4, pool=3)
    policy.begin(scene)
    layer.cache.sealed = 260
    policy.attend(0, layer.q[260:280], layer.cache, [(260, 280)])
    got = policy.attend(0, layer.q[280:281], layer.cache, [(280, 281)])
    everything = torch.arange(280)
    mass = torch.zeros(KV, 276)
    for token in range(276, 280):
        for head in range(HEADS):
            kv = head * KV // HEADS
            keys = layer.turned(scene, layer.k[: token + 1, kv], everything[: token + 1])
            query = layer.turned(scene, layer.q[token, head], torch.tensor(token))
            mass[kv] += torch.softmax(keys @ query / DIM**0.5, dim=0)[:276]
    padded = torch.nn.functional.pad(mass, (1, 1), value=-1.0)
    pooled = torch.stack((padded[:, :-2], padded[:, 1:-1], padded[:, 2:])).amax(0)

    def rows(token: int, head: int) -> torch.Tensor:
        ranked = pooled[head * KV // HEADS].sort(descending=True, stable=True).indices
        best = ranked[:60].sort().values
        return torch.cat((best, torch.arange(276, 281)))

    def scores(token: int, head: int, index: torch.Tensor) -> torch.Tensor:
        keys = layer.turned(scene, layer.k[index, head * KV // HEADS], index)
        return keys @ layer.turned(scene, layer.q[token, head], torch.tensor(token))

    torch.testing.assert_close(got, layer.attend(rows, scores, 280, 281), rtol=1e-4, atol=1e-4)


def test_self_extend_divides_far_positions(layer: Layer) -> None:
    scene = layer.scene()
    policy = SelfExtend(neighbours=24, group=5)
    policy.begin(scene)
    got = policy.attend(0, layer.q[37:160], layer.cache, [(37, 160)])

    def scores(token: int, head: int, index: torch.Tensor) -> torch.Tensor:
        keys, query = layer.k[index, head * KV // HEADS], layer.q[token, head]
        near = layer.turned(scene, keys, index) @ layer.turned(scene, query, torch.tensor(token))
        at = torch.tensor(token // 5 + 24 - 24 // 5)
        far = layer.turned(scene, keys, index // 5) @ layer.turned(scene, query, at)
        return torch.where(token - index < 24, near, far)

    expected = layer.attend(lambda token, head: torch.arange(token + 1), scores, 37, 160)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_self_extend_stays_within_the_window(layer: Layer) -> None:
    scene = layer.scene(length=40_000)
    policy = SelfExtend(neighbours=1024)
    policy.begin(scene)
    last = scene.num_positions - 1
    assert last // policy._group + 1024 - 1024 // policy._group < scene.config.window
    with pytest.raises(UsageError, match="fewer than the model's"):
        SelfExtend(neighbours=5000).begin(scene)


def test_ntk_changes_nothing_within_the_window_and_scales_theta_beyond(layer: Layer) -> None:
    plain, scaled = FullAttention(), FullAttention(ntk=True)
    for policy in (plain, scaled):
        policy.begin(layer.scene(length=4000))
    assert torch.equal(plain._rope.cos, scaled._rope.cos)
    scaled.begin(layer.scene(length=8192))
    theta = 10_000.0 * 2 ** (DIM / (DIM - 2))
    slowest = torch.tensor(8000 * theta ** -((DIM - 2) / DIM)).cos()
    assert scaled._rope.cos[8000, DIM // 2 - 1] == pytest.approx(float(slowest), abs=1e-3)


@pytest.mark.parametrize("start", [0, 5, 40, 41, 100, 200, 317])
@pytest.mark.parametrize("block_size", [8, 16, 7])
def test_blocks_leave_no_gap(start: int, block_size: int) -> None:
    budget = SelectionSettings(n_init=8, n_local=32, top_k=48, chunk_size=16)
    blocks = block_range(start, budget, block_size)
    assert blocks.init_end == min(start, blocks.first * block_size)
    assert blocks.local_start == min(start, blocks.last * block_size)
    assert start - blocks.local_start >= min(32, start - blocks.init_end)
    assert blocks.init_end >= min(8, start)

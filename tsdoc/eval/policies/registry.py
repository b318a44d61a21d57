"""All policies by their names, and what may be set of each: `name:key=value,key=value`."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tsdoc.errors import UsageError
from tsdoc.eval.policies.interface import Contender, ModelContext
from tsdoc.eval.policies.tokenselect import TokenSelect, change_settings
from tsdoc.settings import EngineSettings, SelectionSettings, Settings

if TYPE_CHECKING:
    from tsdoc.eval.policies.attending import AttentionPolicy

ENGINE_KEYS = (
    "theta",
    "question_chunk_size",
    "prefill_block",
    "reread_tokens",
    "index",
    "index_candidates",
)
BUDGET_KEYS = ("n_init", "n_local", "top_k", "chunk_size")
Values = Mapping[str, object]
Start = Callable[[ModelContext], Contender]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A policy with its values, as the user chose it.

    Attributes:
        label: What the user wrote.
        in_window: Whether it is defined only while everything fits the model's trained window.
        selection: TokenSelect's settings; None for other policies.
        start: Makes it ready for a model.
    """

    label: str
    in_window: bool
    selection: SelectionSettings | None
    start: Start


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy that can be chosen.

    Attributes:
        about: One line.
        in_window: See `PolicyChoice`.
        made_of: Module and class of an `AttentionPolicy`; None for the shipped engine.
        fixed: Settings that the name stands for.
        keys: Settings of the class itself.
        adopts: Whether it can take over what another policy prefilled.
    """

    name: str
    about: str
    in_window: bool = False
    made_of: tuple[str, str] | None = None
    fixed: Values = dataclasses.field(default_factory=dict)
    keys: tuple[str, ...] = ()
    adopts: bool = True


def parse_policy(text: str, settings: Settings) -> PolicyChoice:
    """Reads `name` or `name:key=value,key=value`.

    Raises:
        UsageError: there is no such policy or key, or a value does not fit.
    """
    name, _, rest = text.strip().partition(":")
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name}", hint=f"Policies: {', '.join(POLICIES)}.")
    policy = POLICIES[name]
    values: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{part} is no key=value", where=f"--policy {text}")
        values[key.strip()] = _value(value.strip())
    after = values.pop("prefill", None) if policy.made_of and policy.adopts else None
    if after not in (None, "tokenselect"):
        raise UsageError("prefill can only be tokenselect", where=f"--policy {text}")
    own = {key: values.pop(key) for key in policy.keys if key in values}
    for key, number in own.items():
        if not isinstance(number, int) or number < 0:
            raise UsageError(f"{key} must be a whole number", where=f"--policy {text}")
    changes = _changes(policy, values, settings)
    return PolicyChoice(
        label=text.strip(),
        in_window=policy.in_window,
        selection=None if policy.made_of else change_settings(settings, changes).selection,
        start=functools.partial(_start, policy, own, changes, after is not None),
    )


def _start(
    policy: Policy,
    own: Values,
    changes: Mapping[str, Values],
    after_tokenselect: bool,
    context: ModelContext,
) -> Contender:
    if policy.made_of is None:
        return TokenSelect(context, changes)
    from tsdoc.eval.policies.after import AfterTokenSelect
    from tsdoc.eval.policies.attending import PolicyRun

    module, name = policy.made_of
    made: Any = getattr(importlib.import_module(f"tsdoc.eval.policies.{module}"), name)
    attention: AttentionPolicy = made(**{**policy.fixed, **own})
    budget = change_settings(context.settings, changes).selection
    run = PolicyRun(context, attention, budget)
    if not after_tokenselect:
        return run
    return AfterTokenSelect(TokenSelect(context, {}, on_host=True), run)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _changes(policy: Policy, values: Values, settings: Settings) -> dict[str, dict[str, object]]:
    """Values of a policy as settings by group, checked."""
    shipped = policy.made_of is None
    changes: dict[str, dict[str, object]] = {"selection": {}, "engine": {}}
    budget = tuple(SelectionSettings.model_fields) if shipped else BUDGET_KEYS
    if shipped:
        changes["selection"].update(policy.fixed)
    for key, value in values.items():
        if key in budget and not (shipped and key in policy.fixed):
            changes["selection"][key] = value
        elif shipped and key in ENGINE_KEYS and key in EngineSettings.model_fields:
            changes["engine"][key] = value
        else:
            more = ENGINE_KEYS if shipped else ("prefill",) * policy.adopts
            keys = [*policy.keys, *budget, *more]
            raise UsageError(
                f"the policy {policy.name} has no setting {key}",
                hint=f"Settings: {', '.join(keys)}.",
            )
    try:
        change_settings(settings, changes)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "--policy"
        raise UsageError(problem["msg"], where=where) from error
    return changes


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(name="tokenselect", about="as tsdoc is set"),
            *(
                Policy(
                    name=function,
                    about=f"TokenSelect with function={function}",
                    fixed={"function": function},
                )
                for function in ("head_soft_vote", "head_vote", "topk")
            ),
            Policy(
                name="full",
                about="full attention, within the model's trained window",
                in_window=True,
                made_of=("full", "FullAttention"),
            ),
            Policy(
                name="full_ntk",
                about="full attention, beyond the window with NTK-scaled RoPE",
                made_of=("full", "FullAttention"),
                fixed={"ntk": True},
            ),
            Policy(
                name="oracle",
                about="the top_k that full attention looks at most, for each token",
                made_of=("oracle", "Oracle"),
                keys=("share",),
            ),
            Policy(
                name="streaming_llm",
                about="first and most recent tokens alone",
                made_of=("streaming", "StreamingLLM"),
            ),
            Policy(
                name="infllm",
                about="blocks of 128 tokens by representative keys",
                made_of=("infllm", "InfLLM"),
                keys=("block_size", "num_representatives"),
                adopts=False,
            ),
            Policy(
                name="quest",
                about="pages of 16 tokens by bounds of their scores",
                made_of=("quest", "QuestPages"),
                keys=("page_size",),
            ),
            Policy(
                name="snapkv",
                about="full prefill, then eviction by the last queries",
                made_of=("snapkv", "SnapKV"),
                keys=("observed", "pool"),
            ),
            Policy(
                name="self_extend",
                about="full attention, far positions in groups",
                made_of=("self_extend", "SelfExtend"),
                keys=("neighbours", "group"),
            ),
        )
    }
)

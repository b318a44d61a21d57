"""All policies by their names, and what may be set of each: `name:key=value,key=value`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pydantic import ValidationError

from tsdoc.errors import UsageError
from tsdoc.eval.policies.interface import Contender, ModelContext
from tsdoc.eval.policies.tokenselect import TokenSelect, change_settings
from tsdoc.settings import EngineSettings, SelectionSettings, Settings

ENGINE_KEYS = ("theta", "question_chunk_size", "prefill_block", "kv_dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChoice:
    """A policy with its values, as the user chose it.

    Attributes:
        label: What the user wrote.
        in_window: Whether it is defined only while everything fits the model's trained window.
        start: Makes it ready for a model.
    """

    label: str
    in_window: bool
    start: Callable[[ModelContext], Contender]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy: its name, one line about it, and how a choice of it is made."""

    name: str
    about: str
    in_window: bool
    choose: Callable[[Mapping[str, object], Settings], Callable[[ModelContext], Contender]]


def parse_policy(text: str, settings: Settings) -> PolicyChoice:
    """Reads `name` or `name:key=value,key=value`.

    Raises:
        UsageError: there is no such policy or key, or a value does not fit.
    """
    name, _, rest = text.strip().partition(":")
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name}", hint=f"Policies: {', '.join(POLICIES)}.")
    values: dict[str, object] = {}
    for part in filter(None, (part.strip() for part in rest.split(","))):
        key, equals, value = part.partition("=")
        if not equals:
            raise UsageError(f"{part} is no key=value", where=f"--policy {text}")
        values[key.strip()] = _value(value.strip())
    policy = POLICIES[name]
    return PolicyChoice(
        label=text.strip(), in_window=policy.in_window, start=policy.choose(values, settings)
    )


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tokenselect(
    values: Mapping[str, object], settings: Settings, **fixed: object
) -> Callable[[ModelContext], Contender]:
    changes: dict[str, dict[str, object]] = {"selection": dict(fixed), "engine": {}}
    for key, value in values.items():
        if key in SelectionSettings.model_fields and key not in fixed:
            changes["selection"][key] = value
        elif key in ENGINE_KEYS and key in EngineSettings.model_fields:
            changes["engine"][key] = value
        else:
            keys = ", ".join([*SelectionSettings.model_fields, *ENGINE_KEYS])
            raise UsageError(f"this policy has no setting {key}", hint=f"Settings: {keys}.")
    try:
        change_settings(settings, changes)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"])) or "--policy"
        raise UsageError(problem["msg"], where=where) from error
    return functools.partial(TokenSelect, changes=changes)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(
                name="tokenselect",
                about="as tsdoc is set",
                in_window=False,
                choose=_tokenselect,
            ),
            *(
                Policy(
                    name=function,
                    about=f"TokenSelect with function={function}",
                    in_window=False,
                    choose=functools.partial(_tokenselect, function=function),
                )
                for function in ("head_soft_vote", "head_vote", "topk")
            ),
        )
    }
)

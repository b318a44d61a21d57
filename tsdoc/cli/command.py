"""How a command is declared: its option groups, its help with examples, its `Run`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from tsdoc.cli.options import Output
from tsdoc.cli.run import Run

Example = tuple[str, str]


def command(
    app: typer.Typer,
    *,
    usage: str,
    examples: Sequence[Example],
    panel: str | None = None,
    name: str | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as a command.

    `usage` is what the usage line says after the command's name. The function's first parameter is
    its `Run`. A parameter whose type is an option group becomes the group's options; all others
    are Typer parameters. `--json`, `--quiet` and `--debug` are added. The docstring is the help
    text, `examples` (what it does, command line) stand below it.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        lines = "\n".join(
            f"{why}{'' if why.endswith('?') else ':'}\n  {line}" for why, line in examples
        )
        app.command(
            name,
            cls=_with_usage(usage),
            help=filled(function.__doc__ or ""),
            epilog=f"Examples\n\n{lines}".replace("[", "\\["),
            rich_help_panel=panel,
        )(_spread(function))
        return function

    return register


def add_group(app: typer.Typer, name: str, *, help_text: str, panel: str) -> typer.Typer:
    """Adds a group of commands, and returns what they are registered with."""
    group = typer.Typer(cls=PlainGroup, help=help_text, no_args_is_help=True)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


def filled(text: str) -> str:
    """Returns paragraphs without the line ends inside them: the terminal's width decides those."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


class PlainGroup(TyperGroup):
    """A group of commands whose help has no types of Python."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Returns the parameters as the help shows them."""
        return _plain(super().get_params(ctx))


def _with_usage(usage: str) -> type[TyperCommand]:
    class Command(TyperCommand):
        """A command with a usage line of its own: Typer's cannot say that the question is last."""

        def collect_usage_pieces(self, ctx: object) -> list[str]:
            """Returns what stands after the command's name."""
            return [usage]

        def get_params(self, ctx: Any) -> list[Any]:
            """Returns the parameters as the help shows them."""
            return _plain(super().get_params(ctx))

    return Command


def _plain(parameters: Sequence[Any]) -> list[Any]:
    """Takes `<bool>` from flags, which take no value, and `<list[str]>` from named arguments."""
    for parameter in parameters:
        if isinstance(parameter, TyperOption) and parameter.is_flag:
            parameter.metavar = ""
        elif isinstance(parameter, TyperArgument):
            parameter.display_type_rich = lambda ctx: None  # type: ignore[method-assign]
    return list(parameters)


def _spread(function: Callable[..., None]) -> Callable[..., None]:
    """Returns a Typer callback: the context, and every option as a parameter of its own."""
    groups: dict[str, type] = {"output": Output}
    parameters = [_parameter("context", typer.Context)]
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    for parameter in own:
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(
            parameter.annotation
        ):
            groups[parameter.name] = parameter.annotation
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    for group in [*list(groups.values())[1:], Output]:
        parameters += [
            _parameter(field.name, field.type, _default(field)) for field in _fields(group)
        ]

    @functools.wraps(function)
    def callback(*, context: typer.Context, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in _fields(group)})
        run: Run = context.obj
        run.begin(context.command_path, values.pop("output"))
        function(run, **values)

    vars(callback).pop("__wrapped__")  # or the signature of `function` would be read
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {p.name: p.annotation for p in parameters}
    return callback


def _fields(group: type) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(group)


def _parameter(
    name: str, annotation: object, default: object = inspect.Parameter.empty
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default

"""`tsdoc models` and `tsdoc profiles`: which models there are, fetching one, choosing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from tsdoc.cli import completion
from tsdoc.cli.command import add_group, command
from tsdoc.cli.reporter import amount
from tsdoc.cli.run import Run

if TYPE_CHECKING:
    from tsdoc.cli.services import ListedModel

PANEL = "Setup"

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        autocompletion=completion.profiles,
        help="A profile, hf:ORG/NAME, a directory or a .gguf file.",
    ),
]
ProfileName = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE",
        autocompletion=completion.profiles,
        help="A profile's name, or the path of a YAML file.",
    ),
]
Offline = Annotated[bool, typer.Option("--offline", help="Download nothing; fail instead.")]


def add_commands(app: typer.Typer) -> None:
    """Registers the groups `models` and `profiles`."""
    models = add_group(app, "models", help_text="List, fetch and choose models.", panel=PANEL)
    command(
        models,
        name="list",
        usage="[OPTIONS]",
        examples=[("Which models there are, and which is used", "tsdoc models list")],
    )(models_list)
    command(
        models,
        name="get",
        usage="NAME [OPTIONS]",
        examples=[
            ("Fetch a small model for trials", "tsdoc models get tiny"),
            ("Fetch a model of the Hugging Face hub", "tsdoc models get hf:Qwen/Qwen3-4B"),
        ],
    )(models_get)
    command(
        models,
        name="use",
        usage="NAME [OPTIONS]",
        examples=[
            ("Answer with this model from now on", "tsdoc models use embedded"),
            ("Let tsdoc choose again", "tsdoc models use default"),
        ],
    )(models_use)
    about = "Settings made for one model each."
    profiles = add_group(app, "profiles", help_text=about, panel=PANEL)
    command(
        profiles,
        name="list",
        usage="[OPTIONS]",
        examples=[("Which profiles there are", "tsdoc profiles list")],
    )(profiles_list)
    command(
        profiles,
        name="show",
        usage="NAME|FILE [OPTIONS]",
        examples=[
            ("What a profile sets", "tsdoc profiles show tiny"),
            ("A start for a profile of your own", "tsdoc profiles show tiny > my.yaml"),
        ],
    )(profiles_show)


def models_list(run: Run) -> None:
    """List the models of all profiles and those on this disk; * marks the default."""
    listing = run.services.list_models(run.services.home())
    if run.output.json:
        run.answer(
            {
                "default": listing.default,
                "default_reason": listing.default_reason,
                "models": [
                    {
                        "name": model.name,
                        "source": model.source,
                        "licence": model.licence,
                        "download_bytes": model.download_bytes,
                        "directory": None if model.directory is None else str(model.directory),
                        "default": model.name == listing.default,
                    }
                    for model in listing.models
                ],
            }
        )
        return
    from tsdoc.cli.tables import Column

    rows = [
        (
            f"{'*' if model.name == listing.default else ' '} {model.name}",
            "yes" if model.directory else "",
            amount(model.download_bytes, "bytes") if model.download_bytes else "",
            _licence(model),
            model.source,
        )
        for model in listing.models
    ]
    columns = [
        Column(title="  model"),
        Column(title="here"),
        Column(title="download", right=True),
        Column(title="licence", wraps=True),
        Column(title="source", below=True),
    ]
    run.terminal.table(columns, rows)
    if listing.default is None:
        run.reporter.note("the default model is chosen when it is first used")
    else:
        run.reporter.note(f"default: {listing.default} ({listing.default_reason})")


def models_get(run: Run, name: Name, offline: Offline = False) -> None:
    """Fetch a model, and convert it where that is needed, without asking it anything."""
    model = run.services.get_model(
        name, home=run.services.home(), offline=offline, reporter=run.reporter
    )
    run.reporter.finish()
    if run.output.json:
        run.answer(
            {
                "name": model.name,
                "directory": str(model.directory),
                "licence": model.licence,
                "licence_url": model.licence_url,
                "fingerprint": model.fingerprint,
                "architecture": model.config.architecture,
                "window": model.config.window,
            }
        )
        return
    run.terminal.line(f"{model.name}: {model.directory}")


def models_use(run: Run, name: Name) -> None:
    """Make a model the default; the name `default` lets tsdoc choose again."""
    chosen = run.services.use_model(name, home=run.services.home())
    if run.output.json:
        run.answer({"default": chosen})
    elif chosen is None:
        run.terminal.line("the default model is chosen again when it is next used")
    else:
        run.terminal.line(f"default model: {chosen}")


def profiles_list(run: Run) -> None:
    """List the profiles that ship with tsdoc."""
    profiles = run.services.list_profiles(run.services.home())
    if run.output.json:
        run.answer(
            {
                "profiles": [
                    {"name": p.name, "source": p.source, "licence": p.licence, "path": str(p.path)}
                    for p in profiles
                ]
            }
        )
        return
    from tsdoc.cli.tables import Column

    rows = [(p.name, _licence(p), p.source) for p in profiles]
    columns = [
        Column(title="profile"),
        Column(title="licence", wraps=True),
        Column(title="model", below=True),
    ]
    run.terminal.table(columns, rows)


def profiles_show(run: Run, name: ProfileName) -> None:
    """Show what a profile sets, as YAML."""
    import yaml

    settings = run.services.load_profile(name)
    if run.output.json:
        run.answer({"name": name, "settings": settings})
    else:
        run.terminal.write(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))


def _licence(model: ListedModel) -> str:
    # Which model the default is, its first use decides.
    of_choice = "that of the model chosen" if model.source == "default" else "unknown"
    return model.licence or of_choice

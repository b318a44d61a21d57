"""`tsdoc config show`: every setting, its value, and where the value comes from."""

from __future__ import annotations

import json

import typer

from tsdoc.cli.command import add_group, command
from tsdoc.cli.options import Engines, Model, Sampling, Tuning
from tsdoc.cli.run import Run
from tsdoc.terminal import format_count


def add_commands(app: typer.Typer) -> None:
    """Registers the group `config`."""
    group = add_group(app, "config", help_text="Settings and where they come from.", panel="Setup")
    command(
        group,
        name="show",
        usage="[OPTIONS]",
        examples=[
            ("All settings as they are now", "tsdoc config show"),
            ("As a profile would make them", "tsdoc config show --profile tiny"),
        ],
    )(config_show)


def config_show(
    run: Run, *, tuning: Tuning, model: Model, engine: Engines, sampling: Sampling
) -> None:
    """Show every setting, its value and its origin.

    Stronger before weaker: option, --set, --profile, the user's config file, built-in.
    """
    from tsdoc.config import user_config_path

    resolved = run.settings(tuning, model=model, engine=engine, sampling=sampling)
    path = user_config_path()
    if run.output.json:
        run.answer(
            {
                "settings": [
                    {"key": key, "value": value, "origin": origin}
                    for key, value, origin in resolved.rows()
                ],
                "config_file": str(path),
                "config_file_exists": path.exists(),
                "home": str(run.services.home().root),
            }
        )
        return
    from tsdoc.cli.tables import Column

    rows = [(key, _shown(value), origin) for key, value, origin in resolved.rows()]
    columns = [
        Column(title="setting"),
        Column(title="value", wraps=True),
        Column(title="origin", wraps=True),
    ]
    run.terminal.table(columns, rows)
    home = run.services.home()
    if resolved.settings.model.source == "default":
        chosen = run.services.list_models(home).default
        run.reporter.note(f"default model: {chosen or 'chosen when it is first used'}")
    found = "read" if path.exists() else "not there"
    run.reporter.note(f"config file: {path} ({found})")
    run.reporter.note(f"home: {home.root}")


def _shown(value: object) -> str:
    """Returns a value as --set takes it; of a group or a list only how much it holds."""
    if isinstance(value, list | dict) and value:
        return f"{format_count(len(value), 'item')}; --json shows them"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

"""What a shell completes that is neither a command nor an option: names that are known here.

What cannot be read gives nothing, and then the shell completes files. Nothing is imported until a
name is asked for, and never the model's libraries.
"""

from __future__ import annotations

from collections.abc import Iterable

from tsdoc.cli.services import Services
from tsdoc.errors import TsdocError
from tsdoc.terminal import visible_line


def profiles(incomplete: str) -> list[str]:
    """Returns the profiles that ship with tsdoc."""
    from tsdoc.models.profiles import list_profiles

    return _beginning(incomplete, (profile.name for profile in list_profiles()))


def settings(incomplete: str) -> list[str]:
    """Returns settings as `--set` takes them, up to their value."""
    from tsdoc.config import setting_keys

    return _beginning(incomplete, (f"{key}=" for key in setting_keys()))


def entries(incomplete: str) -> list[str]:
    """Returns names of documents that are kept, where one entry alone has them, and ids."""
    from collections import Counter

    from tsdoc.cli.entries import ID_SHOWN
    from tsdoc.progress import Silent

    services = Services()
    try:
        kept = services.open_store(services.home(), max_bytes=None, reporter=Silent()).list()
    except TsdocError:
        return []
    counted = Counter(visible_line(entry.name) for entry in kept)
    names = [name for name, count in counted.items() if count == 1]
    return _beginning(incomplete, [*names, *(entry.entry_id[:ID_SHOWN] for entry in kept)])


def conversations(incomplete: str) -> list[str]:
    """Returns the names of conversations that are kept."""
    services = Services()
    try:
        return _beginning(incomplete, services.list_conversations(services.home()))
    except TsdocError:
        return []


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]

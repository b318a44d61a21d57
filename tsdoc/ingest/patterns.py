"""The patterns of `--include` and `--exclude`, and which of them no file has matched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tsdoc.ingest.document import IngestWarning
from tsdoc.ingest.gitignore import Rule, matches_glob, parse_rule, touches
from tsdoc.ingest.options import IngestOptions
from tsdoc.terminal import visible_line


class Patterns:
    """Decides which files the user wants; remembers the patterns that matched."""

    def __init__(self, options: IngestOptions) -> None:
        self._given = {"--include": options.include, "--exclude": options.exclude}
        self._include = _rules(options.include)
        self._exclude = _rules(options.exclude)
        self._unmatched = {*self._include, *self._exclude}

    def __str__(self) -> str:
        return ", ".join(
            f"{option} '{visible_line(pattern)}'"
            for option, patterns in self._given.items()
            for pattern in patterns
        )

    def wants(self, path: str) -> bool:
        """Whether a file of the sources is to be read; `path` is relative to its source."""
        self._unmatched -= {rule for rule in self._unmatched if touches(rule, path)}
        if self._given["--include"] and not self.includes(path):
            return False
        return not matches_glob(self._exclude, path)

    def includes(self, path: str) -> bool:
        """Whether `--include` asks for the file."""
        return matches_glob(self._include, path)

    def unmatched(self) -> Iterator[IngestWarning]:
        """Yields a warning for every pattern that none of the files so far matched."""
        for option, patterns in self._given.items():
            for pattern in dict.fromkeys(patterns):
                if self._unmatched.issuperset(_rules([pattern])):  # a broken one has no rule
                    yield IngestWarning(
                        code="pattern_without_match",
                        where=f"{option} '{visible_line(pattern)}'",
                        message="matches no file of the sources",
                    )


def _rules(patterns: Sequence[str]) -> tuple[Rule, ...]:
    rules = (parse_rule(pattern.removeprefix("./")) for pattern in patterns)
    return tuple(rule for rule in rules if rule is not None)

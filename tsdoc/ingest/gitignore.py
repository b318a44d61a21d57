"""Patterns in the syntax of .gitignore, matched exactly as git matches them.

A pattern is matched against one path at a time, never against its parents: whoever walks a tree
does not enter an ignored folder, which is how git itself works. (Libraries that let a pattern
match everything below a folder at once get `*` with `!*/` and `!*.c` wrong.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "\\x21-\\x7e",
    "lower": "a-z",
    "print": "\\x20-\\x7e",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern. `regex` is matched against the path relative to the rules' folder."""

    regex: re.Pattern[str]
    negated: bool
    folders_only: bool

    def matches(self, path: str, *, folder: bool) -> bool:
        """Whether this very path matches; `folder` says what it is."""
        return (folder or not self.folders_only) and self.regex.fullmatch(path) is not None


def parse_rules(text: str) -> tuple[Rule, ...]:
    """Returns the rules of an ignore file; lines that git would drop are dropped."""
    rules = (parse_rule(line) for line in text.removeprefix("\ufeff").split("\n"))
    return tuple(rule for rule in rules if rule is not None)


def parse_rule(line: str) -> Rule | None:
    """Returns the rule of one line, or None for a blank line, a comment or a broken pattern."""
    pattern = _strip_trailing_spaces(line.removesuffix("\r"))
    if not pattern or pattern.startswith("#"):
        return None
    negated = pattern.startswith("!")
    pattern = pattern[1:] if negated else pattern
    folders_only = pattern.endswith("/")
    pattern = pattern.removesuffix("/")
    if not pattern:
        return None
    if "/" in pattern:
        regex = _translate(pattern.removeprefix("/"))
    else:
        regex = None if (name := _translate(pattern)) is None else f"(?:.*/)?{name}"
    if regex is None:
        return None
    return Rule(re.compile(regex, re.DOTALL), negated, folders_only)


def decide(rules: Iterable[Rule], path: str, *, folder: bool) -> bool | None:
    """Returns whether the last matching rule ignores `path`; None when no rule matches."""
    verdict = None
    for rule in rules:
        if rule.matches(path, folder=folder):
            verdict = not rule.negated
    return verdict


def matches_glob(rules: Iterable[Rule], path: str) -> bool:
    """Whether `path` (a file) or a folder above it is matched, for `--include`, `--exclude`."""
    verdict = False
    for level, folder in _levels(path):
        found = decide(rules, level, folder=folder)
        verdict = verdict if found is None else found
    return verdict


def touches(rule: Rule, path: str) -> bool:
    """Whether one rule, negated or not, matches `path` (a file) or a folder above it."""
    return any(rule.matches(level, folder=folder) for level, folder in _levels(path))


def _levels(path: str) -> Iterator[tuple[str, bool]]:
    """Yields the folders above a file from the outermost, then the file; and which is a folder."""
    parts = path.split("/")
    for depth in range(1, len(parts) + 1):
        yield "/".join(parts[:depth]), depth < len(parts)


def _strip_trailing_spaces(line: str) -> str:
    stripped = line.rstrip(" ")
    backslashes = len(stripped) - len(stripped.rstrip("\\"))
    if backslashes % 2 and stripped != line:
        return stripped + " "
    return stripped


def _translate(pattern: str) -> str | None:
    """Returns a regular expression for a pattern, or None where git matches nothing."""
    out = []
    at = 0
    while at < len(pattern):
        char = pattern[at]
        if char == "*":
            end = at
            while end < len(pattern) and pattern[end] == "*":
                end += 1
            starts = at == 0 or pattern[at - 1] == "/"
            if end - at == 2 and starts and pattern[end : end + 1] == "/":
                out.append("(?:.*/)?")
                end += 1
            elif end - at == 2 and starts and end == len(pattern):
                out.append(".*" if at == 0 else ".+")
            else:
                out.append("[^/]*")
            at = end
        elif char == "?":
            out.append("[^/]")
            at += 1
        elif char == "[":
            found = _translate_class(pattern, at)
            if found is None:
                return None
            regex, at = found
            out.append(regex)
        elif char == "\\":
            if at + 1 == len(pattern):
                return None
            out.append(re.escape(pattern[at + 1]))
            at += 2
        else:
            out.append(re.escape(char))
            at += 1
    return "".join(out)


def _translate_class(pattern: str, at: int) -> tuple[str, int] | None:
    """Translates `[…]` that begins at `at`; returns the regex and the offset behind it."""
    at += 1
    negated = pattern[at : at + 1] in ("!", "^")
    at += negated
    items: list[str] = []
    first = True
    while at < len(pattern) and (first or pattern[at] != "]"):
        first = False
        named = re.compile(r"\[:(\w+):\]").match(pattern, at)
        if named is not None:
            if named[1] not in _CLASSES:
                return None
            items.append(_CLASSES[named[1]])
            at = named.end()
            continue
        low, at = _class_char(pattern, at)
        if pattern[at : at + 1] == "-" and pattern[at + 1 : at + 2] not in ("", "]"):
            high, at = _class_char(pattern, at + 1)
            if low <= high:
                items.append(f"{_escape_in_class(low)}-{_escape_in_class(high)}")
        else:
            items.append(_escape_in_class(low))
    if at >= len(pattern):
        return None
    body = "".join(items)
    if not body:
        return ("[^/]" if negated else "(?!)"), at + 1
    return (f"[^/{body}]" if negated else f"(?!/)[{body}]"), at + 1


def _class_char(pattern: str, at: int) -> tuple[str, int]:
    if pattern[at] == "\\" and at + 1 < len(pattern):
        at += 1
    return pattern[at], at + 1


def _escape_in_class(char: str) -> str:
    return "\\" + char if char in "\\]^-[&~|" else char

"""The prompt length limit, and what to leave out when it is exceeded."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tsdoc.errors import ResourceError
from tsdoc.ingest.narrow import ways_to_narrow
from tsdoc.prompt.assemble import Prompt

NUM_SHOWN = 10


def check_length(num_tokens: int, limit: int, prompt: Prompt) -> None:
    """Refuses a prompt that is too long; never cuts it.

    Raises:
        ResourceError: with the total, the limit, the ten biggest parts and a way to leave out
            the biggest.
    """
    if num_tokens <= limit:
        return
    parts = _biggest_parts(prompt)
    lines = [f"{tokens:>12,}  {name}" for name, tokens in parts[:NUM_SHOWN]]
    hint = "The biggest parts, in tokens:\n" + "\n".join(lines)
    excludes = _excludes(parts, num_tokens - limit)
    if excludes and len(prompt.map.document.files) > 1:
        hint += ".\nTo fit, add: " + " ".join(f"--exclude '{name}'" for name in excludes)
    else:
        ways = ways_to_narrow(prompt.map.document)
        less = f"Read less with {ways}" if ways else "Read a part of it"
        hint += f".\n{less}, or raise --set max_prompt_tokens=N."
    raise ResourceError(
        f"the prompt is {num_tokens:,} tokens long and the limit is {limit:,}", hint=hint
    )


def _biggest_parts(prompt: Prompt) -> list[tuple[str, int]]:
    """Tokens per top folder or file of several, or per section of a single file; biggest first."""
    document = prompt.map.document
    sizes: Counter[str] = Counter()
    tokens = np.diff(prompt.map.arrays.section_tokens).tolist()
    for section, count in zip(document.sections, tokens, strict=True):
        name = document.files[section.file].name
        if len(document.files) == 1:
            part = " › ".join(section.titles) or name
        else:
            folder, slash, _ = name.partition("/")
            part = folder + slash
        sizes[part] += count
    return sizes.most_common()


def _excludes(parts: list[tuple[str, int]], excess: int) -> list[str]:
    """The fewest biggest parts whose removal is enough, unless that is everything."""
    chosen = []
    for name, tokens in parts[:-1]:
        chosen.append(name)
        excess -= tokens
        if excess <= 0:
            return chosen
    return []

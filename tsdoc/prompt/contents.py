"""The table of contents that follows the sections: a tree of directories, files and titles.

It is collapsed by depth until its estimated size fits the budget. The estimate needs no tokenizer,
so the text is the same for every model, and `tsdoc text` can show it without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tsdoc.ingest.document import Document, Section
from tsdoc.prompt.estimate import estimate_tokens
from tsdoc.terminal import visible_line

_OPEN = "<contents>\n"
_CLOSE = "</contents>\n"


@dataclass(slots=True)
class _Node:
    """A directory, a file or a title; `children` in prompt order, `num_leaves` counts `noun`."""

    label: str
    where: str = ""
    noun: str = "sections"
    children: dict[str, _Node] = field(default_factory=dict)
    num_leaves: int = 0


def contents_text(document: Document, *, tree_tokens: int) -> str:
    """Returns the table of contents in about `tree_tokens` tokens at most.

    Empty when the budget is 0, or when there is only one section, of which it could say nothing.
    """
    if tree_tokens <= 0 or len(document.sections) < 2:
        return ""
    root = _build(document)
    low, high = 1, max(depth for _, depth in _walk(root))
    best = ""
    while low <= high:
        middle = (low + high) // 2
        text = _render(root, middle)
        if estimate_tokens(text) <= tree_tokens:
            best, low = text, middle + 1
        else:
            high = middle - 1
    return best or _render_start(root, tree_tokens)


def _build(document: Document) -> _Node:
    root = _Node("")
    seen: set[int] = set()
    for section in document.sections:
        parts = document.files[section.file].name.split("/")
        node = root
        for part in parts[:-1]:
            node = _child(node, f"{part}/", noun="files")
            node.num_leaves += section.file not in seen
        node = _child(node, parts[-1], noun="sections")
        node.num_leaves += 1
        for title in section.titles:
            node = _child(node, title, noun="sections", where=_where(section))
            node.num_leaves += 1
        seen.add(section.file)
    return root


def _child(parent: _Node, label: str, *, noun: str, where: str = "") -> _Node:
    return parent.children.setdefault(label, _Node(visible_line(label), where, noun))


def _where(section: Section) -> str:
    begins = section.begins()
    return f" ({begins})" if begins else ""


def _walk(root: _Node) -> Iterator[tuple[_Node, int]]:
    """All nodes below `root` with their depth, from 1, in order."""
    stack = [(node, 1) for node in reversed(root.children.values())]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        stack.extend((child, depth + 1) for child in reversed(node.children.values()))


def _lines(root: _Node, max_depth: int) -> Iterator[str]:
    stack = [(node, 1) for node in reversed(root.children.values())]
    while stack:
        node, depth = stack.pop()
        hidden = bool(node.children) and depth == max_depth
        more = f" [{node.num_leaves} {node.noun}]" if hidden else ""
        yield f"{'  ' * (depth - 1)}- {node.label}{node.where}{more}\n"
        if not hidden:
            stack.extend((child, depth + 1) for child in reversed(node.children.values()))


def _render(root: _Node, max_depth: int) -> str:
    return f"{_OPEN}{''.join(_lines(root, max_depth))}{_CLOSE}"


def _render_start(root: _Node, tree_tokens: int) -> str:
    """The first entries of the top level, where even that is too much."""
    lines = list(_lines(root, 1))
    low, high = 0, len(lines) - 1
    best = ""
    while low <= high:
        middle = (low + high) // 2
        rest = f"- … {len(lines) - middle} more\n"
        text = f"{_OPEN}{''.join(lines[:middle])}{rest}{_CLOSE}"
        if estimate_tokens(text) <= tree_tokens:
            best, low = text, middle + 1
        else:
            high = middle - 1
    return best

"""Tokens per section, file and folder: counted or estimated, and arranged as a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tsdoc.ingest.document import Document, Section
from tsdoc.prompt.contents import contents_text
from tsdoc.prompt.estimate import estimate_tokens
from tsdoc.prompt.layout import render_document_section

CountTexts = Callable[[Iterable[str]], Iterator[int]]

CONTENTS = "(table of contents)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of a document.

    Attributes:
        sections: Per section of the document, delimiters included.
        contents: Of the table of contents.
        estimated: Whether no tokenizer was at hand.
    """

    sections: tuple[int, ...]
    contents: int
    estimated: bool

    @property
    def total(self) -> int:
        """Tokens of the whole prompt, apart from the chat template and the question."""
        return sum(self.sections) + self.contents


@dataclass(slots=True)
class Node:
    """A folder, a file, a heading or a section.

    Attributes:
        name: Its own.
        tokens: Its own and those below it.
        sections: Of a heading, those whose tokens these are.
    """

    name: str
    tokens: int = 0
    sections: list[Section] = field(default_factory=list)
    children: dict[str, Node] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name, and where all of it lies."""
        where = place(self.sections)
        return f"{self.name} ({where})" if where else self.name

    def child(self, key: str, name: str) -> Node:
        """Returns the child that is kept as `key`, made where it is missing."""
        return self.children.setdefault(key, Node(name))


def count_document(document: Document, count: CountTexts | None, *, tree_tokens: int) -> Counts:
    """Counts every section; with `count` None by estimate."""
    sections = (render_document_section(document, i).text for i in range(len(document.sections)))
    contents = contents_text(document, tree_tokens=tree_tokens)
    if count is None:
        return Counts(
            sections=tuple(map(estimate_tokens, sections)),
            contents=estimate_tokens(contents),
            estimated=True,
        )
    (of_contents,) = count([contents])
    return Counts(sections=tuple(count(sections)), contents=of_contents, estimated=False)


def build_tree(document: Document, counts: Counts) -> Node:
    """Returns the tree of folders, files and headings; the root is the whole document."""
    root = Node("total", tokens=counts.total)
    parents = {
        (section.file, section.titles[:depth])
        for section in document.sections
        for depth in range(1, len(section.titles))
    }
    for number, section in enumerate(document.sections):
        # Text right under a heading that has others below it belongs to that heading's own line.
        is_parent = (section.file, section.titles) in parents
        key = section.titles[-1] if is_parent else str(number)
        for node in _path(root, document, section, key):
            node.tokens += counts.sections[number]
    if counts.contents:
        root.child(CONTENTS, CONTENTS).tokens = counts.contents
    return root


def tree_lines(
    root: Node, *, max_children: int | None, open_from: float = 0.0
) -> Iterator[tuple[int, str]]:
    """Yields (tokens, label with its branch) of every node, biggest first below each parent.

    Args:
        root: The whole.
        max_children: Shown below each node; the smaller ones become one line "… 12 more".
        open_from: Nodes with a smaller share of the whole are shown without what is below them.
    """
    yield root.tokens, root.label
    stack = [(branch, node) for branch, node in reversed(list(_branches(root, "", max_children)))]
    while stack:
        branch, node = stack.pop()
        yield node.tokens, f"{branch}{node.label}"
        if node.tokens < open_from * root.tokens:
            continue
        below = branch.replace("├─ ", "│  ").replace("└─ ", "   ")
        stack.extend(reversed(list(_branches(node, below, max_children))))


def counts_json(document: Document, counts: Counts) -> dict[str, object]:
    """Returns the counts as JSON: files biggest first, their sections too."""
    files: list[dict[str, object]] = []
    for index, file in enumerate(document.files):
        numbers = [n for n, section in enumerate(document.sections) if section.file == index]
        sections = [
            {
                "titles": list(document.sections[number].titles),
                "place": place([document.sections[number]]),
                "tokens": counts.sections[number],
            }
            for number in sorted(numbers, key=lambda n: -counts.sections[n])
        ]
        total = sum(counts.sections[number] for number in numbers)
        path = None if file.path is None else str(file.path)
        files.append({"name": file.name, "path": path, "tokens": total, "sections": sections})
    files.sort(key=lambda entry: -int(str(entry["tokens"])))
    return {
        "tokens": counts.total,
        "estimated": counts.estimated,
        "contents_tokens": counts.contents,
        "files": files,
    }


def place(sections: Sequence[Section]) -> str:
    """Returns where sections of one file lie: "p. 3", "p. 3-9", "cell 2-5", "line 120"."""
    begins = next(filter(None, (section.begins() for section in sections)), "")
    marks = [mark.number for section in sections for mark in section.pages or section.cells]
    if marks and max(marks) != marks[0]:
        return f"{begins}-{max(marks)}"
    return begins


def _path(root: Node, document: Document, section: Section, key: str) -> Iterator[Node]:
    """Yields the nodes a section counts into, below the root; `key` is that of its own heading."""
    *folders, name = document.files[section.file].name.split("/")
    node = root
    for folder in folders:
        node = node.child(f"{folder}/", f"{folder}/")
        yield node
    node = node.child(name, name)
    yield node
    keys = [*section.titles[:-1], key]
    for title, at in zip(section.titles, keys, strict=False):  # no titles, no heading
        node = node.child(at, title)
        node.sections.append(section)
        yield node


def _branches(parent: Node, indent: str, max_children: int | None) -> Iterator[tuple[str, Node]]:
    nodes = sorted(parent.children.values(), key=lambda node: -node.tokens)
    if max_children is not None and len(nodes) > max_children:
        rest = nodes[max_children - 1 :]
        nodes = nodes[: max_children - 1]
        nodes.append(Node(f"… {len(rest)} more", sum(node.tokens for node in rest)))
    for number, node in enumerate(nodes, start=1):
        yield f"{indent}{'└─ ' if number == len(nodes) else '├─ '}", node

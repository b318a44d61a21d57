"""EPUB, in the reader process: the spine's documents in order, cut at the table of contents.

Messages: first `{"toc": [{"depth", "title", "file", "fragment"}], "num_documents"}`, then one per
document: `{"file", "text", "headings": [{"start", "depth", "title"}], "anchors"}` or
`{"file", "failed"}`.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tsdoc.errors import InputError
from tsdoc.ingest.archive import Archive
from tsdoc.ingest.frames import Begin, Message
from tsdoc.ingest.html import page_message
from tsdoc.ingest.options import Limits
from tsdoc.ingest.xml_tree import Node, parse_xml

_TocParser = Callable[[Node, str], list[Message]]

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
# These scramble fonts alone; the text is open.
_FONT_SCRAMBLING = ("http://www.idpf.org/2008/embedding", "http://ns.adobe.com/pdf/enc#RC")
_DOCUMENTS = (
    "application/xhtml+xml",
    "text/html",
    "application/x-dtbook+xml",
    "text/x-oeb1-document",
)


def read_epub(request: Message, begin: Begin) -> Iterator[Message]:
    """Reads an EPUB; see the module for the messages.

    Raises:
        InputError: no EPUB, DRM-protected, damaged, or too large when decompressed.
    """
    begin("opening", 0)
    archive = Archive(Path(request["path"]), Limits(**request["limits"]))
    package_name = _package_name(archive)
    package = parse_xml(archive.read(package_name), package_name)
    manifest = _manifest(package, posixpath.dirname(package_name))
    spine = _spine(package, manifest)
    _refuse_drm(archive, spine)
    failed = set(request["failed"])
    done = int(request["done"])
    if done == 0:
        toc: list[Message] = []
        if "contents" not in failed:
            begin("contents", 0)
            toc = _contents(archive, package, manifest)
        yield {"toc": toc, "num_documents": len(spine)}
    for name in spine[max(0, done - 1) :]:
        if name in failed:
            yield {"file": name, "failed": "could not be read"}
            continue
        begin(name, 0)
        try:
            yield {"file": name, **_document(archive, name, begin)}
        except InputError as error:
            yield {"file": name, "failed": error.message.removeprefix(f"{name} ")}


def _document(archive: Archive, name: str, begin: Begin) -> Message:
    data = archive.read(name)
    begin(name, len(data))
    page = page_message(data)
    del page["lines"]  # of a file inside the archive, which nobody opens
    return page


def _package_name(archive: Archive) -> str:
    if _CONTAINER not in archive:
        raise InputError("is not an EPUB (it has no META-INF/container.xml)")
    for root in parse_xml(archive.read(_CONTAINER), _CONTAINER).find("rootfile"):
        path = root.attributes.get("full-path")
        if path and path in archive:
            return path
    raise InputError("is not a complete EPUB (its package document is missing)")


def _resolve(base: str, href: str) -> tuple[str, str]:
    """Returns the member and the fragment that a link leads to."""
    try:
        parts = urlsplit(href)
    except ValueError:
        return href, ""
    path = unquote(parts.path)
    return posixpath.normpath(posixpath.join(base, path)).lstrip("/"), unquote(parts.fragment)


def _manifest(package: Node, base: str) -> dict[str, tuple[str, Node]]:
    """Returns id → (member, item)."""
    found = {}
    for item in package.find("item"):
        href, key = item.attributes.get("href"), item.attributes.get("id")
        if href and key:
            found[key] = (_resolve(base, href)[0], item)
    return found


def _spine(package: Node, manifest: dict[str, tuple[str, Node]]) -> list[str]:
    """Returns the members to read, in reading order, each once.

    Several spine items may lead to parts of one member; it is read where the first one stands.
    """
    names: dict[str, None] = {}
    for reference in package.find("itemref"):
        name, item = manifest.get(reference.attributes.get("idref", ""), ("", None))
        if item is not None and item.attributes.get("media-type", _DOCUMENTS[0]) in _DOCUMENTS:
            names.setdefault(name)
    if not names:
        raise InputError("is an EPUB without a readable spine")
    return list(names)


def _refuse_drm(archive: Archive, spine: list[str]) -> None:
    if _ENCRYPTION not in archive:
        return
    for entry in parse_xml(archive.read(_ENCRYPTION), _ENCRYPTION).find("EncryptedData"):
        methods = [m.attributes.get("Algorithm", "") for m in entry.find("EncryptionMethod")]
        if methods and all(method in _FONT_SCRAMBLING for method in methods):
            continue
        targets = [
            _resolve("", r.attributes.get("URI", ""))[0] for r in entry.find("CipherReference")
        ]
        if any(target in spine for target in targets):
            raise InputError("is DRM-protected: its text is encrypted for one reading program")


def _contents(
    archive: Archive, package: Node, manifest: dict[str, tuple[str, Node]]
) -> list[Message]:
    """Returns the entries of the table of contents, the newer kind first."""
    for name, item in manifest.values():
        if "nav" in item.attributes.get("properties", "").split():
            entries = _try(archive, name, _from_nav)
            if entries:
                return entries
    for name, item in manifest.values():
        if item.attributes.get("media-type") == "application/x-dtbncx+xml":
            entries = _try(archive, name, _from_ncx)
            if entries:
                return entries
    return []


def _try(archive: Archive, name: str, parse: _TocParser) -> list[Message]:
    """Returns a table of contents, or none if the file is missing or damaged."""
    try:
        return parse(parse_xml(archive.read(name), name), posixpath.dirname(name))
    except InputError:
        return []


def _from_nav(root: Node, base: str) -> list[Message]:
    navs = list(root.find("nav"))
    tocs = [nav for nav in navs if nav.attributes.get("type") == "toc"] or navs[:1]
    return [entry for nav in tocs[:1] for entry in _nav_list(nav, 1, base)]


def _nav_list(parent: Node, depth: int, base: str) -> Iterator[Message]:
    for item in parent.elements():
        if item.name in ("a", "span") and parent.name == "li":
            yield _entry(depth - 1, item.text(), item.attributes.get("href"), base)
        elif item.name == "ol":
            for line in item.elements():
                yield from _nav_list(line, depth + 1, base)
        elif item.name not in ("a", "span"):
            yield from _nav_list(item, depth, base)


def _from_ncx(root: Node, base: str) -> list[Message]:
    return [entry for nav in root.find("navMap") for entry in _nav_points(nav, 1, base)]


def _nav_points(parent: Node, depth: int, base: str) -> Iterator[Message]:
    for point in parent.elements():
        if point.name != "navPoint":
            continue
        title, target = "", None
        for child in point.elements():
            if child.name == "navLabel":
                title = child.text()
            elif child.name == "content":
                target = child.attributes.get("src")
        yield _entry(depth, title, target, base)
        yield from _nav_points(point, depth + 1, base)


def _entry(depth: int, title: str, href: str | None, base: str) -> Message:
    name, fragment = ("", "") if href is None else _resolve(base, href)
    return {"depth": depth, "title": title, "file": name, "fragment": fragment}

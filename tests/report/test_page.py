"""A page shows hostile text as text, embeds it as data, and admits nothing but its own script."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import jinja2
import pytest
from markupsafe import Markup

from tsdoc.errors import ResourceError, UsageError
from tsdoc.report import check_target, page, render_page, write_page

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \u2028\u2029 \u202e \"'&"
TEMPLATE = """{% extends "base.html" %}
{% block content %}<h1>{{ title }}</h1><p title="{{ data.text }}">{{ data.text }}</p>
{% for figure in figures %}{{ figure }}{% endfor %}{% endblock %}
"""


class Elements(HTMLParser):
    """Every element with its attributes, and the text inside of scripts, styles and the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {}
        self._open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.inside.setdefault(self._open, []).append(data)


@pytest.fixture
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for asset in page.TEMPLATES.glob("base.*"):
        (tmp_path / asset.name).write_bytes(asset.read_bytes())
    (tmp_path / "trial.html").write_text(TEMPLATE, encoding="utf-8")
    monkeypatch.setattr(page, "TEMPLATES", tmp_path)
    return tmp_path


def parse(text: str) -> Elements:
    elements = Elements()
    elements.feed(text)
    elements.close()
    return elements


def rendered(text: str = HOSTILE, **figures: object) -> str:
    return render_page("trial", title=text, data={"text": text}, **{"figures": [], **figures})


def test_hostile_text_makes_no_element_and_stays_readable(templates: Path) -> None:
    elements = parse(rendered())
    names = [name for name, _ in elements.found]
    assert names.count("script") == 2  # data and the page's own
    assert "img" not in names
    (shown,) = elements.inside["p"]
    assert "</script><script>alert(1)</script>" in shown
    assert r"\u2028\u2029 \u202e" in shown
    assert dict(elements.found)["p"]["title"] == shown


def test_embedded_data_comes_back_as_it_was(templates: Path) -> None:
    elements = parse(rendered())
    embedded, own = elements.inside["script"]
    assert json.loads(embedded) == {"text": HOSTILE}
    assert not set("<>&\u2028\u2029\u202e") & set(embedded)
    assert "alert" not in own


def test_the_policy_admits_this_style_and_script_alone(templates: Path) -> None:
    (templates / "trial.css").write_text("p { color: red; }\n", encoding="utf-8")
    (templates / "trial.js").write_text("console.log(1 < 2 && 'ready');\n", encoding="utf-8")
    elements = parse(rendered())
    (policy,) = [
        attributes["content"] or ""
        for name, attributes in elements.found
        if name == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for kind, text in (
        ("style", elements.inside["style"][0]),
        ("script", elements.inside["script"][1]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "color: red" in elements.inside["style"][0]
    assert "1 < 2 && 'ready'" in elements.inside["script"][1]


def test_the_page_refers_to_nothing_outside(templates: Path) -> None:
    text = rendered("harmless")
    assert not re.search(r"https?:|//[a-z]|@import|url\(", text.replace("// Whatever", ""))
    assert not {"src", "href", "style", "onclick"} & {
        attribute for _, attributes in parse(text).found for attribute in attributes
    }


def test_only_markup_of_ours_is_taken_as_it_is(templates: Path) -> None:
    text = rendered("x", figures=[Markup("<svg></svg>"), "<svg><script/></svg>"])
    elements = parse(text)
    assert [name for name, _ in elements.found].count("svg") == 1
    assert "&lt;svg&gt;&lt;script/&gt;" in text


def test_a_value_that_is_missing_is_an_error(templates: Path) -> None:
    with pytest.raises(jinja2.UndefinedError):
        render_page("trial", title="x", data={}, figures=[])


def test_numbers_that_json_has_not_are_refused(templates: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        rendered(float("nan"))  # type: ignore[arg-type]


def test_a_page_is_written_as_utf8(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    check_target(target)
    write_page(target, "é\n")
    assert target.read_bytes() == b"\xc3\xa9\n"


def test_a_target_that_cannot_be_is_refused_before(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="standard output has the answer"):
        check_target(Path("-"))
    with pytest.raises(UsageError, match="directory"):
        check_target(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        check_target(tmp_path / "missing" / "page.html")
    with pytest.raises(UsageError, match="cannot be written"):
        write_page(tmp_path / "missing" / "page.html", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_a_matter_of_resources() -> None:
    with pytest.raises(ResourceError, match=os.strerror(28)):
        write_page(Path("/dev/full"), "x" * 100_000)


def test_only_pages_of_its_own_and_empty_files_are_replaced(templates: Path) -> None:
    target = templates / "page.html"
    target.touch()
    check_target(target)
    write_page(target, rendered())
    check_target(target)
    target.write_text("<!doctype html><p>A source, whose name was mistyped.</p>")
    with pytest.raises(UsageError, match="no page that tsdoc wrote"):
        check_target(target)


def test_a_page_that_may_not_be_written_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UsageError, match="no permission"):
        check_target(tmp_path / "page.html")

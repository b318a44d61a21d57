"""What options say of themselves."""

from __future__ import annotations

from typing import Any

import pytest

from tsdoc.ingest.options import LAST_PAGE, IngestOptions


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"strict": True, "password": "secret"}, ""),
        ({"pages": ((1, 5), (7, 7), (9, LAST_PAGE))}, "pages 1-5, 7, 9-"),
        ({"section": "Scope", "include": ("*.md",)}, "section Scope; only *.md"),
        ({"exclude": ("a", "b/")}, "without a; without b/"),
    ],
)
def test_a_part_is_named(options: dict[str, Any], said: str) -> None:
    assert IngestOptions(**options).part == said

"""Runs under the conditions that the `tsdoc` command makes for torch before it is imported."""

import os

from tsdoc.__main__ import SUITED

for name, value in SUITED.items():
    os.environ.setdefault(name, value)

"""tsdoc: ask questions of whole books, repositories and PDFs."""

__version__ = "0.1.0"

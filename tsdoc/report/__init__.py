"""Self-contained HTML pages: what is shown executes nothing, and nothing is fetched."""

from tsdoc.report.page import check_target, render_page, write_page

__all__ = ["check_target", "render_page", "write_page"]

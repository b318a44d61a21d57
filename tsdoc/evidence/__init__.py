"""From what a model looked at, token by token, to passages of the document and their places."""

from tsdoc.evidence.find import find_evidence
from tsdoc.evidence.results import Coverage, Evidence, Passage

__all__ = ["Coverage", "Evidence", "Passage", "find_evidence"]

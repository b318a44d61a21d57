"""From sources to answers: what `tsdoc ask` does, as a library.

open_session   locate the model → read sources (or their record) → prompt → limits
prepare        find the prompt's KV in the store, or prefill and keep it
ask            question behind the prompt → answer, streamed
Conversation   questions behind one another, kept under a name
summary        a document, or its parts one by one, in a few sentences with their places
"""

from tsdoc.session.conversation import Conversation
from tsdoc.session.opening import open_session
from tsdoc.session.results import Answer, Estimate, Outcome, Prepared
from tsdoc.session.session import Session

__all__ = [
    "Answer",
    "Conversation",
    "Estimate",
    "Outcome",
    "Prepared",
    "Session",
    "open_session",
]

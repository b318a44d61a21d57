"""KV pages on disk: found by what they hold, committed block by block, checked before use."""

from tsdoc.store.entry import Entry
from tsdoc.store.key import PAGE_SIZE, KVShape, ModelKey
from tsdoc.store.listing import EntryInfo
from tsdoc.store.repair import Repair
from tsdoc.store.store import Match, Store
from tsdoc.store.writer import Writer

__all__ = [
    "PAGE_SIZE",
    "Entry",
    "EntryInfo",
    "KVShape",
    "Match",
    "ModelKey",
    "Repair",
    "Store",
    "Writer",
]

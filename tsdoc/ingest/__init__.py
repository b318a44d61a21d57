"""Readers: from paths to a `Document` whose every character knows its source."""

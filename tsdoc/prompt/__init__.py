"""From a `Document` to token ids, and from token ids back to places in the document."""

"""The TokenSelect engine: decoder, selection, chunked prefill and generation."""

"""KV pages on disk: found by what they hold, committed block by block, checked before use."""

"""Ranks as processes: the leader starts the others, and they repeat what it does."""

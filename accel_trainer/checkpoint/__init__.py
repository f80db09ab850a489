"""Checkpoints: written by every rank, committed atomically, read back on any number of ranks."""

"""Fully sharded data parallel with torch's `fully_shard` (FSDP2)."""

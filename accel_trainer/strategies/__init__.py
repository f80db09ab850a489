"""Strategies: one process, replicas (DDP), shards (FSDP2), and the contract that every engine implements."""

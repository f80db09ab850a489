"""The DeepSpeed block of a configuration: its keys, its place among the levels, its translation to FSDP2."""

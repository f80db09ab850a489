"""The DeepSpeed block of a configuration: its keys, its merging over the levels, its translation to FSDP2."""

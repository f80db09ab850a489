"""Layers and sequences that ranks compute together: tensor, expert and sequence parallelism."""

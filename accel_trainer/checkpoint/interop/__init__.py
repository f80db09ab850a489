"""Checkpoints of other libraries, read and written: accelerate's, torch.distributed.checkpoint's, transformers'."""

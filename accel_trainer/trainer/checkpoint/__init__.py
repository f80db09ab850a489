"""The Trainer's `checkpoint-N` directories: upstream's file names on top of the checkpoint store."""

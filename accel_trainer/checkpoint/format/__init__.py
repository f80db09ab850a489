"""The files of a checkpoint: manifest, checksums, safetensors, JSON, and the boxes of sharded tensors."""

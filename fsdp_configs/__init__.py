"""Ready-made configurations; each file is usable by its name without suffix: `config="full_shard"`."""

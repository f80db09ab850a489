"""State of modules and optimizers by parameter name: gathered, or in shards for any number of ranks."""

"""Ready-made configurations, usable by name: `Accelerator(config="full_shard")` or `fsdp_config="full_shard"`."""

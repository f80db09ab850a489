"""The spellings of a configuration: our own file, accelerate's, Hugging Face's FSDP options, the environment."""

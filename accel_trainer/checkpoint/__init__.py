"""What is written, and how it is read back on any number of ranks."""

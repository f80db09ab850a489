"""Which rank reads which sample, and which rows are padding."""

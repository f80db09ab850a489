"""YAML and JSON into documents whose values remember their line."""

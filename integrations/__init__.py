"""Adapters to other libraries, one folder each. Nothing imports this package: the registry has its names."""

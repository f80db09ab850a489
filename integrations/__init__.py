"""Adapters to other libraries, one role a file. Nothing imports this package: the registry names what it holds."""

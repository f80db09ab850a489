"""Typed configuration and where each value came from. Imports no torch."""

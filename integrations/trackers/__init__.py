"""Experiment trackers: one file for each, imported when a run asks for it."""

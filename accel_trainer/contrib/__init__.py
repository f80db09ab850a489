"""Companions of a run, without which every run is the same.

Nothing imports it: the command line and the Trainer find what they call by names in strings.
"""

"""Companions of a run, which the command line and the Trainer find by names in strings: nothing imports them."""

"""The page of a run, or of several: curves, final figures, configuration. Needs no torch, and no network."""

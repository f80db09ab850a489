"""The page of a run: its curves, its figures, where its time went, and who set which option."""

"""Odd models, loops, batches and Trainers on every strategy, beside a plain PyTorch loop: `python -m tests.odd`."""

from tests.odd import batches, loops, models, trainers
from tests.odd.loop import THINGS

__all__ = ["THINGS", "batches", "loops", "models", "trainers"]

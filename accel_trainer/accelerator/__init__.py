"""The Accelerator: the object that a native PyTorch loop, and the Trainer, drive.

`accelerator.py` composes the class from one file per group of methods: preparing, stepping, gathering, checkpointing,
trackers; `settings.py` is their common base, and `prepared.py` the one object that they share. None of them knows an
engine: they call the contract of `strategies/api.py`. Scripts import the names below from `accel_trainer`, or from the
public modules of the root (`state`, `optimizer`, `scheduler`, `utils`).
"""

from accel_trainer.accelerator.accelerator import Accelerator
from accel_trainer.plugins.kwargs import DataLoaderConfiguration, GradientAccumulationPlugin

__all__ = ["Accelerator", "DataLoaderConfiguration", "GradientAccumulationPlugin"]

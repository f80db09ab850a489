"""Random streams: seeding, and their state as plain data."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from accel_trainer.runtime.process import current_process

__all__ = ["get_rng_state", "set_rng_state", "set_seed"]


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False, *, rank: int | None = None) -> None:
    """Seed Python's, NumPy's and torch's generators (CPU and accelerators).

    Args:
        seed: the same on every rank, so that models are initialised alike.
        device_specific: add the rank to the seed, so that dropout and augmentation differ from rank to rank.
        deterministic: use deterministic kernels only; an operation without one raises.
        rank: this process's rank; None asks the job that it has joined.

    Raises:
        ProcessGroupError: with `device_specific`, a launcher started this process and it has not joined its job.
    """
    value = seed
    if device_specific:
        value += current_process().rank if rank is None else rank
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def get_rng_state() -> dict[str, Any]:
    """Return the state of this process's random streams: Python's, NumPy's, torch's and the accelerator's."""
    name, keys, *rest = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {"name": name, "keys": torch.from_numpy(np.array(keys, dtype=np.int64)), "rest": rest},
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the random streams back to what `get_rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy_state = state["numpy"]
    np.random.set_state((numpy_state["name"], numpy_state["keys"].numpy().astype(np.uint32), *numpy_state["rest"]))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])

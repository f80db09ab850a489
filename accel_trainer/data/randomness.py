"""Random numbers that ranks must draw alike: a private copy of the process's global streams."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["PrivateStreams"]


def _states() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    return random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None


def _restore(states: tuple[Any, torch.Tensor, Any]) -> None:
    python_state, torch_state, numpy_state = states
    random.setstate(python_state)
    torch.set_rng_state(torch_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


class PrivateStreams:
    """A context in which Python's, NumPy's and torch's CPU streams are private ones that begin at a seed.

    It can be entered again and again: the private streams go on where the last block left them, and the global ones
    never notice.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._mine: tuple[Any, torch.Tensor, Any] | None = None
        self._outer: tuple[Any, torch.Tensor, Any] | None = None

    def __enter__(self) -> None:
        self._outer = _states()
        if self._mine is not None:
            _restore(self._mine)
            return
        random.seed(self._seed)
        torch.default_generator.manual_seed(self._seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(self._seed % 2**32)

    def __exit__(self, *exception: object) -> None:
        self._mine = _states()
        assert self._outer is not None
        _restore(self._outer)

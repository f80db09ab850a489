"""Hooks for errors that nobody has caught, each put around those before it once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

# The attribute of our hooks that has the names of all within: the outermost one is all that `sys` knows. A mark on each
# hook alone was hidden by the next one, and a second of the same kind came on top.
_NAMES = "accel_trainer_hooks"


def add_hook(name: str, make: Callable[[Hook], Hook]) -> None:
    """Put the hook that `make` returns, given the present one, around that; nothing where one of this name is there."""
    previous: Hook = sys.excepthook
    names: frozenset[str] = getattr(previous, _NAMES, frozenset())
    if name not in names:
        hook = make(previous)
        setattr(hook, _NAMES, names | {name})
        sys.excepthook = hook

"""Named points of a save, a load and a gather, at which tests make a rank fail, die or stand still."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Hook = Callable[[str, int | None, Path | None], None]
_hook: Hook | None = None


def fault_point(name: str, step: int | None = None, path: Path | None = None) -> None:
    """Call the hook of a test, if there is one, with the number of the checkpoint and the file just written."""
    if _hook is not None:
        _hook(name, step, path)


def set_fault_hook(hook: Hook | None) -> None:
    """Have every point call `hook`; None is none. Nothing of the library calls this."""
    global _hook
    _hook = hook

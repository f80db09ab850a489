"""Progress bars: one for the job, not one for each rank."""

from __future__ import annotations

from typing import Any

from accel_trainer.logging import current_rank

__all__ = ["tqdm"]


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's bar, for a notebook or a terminal; on other ranks than 0 it iterates without showing anything.

    Args:
        main_process_only: False shows a bar on every rank.
    """
    from tqdm.auto import tqdm as bar

    if main_process_only and current_rank() != 0:
        kwargs["disable"] = True
    return bar(*args, **kwargs)

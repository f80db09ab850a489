"""One rank's failure becomes everyone's, so that nobody waits for a rank that has raised."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["shared_fate"]


@contextmanager
def shared_fate(process: ProcessContext, section: str) -> Iterator[None]:
    """Run a block on every rank, and raise on every rank if one of them raised.

    Collective: every rank enters it; at its end the ranks vote, and an error is a vote. Use it around work that is
    local to a rank (files, user callbacks): a block in which ranks communicate can already be out of step.

    Args:
        section: what is being done, for the message: "save", "load".

    Raises:
        ProcessGroupError: another rank failed; the message has its number, the section and its error.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as raised:
        error = raised
    if process.is_distributed:
        votes: list[str | None] = [None] * process.world_size
        vote = None if error is None else "".join(traceback.format_exception_only(error)).strip()
        dist.all_gather_object(votes, vote)
        failed = {rank: message for rank, message in enumerate(votes) if message is not None}
        if failed and error is None:
            lines = "; ".join(f"rank {rank} failed in {section}: {message}" for rank, message in failed.items())
            raise ProcessGroupError(
                f"{lines}. This rank ({process.rank}) stopped with it; nothing of {section} was published"
            )
    if error is not None:
        raise error

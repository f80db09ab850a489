"""Errors raised on all ranks together, so that none waits for a rank that has raised."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from accel_trainer.errors import ProcessGroupError
from accel_trainer.runtime.process import ProcessContext

__all__ = ["gather_or_raise", "raise_together"]


def gather_or_raise(
    process: ProcessContext,
    section: str,
    error: BaseException | None,
    value: Any = None,
    group: dist.ProcessGroup | None = None,
) -> list[Any]:
    """Return the values of all ranks; raise on every rank if one of them failed.

    Collective: a rank that failed calls it too, with its error, which is raised after the exchange.

    Args:
        section: name of the work, for the message: "save", "load".
        value: this rank's value, picklable.
        group: the ranks that take part; all of the job when None. A thread needs a group of its own.

    Raises:
        ProcessGroupError: another rank failed; the message has its number, the section and its error.
    """
    votes: list[Any] = [(None, value)]
    if process.is_distributed:
        votes = [None] * process.world_size
        message = None if error is None else "".join(traceback.format_exception_only(error)).strip()
        dist.all_gather_object(votes, (message, value if error is None else None), group=group)
        failed = {rank: message for rank, (message, _) in enumerate(votes) if message is not None}
        if failed and error is None:
            lines = "; ".join(f"rank {rank} failed in {section}: {message}" for rank, message in failed.items())
            raise ProcessGroupError(
                f"{lines}. This rank ({process.rank}) stopped with it; nothing of {section} was published"
            )
    if error is not None:
        raise error
    return [said for _, said in votes]


@contextmanager
def raise_together(process: ProcessContext, section: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on every rank, and raise on every rank if one of them raised.

    Collective: every rank enters it, and the ranks exchange their errors at its end. Use it around work that is local
    to a rank (files, user callbacks): a block in which ranks communicate can already be out of step. `section`, `group`
    and the error are those of `gather_or_raise`.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit) as raised:
        error = raised
    gather_or_raise(process, section, error, group=group)

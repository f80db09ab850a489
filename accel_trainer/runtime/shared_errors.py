"""Errors raised on all ranks together, so that none waits for a rank that has raised."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from accel_trainer.errors import RemoteRankError
from accel_trainer.runtime.collective_checks import raise_difference, recording_watch
from accel_trainer.runtime.own_watch import names_failed_rank
from accel_trainer.runtime.process import ProcessContext

T = TypeVar("T")


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
        value: picklable.
        group: the ranks that take part; all of the job when None. A thread needs a group of its own.

    Raises:
        RemoteRankError: another rank failed; the message has its number, the section and its error.
        DesyncError: the ranks have called different collectives before; see `collective_checks`.
    """
    if not process.is_distributed:
        if error is not None:
            raise error
        return [value]
    # A thread of its own votes at any time of the loop's.
    watch = recording_watch(process) if group is None else None
    message = None if error is None else "".join(traceback.format_exception_only(error)).strip()
    digest = watch.calls.digest if watch is not None else 0
    votes = _gather_votes(process, (message, value if error is None else None, digest), group)
    # Before those of others: the rank on which it happened shows its own traceback.
    if error is not None:
        raise error
    _raise_for_others(process, section, votes)
    if watch is not None and len({digest for _, _, digest in votes}) > 1:
        raise_difference(watch, section)
    return [said for _, said, _ in votes]


def gather_calls(process: ProcessContext, section: str, call: Callable[[], T]) -> list[T]:
    """Return the results of `call`, local to a rank, on all ranks; errors as of `gather_or_raise`. Collective."""
    value, error = None, None
    try:
        value = call()
    except Exception as raised:
        error = raised
    return gather_or_raise(process, section, error, value)


def _raise_for_others(process: ProcessContext, section: str, votes: list[Any]) -> None:
    failed = [f"rank {rank} failed in {section}: {text}" for rank, (text, *_) in enumerate(votes) if text is not None]
    if failed:
        raise RemoteRankError(
            f"{'; '.join(failed)}. This rank ({process.rank}) stopped with it; nothing of {section} was published"
        )


@names_failed_rank
def _gather_votes(process: ProcessContext, vote: Any, group: dist.ProcessGroup | None) -> list[Any]:
    votes: list[Any] = [None] * process.world_size
    dist.all_gather_object(votes, vote, group=group)
    return votes


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
    # sys.exit() of a callback, too: the others would wait for a rank that has gone. Not ctrl-C, which comes to all.
    except (Exception, SystemExit) as raised:
        error = raised
    gather_or_raise(process, section, error, group=group)

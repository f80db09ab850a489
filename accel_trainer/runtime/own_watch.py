"""The rank watch of this process: who starts, asks and ends it, and errors that it tells, or tells the reason of."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, TypeVar

from accel_trainer.config import HangConfig
from accel_trainer.errors import DesyncError, HangError, NonFiniteError
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rank_watch import RankWatch, is_outlived
from accel_trainer.runtime.slow_ranks import PhaseSampler
from accel_trainer.runtime.torch_private import group_timeout, second_store

F = TypeVar("F", bound=Callable[..., Any])
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

# The attribute of our hooks that has the names of all within: the outermost one is all that `sys` knows. A mark on each
# hook alone was hidden by the next one, and a second of the same kind came on top.
_HOOK_NAMES = "accel_trainer_hooks"

_watch: RankWatch | None = None


def current_watch() -> RankWatch | None:
    """Return the watch of this process; None where it is alone, or has left its job."""
    return _watch


@contextmanager
def unwatched() -> Iterator[None]:
    """Have no watch in the block for those that ask for it; it watches all the same."""
    global _watch
    watch, _watch = _watch, None
    try:
        yield
    finally:
        _watch = watch


def sample_phases() -> PhaseSampler | None:
    """Return the sampler of this rank's loop, which begins with the first call; None where nobody watches."""
    return None if _watch is None else _watch.sample_phases()


def start_watch(
    rank: int, world_size: int, hang: HangConfig | None, *, hosts_store: bool, runs_ahead: bool = False
) -> None:
    """Watch over the job that this process has joined; one of one rank needs nobody. Every rank calls it.

    The arguments are those of `RankWatch`; `hang` of None leaves it, at the defaults to begin with.
    """
    global _watch
    if world_size == 1:
        return
    # A search for a batch size may have left that group for a new one.
    if _watch is not None and not _watch.is_current:
        _watch.close()
        _watch = None
    if _watch is None:
        store = second_store()
        if store is None:
            return
        PROGRESS.updates = 0
        _watch = RankWatch(store, rank, world_size, hang or HangConfig(), hosts_store=hosts_store)
        _watch.runs_ahead = runs_ahead
        _hook_errors()
    _watch.timeout_seconds = group_timeout().total_seconds()
    if hang is not None:
        _watch.pace.hang = hang


def leave_watch() -> None:
    """Watch no more, without a word to the others: they meet again in another group."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None:
        watch.close()


def stop_watch() -> None:
    """Watch no more: this rank leaves the job."""
    global _watch
    watch, _watch = _watch, None
    if watch is not None and watch.is_own_process:
        watch.tell_end()
        watch.close()


# At an error process.py does not leave the group at exit: the others learn from this that the rank goes.
atexit.register(stop_watch)


@contextmanager
def failing_together() -> Iterator[None]:
    """Tell the others of an error that leaves the block, and raise theirs in the place of a connection that broke.

    For calls as long as a training: whatever fails in them is written down for the others, who learn of it when they
    next wait for this rank. Ranks do not communicate.

    Raises:
        RemoteRankError: another rank has failed or is gone, and this one's collective broke.
        HangError: a collective timed out.
    """
    watch = _watch
    if watch is None:
        yield
        return
    is_outermost, watch.is_guarded = not watch.is_guarded, True
    if is_outermost:
        # Whoever begins another call has caught the error of the last one.
        watch.withdraw()
    try:
        yield
    except Exception as error:
        if is_outlived(error):
            raise  # whoever begins the update again, or the evaluation, is further out
        theirs = watch.explain(error)
        if is_outermost:
            watch.tell(theirs or error, is_final=False)
        if theirs is not None:
            raise theirs from None
        raise
    finally:
        watch.is_guarded = not is_outermost


@contextmanager
def unexplained_errors() -> Iterator[None]:
    """Leave errors of broken connections as they are in the block, for a caller who can tell their reason."""
    watch = _watch
    if watch is not None:
        watch.is_muted = True
    try:
        yield
    finally:
        if watch is not None:
            watch.is_muted = False


def tell_soon(name: str, value: bool) -> list[bool | None]:
    """Return each rank's value, as `RankWatch.tell_soon`; this rank's alone where nobody watches."""
    return [value] if _watch is None else _watch.tell_soon(name, value)


def raise_if_theirs(error: BaseException) -> None:
    """Raise the error of the rank that a broken collective is due to; return where `error` is this rank's own."""
    if is_outlived(error):
        return
    theirs = None if _watch is None or _watch.is_muted else _watch.explain(error)
    if theirs is not None:
        raise theirs from None


def names_failed_rank(function: F) -> F:
    """Have a collective raise, where its connections break, the error of the rank that is the reason. Decorator."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise_if_theirs(error)
            raise

    return call  # type: ignore[return-value]


def _hook_errors() -> None:
    """Tell the others of an error that nobody has caught, before it is printed."""

    def make(previous: Hook) -> Hook:
        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            watch = _watch
            if watch is not None and watch.is_own_process:
                theirs = watch.explain(error)
                watch.tell(theirs or error, is_final=True)
                if theirs is not None:
                    theirs.__suppress_context__ = True
                    kind, error, trace = type(theirs), theirs, trace
            previous(kind, error, trace)

        return report

    # Within the hook of this rank, which may print another rank's error in the place of its own.
    end_with_exit_codes()
    add_hook("errors for other ranks", make)


def end_with_exit_codes() -> None:
    """Have an error that nobody catches end the process with its `exit_code`, if its class has one."""

    def make(previous: Hook) -> Hook:
        def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous(kind, error, trace)
            if isinstance(error, HangError | DesyncError | NonFiniteError):
                raise SystemExit(error.exit_code)

        return report

    add_hook("exit codes", make)


def add_hook(name: str, make: Callable[[Hook], Hook]) -> None:
    """Put a hook for errors that nobody has caught around the present one, once.

    Args:
        name: where a hook of this name is there, nothing happens.
        make: returns the hook, given the present one.
    """
    previous: Hook = sys.excepthook
    names: frozenset[str] = getattr(previous, _HOOK_NAMES, frozenset())
    if name not in names:
        hook = make(previous)
        setattr(hook, _HOOK_NAMES, names | {name})
        sys.excepthook = hook

"""When memory runs out: release models and caches, and search for a batch size that fits, on all ranks together."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from accel_trainer import logging
from accel_trainer.errors import BatchSizeError, ConfigError, ProcessGroupError, UnsupportedTypeError
from accel_trainer.runtime.own_watch import current_watch, raise_if_theirs, start_watch, unexplained_errors
from accel_trainer.runtime.rank_watch import left_with
from accel_trainer.runtime.torch_private import (
    clear_dtensor_caches,
    default_group,
    default_store,
    forget_default_groups,
    group_device_types,
    group_timeout,
    joined_groups,
    second_store,
)

logger = logging.get_logger(__name__)

_MESSAGES = (
    "out of memory",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN finds no algorithm for the memory that is left
    "can't allocate memory",  # DefaultCPUAllocator
)
_WATCH_SECONDS = 0.5
_DONE, _OUT_OF_MEMORY, _STOPPED, _FAILED = "done", "out of memory", "stopped", "failed: "

_searches = itertools.count()
_owners: weakref.WeakSet[Any] = weakref.WeakSet()

groups_left_behind: list[dist.ProcessGroup] = []
"""Groups of models that are gone, kept for a better moment to end; a search ends them, by which its ranks leave."""


def register_memory_owner(owner: Any) -> None:
    """Have `owner.free_memory()` called, as long as it lives, when a search for a batch size begins a new attempt."""
    _owners.add(owner)


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether `exception` says that memory, of the device or of the machine, ran out."""
    if isinstance(exception, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exception, RuntimeError) and any(message in str(exception) for message in _MESSAGES)


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return cached, unused memory to the accelerator; on request, collect cycles first, which may hold tensors."""
    if garbage_collection:
        gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def available_host_bytes() -> int:
    """Return the bytes of host memory that this process could take now without swapping; a container's bound counts.

    Without `/proc` (macOS), all memory of the machine; `sys.maxsize`, so no bound, where the system tells none.
    """
    available = mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else sys.maxsize
    with suppress(OSError, ValueError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        available = int(fields["MemAvailable"].split()[0]) * 1024
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The kernel counts the cache of files as used, and takes its inactive part back before memory runs out.
        used = int((group / "memory.current").read_text()) - int(statistics["inactive_file"])
        available = min(available, int((group / "memory.max").read_text()) - used)  # "max" is no number
    return available


def release_memory(*objects: Any) -> list[None]:
    """Clear the device's cache and return a None to overwrite each object's name; a second call frees the rest."""
    clear_device_cache(garbage_collection=True)
    return [None] * len(objects)


def memory_in_use(device: torch.device) -> int | None:
    """Return the bytes of tensors on an accelerator, or of this process on a CPU; None where nobody counts them."""
    if device.type != "cpu":
        with suppress(RuntimeError):
            return torch.accelerator.memory_allocated(device)
        return None
    with suppress(OSError):  # Linux has it
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    return None


def peak_memory(device: torch.device) -> int | None:
    """Return the most that `memory_in_use` has been, since the process began or somebody reset the count, or None."""
    if device.type != "cpu":
        with suppress(RuntimeError):
            return torch.accelerator.max_memory_allocated(device)
        return None
    try:
        import resource
    except ImportError:  # not Unix
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # KiB on Linux


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorate a function so that it is called again with a smaller batch size until memory suffices.

    The function takes the batch size as its first argument, which callers leave out. Begin it with
    `accelerator.free_memory()`, and build model, optimizer and loaders inside it: nothing of an attempt survives it.

    Collective on several ranks: every rank calls it. When one rank runs out of memory, all try the smaller size. Those
    that wait for it in a collective of gloo learn of it at once. Those in one of nccl abort all groups within a second.
    Ranks join a new process group for the next attempt; groups that the user made are gone.

    Args:
        function: the function; None when used as a decorator with options.
        starting_batch_size: the size that every call tries first.
        reduce_batch_size_fn: returns the next size; called with the last one if it takes an argument. The default is
            nine tenths, rounded down.

    Raises:
        BatchSizeError: when called: memory ran out with a batch size of 1 too. Another error of the function is raised
            at once.
        UnsupportedTypeError: the caller passed the first argument.
        ProcessGroupError: another rank failed with an error of another kind.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )

    @functools.wraps(function)
    def search(*args: Any, **kwargs: Any) -> Any:
        _check_call(function, args, kwargs)
        if starting_batch_size < 1:
            raise BatchSizeError(
                f"no executable batch size for {_name(function)}(): starting_batch_size={starting_batch_size}; begin "
                "with 1 or more"
            )
        number = next(_searches)
        batch_size = starting_batch_size
        for attempt in itertools.count():
            clear_device_cache(garbage_collection=True)
            call = functools.partial(function, batch_size, *args, **kwargs)
            is_done, result = _attempt(call, f"batch size search {number}.{attempt}")
            if is_done:
                return result
            smaller = _reduce(batch_size, reduce_batch_size_fn)
            if smaller < 1:
                break
            logger.warning("memory ran out with a batch size of %d; trying %d", batch_size, smaller)
            batch_size = smaller
        raise BatchSizeError(
            f"no executable batch size: none from {starting_batch_size} down to {batch_size} lets {_name(function)}() "
            "run, memory ran out each time; use a smaller model, activation checkpointing, or sharding over more "
            "processes"
        )

    return search


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _check_call(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call that leaves no first argument for the batch size."""
    try:
        inspect.signature(function).bind(0, *args, **kwargs)
    except TypeError as error:
        given = ", ".join([*map(_short, args), *(f"{name}={_short(value)}" for name, value in kwargs.items())])
        raise UnsupportedTypeError(
            f"{_name(function)}({given}) cannot be called with the batch size in front ({error}); "
            "find_executable_batch_size passes it as the first argument: declare it there, and leave it out of the call"
        ) from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _reduce(batch_size: int, function: Callable[..., int] | None) -> int:
    if function is None:
        return int(batch_size * 0.9)
    smaller = int(function(batch_size) if inspect.signature(function).parameters else function())
    if smaller >= batch_size:
        raise ConfigError(
            f"{_name(function)} returned {smaller} after a batch size of {batch_size}; return a smaller one, or 0 to "
            "stop"
        )
    return smaller


def _call(function: Callable[[], Any], name: str) -> tuple[str, Any]:
    """Call the function; return this rank's vote, and the result."""
    # A function of its own: the traceback of an error holds the failed step's tensors until this frame is left.
    try:
        return _DONE, function()
    except Exception as error:
        if is_out_of_memory(error):
            return _OUT_OF_MEMORY, None
        if not _is_joined():
            raise
        ballot = _Ballot(name)
        # A rank that ran out of memory has left, and this one's collective with it failed.
        if isinstance(error, RuntimeError) and ballot.is_cast(_OUT_OF_MEMORY):
            return _STOPPED, None
        ballot.cast(f"{_FAILED}{type(error).__name__}: {error}")
        raise


def _attempt(function: Callable[[], Any], name: str) -> tuple[bool, Any]:
    """Call the function; return whether memory sufficed on every rank, and the result. Collective."""
    if not _is_joined():
        vote, result = _call(function, name)
        return vote == _DONE, result
    ballot = _Ballot(name)
    # A rank that runs out of memory leaves, and the votes tell it from one that failed.
    released = _released_with_others(ballot) if ballot.aborts else nullcontext()
    try:
        with unexplained_errors(), left_with(lambda: ballot.is_cast(_OUT_OF_MEMORY)), released:
            vote, result = _call(function, name)
    except RuntimeError as error:
        raise_if_theirs(error)
        raise
    ballot.cast(vote)
    if vote == _OUT_OF_MEMORY:
        # In this order: a model that refers to the group keeps its connections open, and the others wait in them.
        _release_all()
        ballot.leave()
    votes = ballot.wait()
    failed = {rank: text.removeprefix(_FAILED) for rank, text in enumerate(votes) if text.startswith(_FAILED)}
    if failed:
        lines = "; ".join(f"rank {rank} failed: {message}" for rank, message in failed.items())
        raise ProcessGroupError(f"{lines}. This rank ({ballot.rank}) stopped with it; see the output of that rank")
    if votes == [_DONE] * len(votes):
        return True, result
    # Memory sufficed on this rank, perhaps: its result may hold the model of this attempt.
    result = None
    _release_all()
    ballot.rejoin()
    return False, None


def _is_joined() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _release_all() -> None:
    for owner in list(_owners):
        owner.free_memory()
    clear_device_cache(garbage_collection=True)
    # A group that outlives DDP's reducer has open connections, for whose end the other ranks wait.
    groups_left_behind.clear()


@contextmanager
def _released_with_others(ballot: _Ballot) -> Iterator[None]:
    """Run a block whose collectives on devices end when another rank runs out of memory."""
    # The loop may be waiting in its own connection, and then holds it.
    store, is_over = second_store(), threading.Event()

    def watch() -> None:
        with suppress(RuntimeError):  # the store is gone: whoever needs it says so
            while not is_over.wait(_WATCH_SECONDS):
                # nccl's kernels wait for a rank that has left until they time out, and torch then ends the process.
                # Once their group is aborted they end, and the next collective raises.
                if ballot.is_cast(_OUT_OF_MEMORY, store):
                    ballot.abort()
                    return

    thread = threading.Thread(target=watch, name="batch-size-search", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(10 * _WATCH_SECONDS)  # it may wait for an answer of a machine that is gone


def _is_on_devices(group: dist.ProcessGroup) -> bool:
    return any(device.type != "cpu" for device in group_device_types(group))


class _Ballot:
    """One vote of all ranks of the default process group, and the means to form that group again.

    A rank that fails alone leaves the others waiting in a collective, where no further collective can reach them. So
    ranks vote through the job's key-value store, and the one that failed leaves the group: with gloo its connections
    close, and the others' collectives raise at once. Afterwards every rank joins a new group over the same store.
    """

    def __init__(self, name: str) -> None:
        self.name = name  # the same on every rank, and used once in a job
        self.rank = dist.get_rank()
        self._keys = [f"accel_trainer/{name}/{rank}" for rank in range(dist.get_world_size())]
        self._prefix = f"accel_trainer/{name}/cast "
        self._store = default_store()
        group = default_group()
        self._timeout = group_timeout(group)
        watch = current_watch()
        self._watch_options: dict[str, Any] = {} if watch is None else watch.options
        self._recipe: dict[str, Any] = {"backend": dist.get_backend_config(), "device_id": group.bound_device_id}
        # Such a group has to be aborted, before whoever waits in it learns of anything.
        self.aborts = _is_on_devices(group)

    def cast(self, vote: str) -> None:
        """Publish this rank's vote. Returns at once."""
        self._store.set(self._prefix + vote, "")
        self._store.set(self._keys[self.rank], vote)

    def is_cast(self, vote: str, store: dist.Store | None = None) -> bool:
        """Whether a rank has cast that vote by now. Returns at once; a thread asks over a connection of its own."""
        # One question, however many ranks there are: those that wait in the store ask again and again.
        return bool((store or self._store).check([self._prefix + vote]))

    def abort(self) -> None:
        """End the collectives on devices that run, and fail those that follow. Returns at once."""
        for group in filter(_is_on_devices, joined_groups()):
            group.abort()

    def wait(self) -> list[str]:
        """Return the votes of all ranks, in the order of ranks. Collective, but no collective of the group."""
        try:
            self._store.wait(self._keys, self._timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
            raise ProcessGroupError(
                f"rank(s) {missing} did not say within {self._timeout.total_seconds():g} s how {self.name} ended; they "
                "hang or are gone. Look into their output, or raise the timeout (InitProcessGroupKwargs)"
            ) from error
        return [self._store.get(key).decode() for key in self._keys]

    def leave(self) -> None:
        """Leave the group; whoever waits for this rank in a collective of gloo gets an error.

        An object that refers to the group (a DistributedDataParallel model) keeps its connections open: drop it first.
        """
        if self.aborts:
            # nccl's destructor waits for kernels that can no longer end.
            self.abort()
        # gloo's connections close with the last reference to the group: of torch's default arguments, of DTensor's
        # caches, and of cycles that nobody has collected.
        forget_default_groups()
        dist.destroy_process_group()
        clear_dtensor_caches()
        gc.collect()

    def rejoin(self) -> None:
        """Form the group again. Collective; every rank has voted."""
        if dist.is_initialized():
            self.leave()
        dist.init_process_group(
            # The names by which the last group met are still in the store.
            store=dist.PrefixStore(f"accel_trainer/{self.name}/group", self._store),
            rank=self.rank,
            world_size=len(self._keys),
            timeout=self._timeout,
            **self._recipe,
        )
        if self._watch_options:
            start_watch(self.rank, len(self._keys), **self._watch_options)

"""Checks that all ranks call the same collective with fitting tensors, before any data moves; all ranks raise alike.

Each collective of the library is noted, with its place in the order of calls and the update that it belongs to: a rank
that leaves one out pairs its next one with another of the others, and where the shapes are the same that would be a
wrong number and no error. With `debug` the ranks compare each call before its data moves; otherwise a checksum over all
calls, every 64th call and wherever they vote (saves, loads, evaluations of a Trainer).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor

from accel_trainer.errors import DesyncError, DistributedOperationException
from accel_trainer.runtime.own_watch import current_watch
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.progress import PROGRESS
from accel_trainer.runtime.rank_watch import CallRecord, RankWatch
from accel_trainer.runtime.tensor_trees import is_tensor
from accel_trainer.runtime.whereabouts import mark_collectives, users_line
from accel_trainer.tree import leaves

mark_collectives(__file__)

UNEVEN_HINT = ", pass pad_index= or as_samples=True where they may differ,"
_CALLS_PER_CHECK = 64


def note_call(
    name: str, process: ProcessContext, data: Any = (), *, checked: Sequence[str] | None = None, way_out: str = ""
) -> None:
    """Note a collective that this rank is about to call; every 64th time, compare the calls of all ranks.

    Every rank calls it in its loop's thread, with equal shapes and dtypes in `data`. `checked` has descriptions of the
    leaves to compare now (`debug`). The job's store carries what is compared: other collectives do not disturb it.

    Raises:
        DesyncError: on every rank that comes, the ranks call different operations, or have called.
        DistributedOperationException: with `checked`, on every rank, their tensors do not fit.
    """
    watch = recording_watch(process)
    if watch is None:
        if checked is not None:
            check_same_call(name, checked, process, way_out=way_out)
        return
    calls = watch.calls
    tensors = [leaf for leaf in leaves(data, is_leaf=is_tensor) if isinstance(leaf, Tensor)]
    shapes = "".join(f" {_dtype(tensor)} {tuple(tensor.shape) or (1,)}" for tensor in tensors)
    if checked is not None:
        doing = f"{name} in update {PROGRESS.updates}"
        mine = json.dumps([doing, users_line(), list(checked)])
        # Through the store: a collective would meet the very one that a rank has called in the place of this one.
        everyone = [json.loads(text) for text in watch.exchange(mine, doing)]
        _check_operations(name, everyone)
        _check_leaves(name, [entries for _, _, entries in everyone], way_out)
    calls.note(f"{name}{shapes} in update {PROGRESS.updates}")
    if checked is None and calls.number % _CALLS_PER_CHECK == 0:
        _check_records(watch, calls.last[-1])


def all_come(name: str, process: ProcessContext, *, debug: bool, way_out: str, may_be_alone: bool) -> bool:
    """Wait until all ranks have come to a call, through the job's store, and compare those before. Every rank calls it.

    Returns:
        False on rank 0, if it `may_be_alone`: another rank is past the call, and none but this one has come.

    Raises:
        DesyncError: another rank waits in another collective, or the ranks have called different ones before.
    """
    watch = recording_watch(process)
    try:
        if watch is not None and not watch.all_come(name, may_be_alone=may_be_alone):
            return False
        if debug:
            note_call(name, process, checked=[])
        elif watch is not None:
            _check_records(watch, name)  # not noted: it stands for no exchange, and a save says itself what differs
    except DesyncError as error:
        raise DesyncError(f"{error}. {way_out}") from None
    return True


def recording_watch(process: ProcessContext) -> RankWatch | None:
    """Return the watch that notes this thread's collectives over `process`; None where nothing is noted."""
    watch = current_watch()
    # A thread of its own, of a save in the background for one, calls at any time of the loop's: its place in the order
    # differs between ranks.
    is_noted = watch is not None and process.is_distributed and process.group is None and watch.is_in_loop
    return watch if is_noted else None


def _check_operations(name: str, everyone: Sequence[Sequence[Any]]) -> None:
    first = everyone[0]
    for rank, call in enumerate(everyone):
        if call[0] != first[0]:
            raise DesyncError(
                f"the ranks do not agree on the operation: rank 0 calls {first[0]}, {first[1]}; rank {rank} calls "
                f"{call[0]}, {call[1]}. Nothing was sent; call the same collectives, in the same order, on every rank: "
                "look for one under `if is_main_process`, and for loops of different lengths"
            )


def _check_records(watch: RankWatch, doing: str) -> None:
    if not watch.all_equal(watch.calls.digest, doing):
        raise_difference(watch, doing)


def raise_difference(watch: RankWatch, doing: str) -> NoReturn:
    """Raise a DesyncError that names the first difference of the ranks' calls, on all, and begin a new record."""
    mine = json.dumps((watch.calls.number, list(watch.calls.last)))
    records = [json.loads(text) for text in watch.exchange(mine, doing)]
    # Who catches the error begins at one point on all ranks: the old difference would be found again at each vote.
    watch.calls = CallRecord()
    raise DesyncError(
        f"the ranks have called different collectives: {_find_difference(records)}. Values that they have exchanged "
        "since then belong to different calls, and nothing of this was saved; call the same collectives, in the same "
        "order, on every rank. debug=True (ACCEL_TRAINER_DEBUG) compares each call before it begins, and names its line"
    )


def _find_difference(records: Sequence[tuple[int, list[str]]]) -> str:
    """Return the first difference between the records of the ranks, in words."""
    begin = max(number - len(texts) for number, texts in records)
    aligned = [texts[begin - (number - len(texts)) :] for number, texts in records]
    for index, calls in enumerate(zip_longest(*aligned, fillvalue="nothing more")):
        for rank, call in enumerate(calls):
            if call != calls[0]:
                return f"call {begin + index + 1} was {calls[0]} on rank 0, and {call} on rank {rank}"
    return f"one before the last {len(aligned[0])} calls"


def check_same_call(
    name: str, entries: Sequence[str], process: ProcessContext, *, value: Any = None, way_out: str = ""
) -> list[Any]:
    """Raise on every rank unless all call the same operation, with leaves of these descriptions. Collective.

    Returns:
        The `value` of each rank, a picklable object that travels along.

    Raises:
        DistributedOperationException: the ranks differ; it names the two sides of the first difference.
    """
    if not process.is_distributed:
        return [value]
    everyone: list[Any] = [None] * process.world_size
    dist.all_gather_object(everyone, (name, list(entries), value), group=process.group)
    _check_operations(name, [(operation, "", ()) for operation, _, _ in everyone])
    _check_leaves(name, [words for _, words, _ in everyone], way_out)
    return [given for _, _, given in everyone]


def _check_leaves(name: str, calls: Sequence[Sequence[str]], way_out: str) -> None:
    for rank, words in enumerate(calls):
        for index, (first, other) in enumerate(zip_longest(calls[0], words, fillvalue="nothing")):
            if first != other:
                raise DistributedOperationException(
                    f"the ranks do not agree on leaf {index} of {name}: rank 0 {first}, rank {rank} {other}. Nothing "
                    f"was sent; make the shapes equal (pad_across_processes does){way_out} or call the same collective "
                    "on every rank"
                )


def describe_leaves(data: Any) -> list[str]:
    """Return, for each leaf, dtype and shape of a tensor in words, or the class of anything else."""
    return _describe(data, lambda tensor: f"{tuple(tensor.shape) or (1,)}")


def describe_rows(data: Any, num_samples: int | None) -> list[str]:
    """Return the same where the first dimension may differ: rows per sample, or any number where that is None."""
    return _describe(data, lambda tensor: _describe_rows(tensor, num_samples))


def _describe(data: Any, words: Callable[[Tensor], str]) -> list[str]:
    found = leaves(data, is_leaf=is_tensor)
    return [
        _describe_leaf(leaf, words) if isinstance(leaf, Tensor) else f"has a {type(leaf).__name__}" for leaf in found
    ]


def _describe_leaf(leaf: Tensor, words: Callable[[Tensor], str]) -> str:
    # On devices of two backends, ranks would wait for each other.
    place = "" if leaf.device.type == "cpu" else f" on {leaf.device.type}"
    return f"has {_dtype(leaf)} {words(leaf)}{place}"


def _describe_rows(leaf: Tensor, num_samples: int | None) -> str:
    if num_samples is None:
        return f"with {max(1, leaf.ndim)} dimension(s)"
    if leaf.ndim == 0:
        return "with one value for each rank"
    per_sample = rows_for_each(leaf, num_samples)
    if per_sample:
        return f"with {per_sample} row(s) of {tuple(leaf.shape[1:])} for each sample"
    return f"with {leaf.shape[0]} row(s) of {tuple(leaf.shape[1:])} for {num_samples} samples"


def rows_for_each(tensor: Tensor, num_samples: int) -> int:
    """Return the rows of a tensor for each sample; 0 where that is no integer."""
    if tensor.ndim == 0:
        return 1
    if num_samples == 0:
        return int(tensor.shape[0] == 0)
    per_sample, remainder = divmod(tensor.shape[0], num_samples)
    return 0 if remainder else per_sample


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

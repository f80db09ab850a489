"""When a save is written: at once or on a thread, and again where a disk fails and its policy says so.

Of a save in the background a thread writes the staged copies, and the ranks vote on its outcome. Where a disk fails,
the run ends, goes on without the save, or waits for room. Full weights of a sharded model are gathered by the writer,
from shards that are copied at once: who writes them gets placeholders, which take no memory. A thread of rank 0 asks
the others for the shards of one tensor after the other while it writes their file: training waits for a copy of its own
shards, and nobody holds the whole.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.publication import Publication, StagedDirectory
from accel_trainer.checkpoint.safetensors_file import LazyTensor, StagingMemory, tensor_file_bytes
from accel_trainer.checkpoint.shards import local_box, local_tensor, own_share
from accel_trainer.checkpoint.weights.weight_files import view_of
from accel_trainer.errors import (
    AccelTrainerError,
    ConfigError,
    DiskFullError,
    ProcessGroupError,
    RemoteRankError,
    SaveTimeoutError,
    did_you_mean,
)
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.torch_private import group_timeout

logger = logging.get_logger(__name__)

T = TypeVar("T")

SaveErrorAction = Literal["raise", "warn", "pause"]

RETRY_SECONDS = 60.0
"""Between two attempts of a save that pauses the run: an operator needs minutes to make room, not milliseconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePolicy:
    """The answer to a save that fails for the disk's sake, and limits on waiting."""

    on_save_error: SaveErrorAction = "raise"
    """"warn" goes on without the save; "pause" tries again every minute."""
    max_pause_s: float = 3600.0
    """With "pause": the error is raised after so many seconds."""
    max_wait_s: float | None = None
    """Longest wait of a save for the background save before it; None waits until that has ended."""

    def __post_init__(self) -> None:
        known = get_args(SaveErrorAction)
        if self.on_save_error not in known:
            hint = did_you_mean(str(self.on_save_error), known)
            raise ConfigError(f"on_save_error={self.on_save_error!r}; expected one of {', '.join(known)}{hint}")
        for name in ("max_pause_s", "max_wait_s"):
            seconds = getattr(self, name)
            is_time = isinstance(seconds, int | float) and 0 <= seconds <= 1e9
            if not is_time and (seconds is not None or name != "max_wait_s"):
                raise ConfigError(f"{name}={seconds!r}; expected a number of seconds from 0 to 1e9")

    @property
    def wait_s(self) -> float | None:
        """Longest wait of a save for the one before it; a save that pauses may take its time on top."""
        if self.max_wait_s is None:
            return None
        return self.max_wait_s + (self.max_pause_s if self.on_save_error == "pause" else 0.0)


def save_persistently(
    save: Callable[[], T],
    process: ProcessContext,
    policy: SavePolicy,
    section: str,
    group: dist.ProcessGroup | None = None,
) -> T | None:
    """Call `save` until it succeeds, as long as the policy allows. Collective, and all ranks act alike.

    The policy is for errors of the disk only: those of the system (`OSError`: full, over the quota, unreachable) and
    `DiskFullError`. Any other one is raised. Returns None where `save` failed and the policy is to warn.
    """
    attempts_left = int(policy.max_pause_s // RETRY_SECONDS)
    while True:
        try:
            return save()
        except Exception as error:
            if policy.on_save_error == "raise" or not _is_of_a_disk(error, process, section, group):
                raise
            if policy.on_save_error == "warn":
                logger.warning("%s failed, and the run goes on without it (on_save_error='warn'): %s", section, error)
                return None
            if not attempts_left:
                raise
            logger.warning(
                "%s failed: %s. The run is paused (on_save_error='pause'): the next of %d more attempts is in %.0f s",
                section, error, attempts_left, RETRY_SECONDS,
            )  # fmt: skip
        attempts_left -= 1
        time.sleep(RETRY_SECONDS)


def _is_of_a_disk(error: Exception, process: ProcessContext, section: str, group: dist.ProcessGroup | None) -> bool:
    """Whether every rank failed for its own disk's sake, or because another rank did. Collective."""
    is_others = isinstance(error, ProcessGroupError)
    # Some errors of ours are OSErrors for those who catch them (CheckpointNotFoundError): no disk has failed there.
    is_own = isinstance(error, OSError) and (
        isinstance(error, DiskFullError) or not isinstance(error, AccelTrainerError)
    )
    # Ranks must retry alike: one that retries alone waits in the first collective of `save` for ever.
    votes = gather_or_raise(process, section, None, (is_others, is_own), group)
    return all(others or own for others, own in votes) and any(own for _, own in votes)


def _new_group(process: ProcessContext) -> dist.ProcessGroup | None:
    # Without a timeout it would get gloo's default of 30 minutes, whatever the job's own is.
    return dist.new_group(backend="gloo", timeout=group_timeout()) if process.is_distributed else None


class BackgroundSaver:
    """Writes one staged save at a time, on a thread. Every method is called by the main thread of every rank."""

    # The thread is not a daemon: the interpreter waits for it at exit, so that the last save of a script completes.

    def __init__(self, process: ProcessContext) -> None:
        self._process = process
        # Collectives of two threads on one group would pair up in any order.
        self.thread_group, self._main_group = (_new_group(process), _new_group(process))
        """One for the thread, and the main thread's, both on the CPU, whatever the job's backend."""
        self.memory = StagingMemory(process.device)
        self._thread: threading.Thread | None = None
        self._section = ""
        self._error: BaseException | None = None
        self.is_committed = False
        """Whether the last save that was started is committed."""

    @property
    def in_flight(self) -> bool:
        """Whether a save was started whose outcome the ranks have not voted on yet; the same on all ranks."""
        return self._thread is not None

    def start(self, publication: Publication, on_commit: Callable[[], None], policy: SavePolicy) -> None:
        """Write and commit a staged save on a thread, which calls `on_commit` once every rank knows of the commit."""
        assert self._thread is None
        self._section, self._error, self.is_committed = f"background save of {publication.target}", None, False
        self._thread = threading.Thread(
            target=self._run, args=(publication, on_commit, policy), name="checkpoint-writer"
        )
        self._thread.start()

    def _run(self, publication: Publication, on_commit: Callable[[], None], policy: SavePolicy) -> None:
        commit = partial(publication.commit, keeps=policy.on_save_error == "pause")
        try:
            try:
                target = save_persistently(commit, self._process, policy, self._section, self.thread_group)
            finally:
                # Whatever happened: a staged directory that is not published would count as a save under way.
                publication.abandon()
            if target is not None:
                on_commit()
                self.is_committed = True
        except BaseException as error:
            self._error = error
            # Logged at once: the run may end before the main thread waits.
            logger.error("%s failed: %s", self._section, error, main_process_only=False)

    def poll(self) -> bool:
        """Return whether no save is in flight; raise the error of one that all ranks have ended. Collective."""
        if self._thread is None or self._has_ended(self._thread, within_s=0.0):
            self.wait()
        return self._thread is None

    def join(self) -> None:
        """Wait for the save in flight where the ranks are not in step: for its files, not its outcome."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _has_ended(self, thread: threading.Thread, within_s: float) -> bool:
        # Collective.
        thread.join(within_s)
        ended = torch.tensor(int(not thread.is_alive()))
        if self._main_group is not None:
            # The slowest decides: ranks that disagree on whether a save is over would pair up different collectives.
            dist.all_reduce(ended, dist.ReduceOp.MIN, group=self._main_group)
        return bool(ended.item())

    def wait_for_turn(self, policy: SavePolicy) -> bool:
        """Wait for the save in flight as long as the policy allows, return whether another may begin. Collective."""
        if self._thread is None or policy.wait_s is None or self._has_ended(self._thread, policy.wait_s):
            self.wait()
            return True
        overdue = f"the {self._section} has not ended after {policy.wait_s:g} s (max_wait_s={policy.max_wait_s:g})"
        if policy.on_save_error != "warn":
            raise SaveTimeoutError(
                f"{overdue}; save less often, give it more time, or have saves skipped with on_save_error='warn'"
            )
        logger.warning("%s; this save is skipped (on_save_error='warn')", overdue)
        return False

    def wait(self) -> None:
        """Wait for the save in flight, and raise its error, on every rank. Collective."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        gather_or_raise(self._process, self._section, self._error, group=self._main_group)


# --- full weights of a sharded model ----------------------------------------------------------------------------------


_ALIGNMENT = 64
_ALL_WRITTEN, _FAILED = -1, -2


class NeedsValuesError(Exception):
    """A file would hold something else than placeholders, computed from them perhaps."""


class GatheredLater:
    """Full tensors of which every rank holds a box. Every rank makes one, and `register`s it, in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor], staged: StagedDirectory, rank: int) -> None:
        """Copy this rank's share of the shards.

        Args:
            tensors: plain or DTensors, each once, by the same names on every rank; of plain ones rank 0's values count.
            staged: a background save, into which all ranks write.
        """
        assert staged.memory is not None
        self._staged, self._rank, self._names = staged, rank, list(tensors)
        self._full = {
            name: LazyTensor(t.dtype, tuple(t.shape), partial(self._gather, name)) for name, t in tensors.items()
        }
        plain = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
        own = own_share(tensors, rank, staged.ranks, plain)
        self._boxes = {name: local_box(tensors[name]) for name in own}
        self._copies = staged.memory.copy({name: local_tensor(tensors[name]) for name in own})
        self._holders: dict[str, list[tuple[int, Box]]] = {}
        self._placeholders: dict[str, Tensor] = {}
        self._files: list[tuple[str, dict[str, LazyTensor], Mapping[str, str] | None]] = []

    # --- rank 0, while it is told what to write ----------------------------------------------------------------------

    def placeholders(self) -> dict[str, Tensor]:
        """Return full tensors without values, to be written as they are, by nothing that reads them."""
        rooms = [-(-tensor_file_bytes({name: lazy}) // _ALIGNMENT) * _ALIGNMENT for name, lazy in self._full.items()]
        # Pages that nobody touches take no memory. The tensors keep the region.
        region = mmap.mmap(-1, max(sum(rooms), 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offsets = accumulate(rooms, initial=0)
        self._placeholders = {name: view_of(region, next(offsets), lazy) for name, lazy in self._full.items()}
        return self._placeholders

    def write(self, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> None:
        """Note a file of placeholders, under any names.

        Raises:
            NeedsValuesError: one of the tensors is none. Nothing is written.
        """
        names = {_identity(tensor): name for name, tensor in self._placeholders.items()}
        found = {key: names.get(_identity(tensor)) for key, tensor in tensors.items()}
        if None in found.values():
            raise NeedsValuesError
        self._files.append((name, {key: self._full[name] for key, name in found.items() if name}, metadata))

    def register(self) -> None:
        """Have the save's thread gather the noted values, and write them on rank 0."""
        for name, _, _ in self._files:
            self._staged.claim(name)
        self._staged.defer(self._write_files if self._rank == 0 else self._serve)

    # --- the save's thread -------------------------------------------------------------------------------------------

    def _write_files(self) -> None:
        boxes: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(self._boxes, boxes, dst=0, group=self._staged.group)
        self._holders = {name: [] for name in self._names}
        for rank, held in enumerate(boxes):
            for name, box in held.items():
                if box.num_elements:
                    self._holders[name].append((rank, box))
        try:
            while self._files:
                # Removed once it is written: where the disk fails here, a retry goes on with this file.
                self._staged.write_tensors_now(*self._files[0])
                del self._files[0]
        except BaseException as error:
            with suppress(RuntimeError):  # of a rank that is gone; the cause is the error that is on its way
                self._announce(_FAILED)
                dist.broadcast_object_list([f"{type(error).__name__}: {error}"], src=0, group=self._staged.group)
            raise
        self._announce(_ALL_WRITTEN)

    def _gather(self, name: str) -> Tensor:
        self._announce(self._names.index(name))
        full = torch.empty(self._full[name].shape, dtype=self._full[name].dtype)
        for rank, box in self._holders[name]:
            part = full[box.within(Box.full(full.shape))]
            if rank == 0:
                part.copy_(self._copies[name])
                continue
            values = part if part.is_contiguous() else torch.empty(box.sizes, dtype=full.dtype)
            dist.recv(_as_bytes(values), src=rank, group=self._staged.group)
            if values is not part:
                part.copy_(values)
        return full

    def _serve(self) -> None:
        """Send this rank's shards as rank 0 asks for them, until it has written all files, or failed to."""
        dist.gather_object(self._boxes, None, dst=0, group=self._staged.group)
        while (index := self._announce(0)) >= 0:
            copy = self._copies.get(self._names[index])
            if copy is not None and copy.numel():
                dist.send(_as_bytes(copy), dst=0, group=self._staged.group)
        if index == _FAILED:
            reasons = [""]
            dist.broadcast_object_list(reasons, src=0, group=self._staged.group)
            raise RemoteRankError(f"rank 0 failed to write the full weights: {reasons[0]}")

    def _announce(self, index: int) -> int:
        """Return rank 0's `index`, the place of a tensor's name or an outcome, on every rank."""
        said = torch.tensor(index)
        dist.broadcast(said, src=0, group=self._staged.group)
        return int(said.item())


def _identity(tensor: Tensor) -> Any:
    # Those without elements have no address; nothing of them is written.
    return tensor.data_ptr() if tensor.numel() else None, tensor.dtype, tuple(tensor.shape), tensor.stride()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)

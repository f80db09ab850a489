"""A save that goes on while the run trains: a thread writes the staged copies, and the ranks vote on its outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from accel_trainer import logging
from accel_trainer.checkpoint.commit.publication import Publication
from accel_trainer.checkpoint.commit.retry import SavePolicy, save_persistently
from accel_trainer.checkpoint.format.safetensors_file import StagingMemory
from accel_trainer.errors import SaveTimeoutError
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise
from accel_trainer.runtime.torch_private import group_timeout

__all__ = ["BackgroundSaver"]

logger = logging.get_logger(__name__)


def _new_group(process: ProcessContext) -> dist.ProcessGroup | None:
    # Without a timeout it would get gloo's default of 30 minutes, whatever the job's own is.
    return dist.new_group(backend="gloo", timeout=group_timeout()) if process.is_distributed else None


class BackgroundSaver:
    """Writes one staged save at a time, on a thread. Every method is called by the main thread of every rank.

    The thread is not a daemon: the interpreter waits for it at exit, so that the last save of a script completes.
    """

    def __init__(self, process: ProcessContext) -> None:
        """Make the process groups of the votes. Collective.

        The thread has one of its own: collectives of two threads on one group would pair up in any order. The main
        thread has the other, on the CPU, whatever the job's backend.
        """
        self._process = process
        self._thread_group, self._main_group = (_new_group(process), _new_group(process))
        self.memory = StagingMemory(process.device)
        self._thread: threading.Thread | None = None
        self._section = ""
        self._error: BaseException | None = None

    @property
    def in_flight(self) -> bool:
        """Whether a save was started whose outcome the ranks have not voted on yet; the same on all ranks."""
        return self._thread is not None

    def start(self, publication: Publication, on_commit: Callable[[], None], policy: SavePolicy) -> None:
        """Write and commit a staged save on a thread.

        Args:
            on_commit: called by the thread once every rank knows of the commit.
            policy: for errors of the disk. Those that the thread does not raise, `wait` does not either.
        """
        assert self._thread is None
        self._section, self._error = f"background save of {publication.target}", None
        self._thread = threading.Thread(
            target=self._run, args=(publication, on_commit, policy), name="checkpoint-writer"
        )
        self._thread.start()

    def _run(self, publication: Publication, on_commit: Callable[[], None], policy: SavePolicy) -> None:
        commit = partial(publication.commit, self._thread_group, keeps=policy.on_save_error == "pause")
        try:
            try:
                target = save_persistently(commit, self._process, policy, self._section, self._thread_group)
            finally:
                publication.abandon()
            if target is not None:
                on_commit()
        except BaseException as error:
            self._error = error
            # Logged at once: the run may end before the main thread waits.
            logger.error("%s failed: %s", self._section, error, main_process_only=False)

    def poll(self) -> None:
        """Raise the error of the save in flight, as `wait`, if all ranks have ended it. Collective; once an update."""
        if self._thread is not None and self._has_ended(self._thread, within_s=0.0):
            self.wait()

    def _has_ended(self, thread: threading.Thread, within_s: float) -> bool:
        """Whether the save ends on all ranks within that time. Collective."""
        thread.join(within_s)
        ended = torch.tensor(int(not thread.is_alive()))
        if self._main_group is not None:
            dist.all_reduce(ended, dist.ReduceOp.MIN, group=self._main_group)
        return bool(ended.item())

    def wait_for_turn(self, policy: SavePolicy) -> bool:
        """Wait for the save in flight as long as the policy allows, and return whether another may begin. Collective.

        Raises:
            SaveTimeoutError: it has not ended in time, and the policy is not to warn.
        """
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
        """Wait for the save in flight, and raise its error. Collective; nothing when there is none.

        Raises:
            ProcessGroupError: it failed on another rank.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        gather_or_raise(self._process, self._section, self._error, group=self._main_group)

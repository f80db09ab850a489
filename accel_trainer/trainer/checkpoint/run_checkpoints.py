"""The checkpoints of one train(): its saves, its resume, their metrics, and the note of its last update."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from accel_trainer import logging
from accel_trainer.checkpoint.checkpointer import Checkpointer, CheckpointMetrics, FilesToRead
from accel_trainer.checkpoint.commit.retention import numbered_checkpoints
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.format.regular_files import open_own, read_regular
from accel_trainer.checkpoint.reader import Verify
from accel_trainer.checkpoint.selection import Selection
from accel_trainer.data.loader import PreparedDataLoader
from accel_trainer.errors import AccelTrainerError, CheckpointNotFoundError, ConfigError, IncompatibleCheckpointError
from accel_trainer.runtime.process import ProcessContext, find_attempt, read_environment
from accel_trainer.runtime.rng import KeptStreams, get_rng_state, set_rng_state
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together
from accel_trainer.trainer.checkpoint.resuming import (
    PREFIX,
    TRAINER_CHECKPOINTS,
    PassStreams,
    Resumption,
    check_contents,
    check_named,
    files_to_read,
)

__all__ = ["RunCheckpoints", "RunMetrics", "UpdateNote"]

logger = logging.get_logger(__name__)

_trains = itertools.count()

NOTE_NAME = "_last_update"
"""In a run's directory. Begins as `_lock` does: pushing the directory to a hub leaves such names out."""


class RunMetrics(CheckpointMetrics):
    """The metrics of one train(), each to be logged once when it is new; see `CheckpointMethods.checkpoint_metrics`."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_at: int | None = None
        """The update after which this train() goes on; None until it does."""
        self._unlogged: list[str] = []
        self._begin = time.perf_counter()

    def record(self, name: str, value: float) -> None:
        """Set a metric, to be logged next."""
        super().record(name, value)
        self._unlogged.append(name)

    def take(self) -> dict[str, float]:
        """Return the metrics that are not logged yet, rounded as transformers rounds its times."""
        unlogged, self._unlogged = self._unlogged, []
        return {name: round(self.values[name], 4) for name in dict.fromkeys(unlogged)}

    def finish(self, last_update: int) -> dict[str, float]:
        """Return all metrics, with the share of the time that went into updates nobody had done before.

        Of a run that neither saved nor resumed there are none.

        Args:
            last_update: the one that this train() ends with.
        """
        if self.values:
            wall = max(time.perf_counter() - self._begin, 1e-9)
            num_updates = last_update - (last_update if self.begun_at is None else self.begun_at)
            again = min(self.values.get("lost_steps", 0.0) / max(num_updates, 1), 1.0)
            self.values["goodput"] = max(wall - self.stalled_seconds, 0.0) * (1.0 - again) / wall
            self._unlogged = list(self.values)
        return self.take()


class RunCheckpoints:
    """State of a Trainer's saves and of its resume, from the beginning of one train() to its end."""

    def __init__(self, process: ProcessContext, *, saves_within_updates: bool = False) -> None:
        """Begin one train().

        Args:
            saves_within_updates: remember the random streams before each update, too: 15 us.
        """
        self.metrics = RunMetrics()
        self.checkpointer = Checkpointer(process, TRAINER_CHECKPOINTS, self.metrics)
        self.resumption: Resumption | None = None
        """The checkpoint that this train() goes on from."""
        self.staged: StagedDirectory | None = None
        """The directory of the last save. Files that this package writes to it are hashed on their way."""
        self.pass_streams: PassStreams | None = None
        """Of the pass over the training data that began last, where its order depends on them."""
        self._position: Callable[[], dict[str, Any]] | None = None
        self._saves_within_updates = saves_within_updates
        self._attempt, job = find_attempt(read_environment())
        self.job = f"{job}#{next(_trains)}"
        """Name of this train() of this job, the same where the launcher has started the workers again."""
        self._streams: dict[str, Any] | None = None
        self._note: UpdateNote | None = None
        self.last_saved: int | None = None
        """The last update of which this train() has saved a checkpoint."""
        self.num_taken_back = 0
        """Updates that were read, and that a rollback has taken back, since the beginning of the run."""
        self.is_in_update = False
        """Whether micro-batches of an update have been read that is not done: who resumes begins it again."""
        self.running_losses: dict[int, tuple[Tensor, float, int]] = {}
        """By update that was saved: the loss since the last log, the sum of those logged, and the last that was."""

    def select(
        self, given: bool | str | os.PathLike[str], run_dir: Path, *, is_sharded: bool, verify: Verify = "full"
    ) -> None:
        """Choose the checkpoint to resume from, its contents verified. Collective: rank 0 decides for all.

        Args:
            given: True is the newest good one in `run_dir`: others are renamed to `_bad-...` with a warning. A path is
                taken as it is.
            is_sharded: rank 0 alone reads files that hold full weights.
            verify: "full" compares contents, "size" lengths, "off" nothing.

        Raises:
            ConfigError: there is none in the directory.
            CheckpointNotFoundError: the path names none; for others see `Checkpointer.select_newest` and `open_named`.
        """
        process = self.checkpointer.process
        selection = self._select(given, run_dir, verify, is_sharded=is_sharded)
        is_own = selection.path.absolute().parent == run_dir.absolute()
        note = UpdateNote.read(run_dir) if is_own else None
        noted_update = gather_or_raise(process, f"load of {selection.path}", None, note)[0]
        self.resumption = Resumption(selection, noted_update)
        self.num_taken_back = self.resumption.progress.get("taken_back", 0)
        if selection.stored is None and selection.path.is_dir():
            logger.warning(
                "%s was not written by accel_trainer: it has no %s, so that its contents cannot be verified",
                selection.path, MANIFEST_NAME,
            )  # fmt: skip

    def select_own(self, run_dir: Path, *, is_sharded: bool, verify: Verify) -> Path | None:
        """Return the newest good checkpoint of this train(), else the one that it resumed from. Collective.

        Raises:
            CorruptCheckpointError: none of them is good.
        """
        found = self._find_own(run_dir)
        if found is None and self.resumption is not None:
            found = self.resumption.path
        return None if found is None else self._select(found, run_dir, verify, is_sharded=is_sharded).path

    def _select(
        self, given: bool | str | os.PathLike[str], run_dir: Path, verify: Verify, *, is_sharded: bool
    ) -> Selection:
        """Return the checkpoint that `select` was asked for. Collective."""
        process = self.checkpointer.process
        files = partial(files_to_read, process=process, is_sharded=is_sharded)
        if given is True:
            missing = ConfigError(
                f"No valid checkpoint found in output directory ({run_dir}): it has no {PREFIX}N; train without "
                "resume_from_checkpoint first"
            )
            return self._select_newest(run_dir, verify, files, missing)
        selection = self.checkpointer.select_named(Path(str(given)), verify, files)
        with raise_together(process, f"load of {selection.path}"):
            check_named(selection.path, run_dir)
            check_contents(selection, process)
        return selection

    def _select_newest(
        self, run_dir: Path, verify: Verify, files: FilesToRead, missing: AccelTrainerError
    ) -> Selection:
        """Return the newest good checkpoint: one whose checksums fit may hold something else. Collective."""
        process, passed_over = self.checkpointer.process, list[str]()
        while True:
            selection = self.checkpointer.select_newest(run_dir, verify, files, missing, passed_over)
            try:
                with raise_together(process, f"load of {selection.path}"):
                    check_contents(selection, process)
            except Exception as error:  # each rank has one
                if not self.checkpointer.pass_over_together(selection, error):
                    raise
                passed_over = selection.passed_over
            else:
                return selection

    def find_own(self, run_dir: Path) -> Path | bool | None:
        """Return the checkpoint from which a job with restarted workers goes on; True is the newest. Collective.

        None in the first attempt, and where this job has saved nothing in the directory: what an earlier run has left
        there is not taken for it.
        """
        if self._attempt == 0:
            return None
        found = self._find_own(run_dir)
        logger.warning(
            "the workers were started again, %d time(s): training %s", self._attempt,
            "begins anew, this job had saved no checkpoint" if found is None
            else "goes on from the newest checkpoint that this job has saved",
        )  # fmt: skip
        return found

    def _find_own(self, run_dir: Path) -> Path | bool | None:
        """Return the newest checkpoint of this train(), True for one that is the newest of all. Collective."""
        process, found, error = self.checkpointer.process, None, None
        try:
            if process.is_main:
                found = self._newest_own(run_dir)
        except Exception as raised:
            error = raised
        section = f"selection of a checkpoint in {run_dir}"
        answer: Path | bool | None = gather_or_raise(process, section, error, found)[0]
        return answer

    def _newest_own(self, run_dir: Path) -> Path | bool | None:
        is_newest = True
        for _, path in reversed(numbered_checkpoints(run_dir, PREFIX)):
            with suppress(CheckpointNotFoundError, IncompatibleCheckpointError):
                progress = Manifest.read(path).metadata.get("trainer", {})
                if isinstance(progress, dict) and progress.get("job") == self.job:
                    return is_newest or path
            is_newest = False
        return None

    def note_pass(self, loader: Any) -> None:
        """Remember the streams and counts that fix the order of a pass over the training data, before it begins."""
        self.pass_streams = None if isinstance(loader, PreparedDataLoader) else PassStreams(loader)

    def begin_update(self, loader: Any) -> None:
        """Remember the position of the training loader, before the batches of an update are read."""
        self.is_in_update = True
        self._position = loader.noted_state_dict() if isinstance(loader, PreparedDataLoader) else None
        if self._saves_within_updates:
            self._streams = get_rng_state()

    def end_update(self, step: int | None) -> None:
        """Forget that position, and note the update; None where there were no batches for one."""
        self.is_in_update = False
        self._position = self._streams = None
        if self._note is not None and step is not None:
            self._note.write(step)

    def position(self, loader: Any) -> dict[str, Any] | None:
        """Return the loader's position after the last update that is complete; None of one not made by us."""
        if self._position is not None:
            return self._position()
        return loader.state_dict() if isinstance(loader, PreparedDataLoader) else None

    @contextmanager
    def streams_of_position(self) -> Iterator[None]:
        """Context in which the random streams are where they were at `position`: before the next batch is read."""
        if self._streams is None:
            if self._position is not None:
                logger.warning(
                    "a checkpoint is saved while an update is under way, and a run that resumes from it does that "
                    "update again: what it draws for dropout and data is other than now. Save at the end of an update "
                    "(control.should_save), or set enable_jit_checkpoint=True, which remembers the streams before each"
                )
            yield
            return
        with KeptStreams():
            set_rng_state(self._streams)
            yield

    def note_saved(self, run_dir: Path, step: int) -> None:
        """Take note of updates from the first checkpoint on; on rank 0, elsewhere nothing."""
        self.last_saved = step
        if self._note is not None and self._note.directory != run_dir:
            self._note.close(is_over=True)  # of an earlier trial
            self._note = None
        if self._note is not None:
            self._note.saved = step
        elif self.checkpointer.process.is_main:
            with suppress(OSError, ConfigError):
                self._note = UpdateNote(run_dir, step)

    def close(self, *, is_over: bool) -> None:
        """End the note and release the run's directory.

        Args:
            is_over: the run has come to its end, and nothing is left to be done again.
        """
        resumption, self.resumption = self.resumption, None
        if self._note is not None:
            self._note.close(is_over=is_over)
            self._note = None
        was_noted = resumption is not None and resumption.noted_update is not None
        if is_over and resumption is not None and was_noted and self.checkpointer.process.is_main:
            UpdateNote.remove(resumption.path.parent)
        self.checkpointer.close()


class UpdateNote:
    """The number of a run's last update, in a file for the run that resumes; written over in place, and never synced.

    It survives the process, and not the machine. It serves a metric only: where it cannot be written, there is none.
    """

    def __init__(self, directory: Path, saved: int) -> None:
        """Begin to take note in a run's directory, at an update that was just saved; OSError where that cannot be."""
        self.directory = directory
        self.saved = saved
        """The last update of which there is a checkpoint."""
        # Kept open: on a network disk an open and a close would cost every update a round trip or two.
        self._descriptor = open_own(directory / NOTE_NAME)
        if re.fullmatch(rb"(\d{20}\n)?", os.pread(self._descriptor, 22, 0)) is None:
            os.close(self._descriptor)
            raise FileExistsError(f"{directory / NOTE_NAME} is no note of an update")
        self.write(saved)

    @staticmethod
    def read(directory: Path) -> int | None:
        """Return the last update that a run has noted there; None where there is no note, or none that can be read."""
        try:
            return int(read_regular(directory / NOTE_NAME, 21))
        except (OSError, ValueError):
            return None

    @staticmethod
    def remove(directory: Path) -> None:
        """Remove the note of a run that has come to its end."""
        with suppress(OSError):
            (directory / NOTE_NAME).unlink()

    def write(self, update: int) -> None:
        """Note an update that is complete."""
        self._update = update
        with suppress(OSError):
            os.pwrite(self._descriptor, b"%020d\n" % update, 0)

    def close(self, *, is_over: bool) -> None:
        """Leave the note to the run that resumes, if it has an update to do again."""
        os.close(self._descriptor)
        if is_over or self._update <= self.saved:
            self.remove(self.directory)

"""The lifecycle of checkpoints: save, select, wait, close. `Accelerator.save_state` and the Trainer both drive it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.background import BackgroundSaver, SavePolicy, save_persistently
from accel_trainer.checkpoint.disk import explain_full_disk
from accel_trainer.checkpoint.lock import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.checkpoint.names import next_number, numbered_checkpoints, recover_target, retire, sweep
from accel_trainer.checkpoint.publication import Publication, StagedDirectory
from accel_trainer.checkpoint.reader import (
    CheckpointKind,
    Selection,
    StoredCheckpoint,
    Verify,
    choose_newest,
    has_manifest,
    open_checkpoint,
    pass_over,
)
from accel_trainer.errors import AccelTrainerError, CorruptCheckpointError, ProcessGroupError
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together
from accel_trainer.runtime.whereabouts import section

logger = logging.get_logger(__name__)

FilesToRead = Callable[[Manifest], Iterable[str]]
"""Names of the files that this rank will read."""


class CheckpointMetrics:
    """Seconds and bytes of the last save and of the last resume, by the names under which they are logged."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self.stalled_seconds = 0.0
        """In which the run waited for saves and for its resume, in all."""

    @property
    def save_seconds(self) -> float:
        """Duration of the last save, until its commit; 0 before the first."""
        return self.values.get("ckpt/duration_s", 0.0)

    def record(self, name: str, value: float) -> None:
        """Set a metric."""
        self.values[name] = value

    def record_stall(self, seconds: float) -> None:
        """Record how long the run stood still for a save."""
        self.record("ckpt/stall_s", seconds)
        self.stalled_seconds += seconds

    def begin_resume(self) -> None:
        """Set the times of an earlier resume back."""
        self.values = {name: value for name, value in self.values.items() if not name.startswith("resume/")}
        self.values |= {"resume/select_s": 0.0, "resume/verify_s": 0.0}

    @contextmanager
    def resuming(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase of the resume: select, verify, load or data."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - begin
            self.record(f"resume/{phase}_s", self.values.get(f"resume/{phase}_s", 0.0) + seconds)
            self.stalled_seconds += seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveJob:
    """One save: its place, its content, and the answer to a disk that fails."""

    section: str
    """The save, for messages."""
    directory: Path
    """Around the checkpoint."""
    name: str | None
    """None is the prefix and `number`: one of a run's checkpoints, in a directory that stays locked. Under any other
    name, this save alone has a lock."""
    number: int | None
    """For the manifest. Of a run's checkpoint: the lowest number that it may have."""
    write: Callable[[StagedDirectory], None]
    """Writes this rank's files. Collective; it is called again where a save is tried again."""
    need_bytes: int
    """About as many as this rank will write; the sum over ranks is compared with the room on the disk."""
    policy: SavePolicy
    each_node: bool = False
    """Every node has a disk of its own, and commits a checkpoint with the files of its own ranks."""
    replaces: bool = False
    """Take `number` and the name as they are, whatever stands there; otherwise the next number that is free, and a
    name that no other files have."""
    keep: int | None = None
    """How many of a run's checkpoints are left by a commit; None keeps all."""
    protected: Callable[[], Collection[Path]] = tuple
    """Those that stay whatever their number, once the new one is committed."""
    in_background: bool = False
    """Return once everything is copied to host memory, and write on a thread."""


class Checkpointer:
    """A run's checkpoints: one save in flight at most, one directory locked, metrics of the last save and resume.

    Every method is called by every rank, in the same order.
    """

    def __init__(self, process: ProcessContext, kind: CheckpointKind, metrics: CheckpointMetrics | None = None) -> None:
        self.process = process
        self.kind = kind
        self.metrics = CheckpointMetrics() if metrics is None else metrics
        self.background: BackgroundSaver | None = None
        """Once there has been a save in the background."""
        self._lock: DirectoryLock | None = None
        self._release_lock: weakref.finalize[..., object] | None = None

    # --- saving ----------------------------------------------------------------------------------------------------

    def save(self, job: SaveJob) -> Path | None:
        """Save, after the background save that is in flight. Collective; a failure on one rank is raised on all.

        Returns:
            The checkpoint; None where nothing is saved and the policy is to go on without.

        Raises:
            ConfigError: `job.name` is a file, or a directory that holds something else than a checkpoint.
            CheckpointLockedError: another run saves there.
            DiskFullError: there is no room; nothing was written.
            SaveTimeoutError: the background save before this one has not ended in time.
            ProcessGroupError: another rank failed.
        """
        begin = time.perf_counter()
        if self.background is not None and not self.background.wait_for_turn(job.policy):
            return None
        # After the wait: two saves would share the staging memory, and the directory may lack the room for both.
        outcome = save_persistently(partial(self._publish, job), self.process, job.policy, job.section)
        if outcome is None:
            return None
        path, publication = outcome
        on_commit = partial(self._end_save, job, path, publication, begin)
        if job.in_background and self.background is not None:
            self.background.start(publication, on_commit, job.policy)
        else:
            on_commit()
        self.metrics.record_stall(time.perf_counter() - begin)
        return path

    def _publish(self, job: SaveJob) -> tuple[Path, Publication]:
        """Write the checkpoint and commit it, or stage copies of it. Collective; where it fails, all ranks raise."""
        name, number = job.name, job.number
        if name is None:
            number = self._reserve_number(job)
            name = f"{self.kind.prefix}{number}"
        path = job.directory / name
        background = None
        if job.in_background:
            background = self.background = self.background or BackgroundSaver(self.process)
            background.memory.begin()
        publication = Publication(
            path,
            self.process,
            step=number,
            each_node=job.each_node,
            need_bytes=job.need_bytes,
            memory=None if background is None else background.memory,
            owns_name=job.replaces,
            is_locked=job.name is None,
        )
        with publication as staged, explain_full_disk(staged.path):
            job.write(staged)
        if background is not None:
            # Before the thread begins: what fails in the copying is raised by this save, not by a later one.
            publication.vote()
        else:
            publication.commit()
        return path, publication

    def _reserve_number(self, job: SaveJob) -> int:
        """Lock the run's directory and return the checkpoint's number; the rank that commits decides. Collective."""
        number, error = job.number or 0, None
        try:
            if self.process.is_local_main if job.each_node else self.process.is_main:
                self._lock_directory(job.directory)
                number = number if job.replaces else max(number, next_number(job.directory, self.kind.prefix))
        except Exception as raised:
            error = raised
        # With a disk on every node each has counted its own, and all take the highest.
        return int(max(gather_or_raise(self.process, f"save to {job.directory}", error, number)))

    def _lock_directory(self, directory: Path) -> None:
        """Lock a run's directory until `release_directory`, and remove the remains of dead runs in it."""
        if self._lock is not None and self._lock.path.parent == directory.absolute():
            return
        self.release_directory()
        self._lock = DirectoryLock.take(directory / LOCK_NAME)
        # A Checkpointer that is dropped without `close` gives the directory back, too.
        self._release_lock = weakref.finalize(self, self._lock.release)
        if not self._lock.is_shared:  # with another Checkpointer of this process, whose save may be under way
            sweep(directory)

    def _end_save(self, job: SaveJob, path: Path, publication: Publication, begin: float) -> None:
        """Record a save that is committed, and make room for it; the thread of a background save calls it."""
        seconds = time.perf_counter() - begin
        self.metrics.record("ckpt/duration_s", seconds)
        self.metrics.record("ckpt/bytes", float(publication.num_bytes))
        if job.name is None and job.keep is not None and publication.commits:
            # Not the new one by itself: where another save of this process has overtaken it, the higher number stays.
            # Only here, after the second vote: until then the older one may be the last good one.
            retire(job.directory, job.keep, job.protected(), step=publication.step, prefix=self.kind.prefix)
        logger.info("saved %s: %.1f MiB in %.2f s", path, publication.num_bytes / 2**20, seconds)

    # --- resuming --------------------------------------------------------------------------------------------------

    def open_named(self, path: Path, verify: Verify = "full") -> StoredCheckpoint | None:
        """Open a checkpoint that the user has named; None for one of another library. Collective.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError: see StoredCheckpoint.
            ProcessGroupError: another rank cannot read it.
        """
        # The other ranks look for it only once it is back.
        with raise_together(self.process, f"load of {path}"):
            if self.process.is_local_main:
                # One process per node: two would both find it missing, and the second rename fail.
                recover_target(path)
        return self._open(path, verify)

    def _open(self, path: Path, verify: Verify) -> StoredCheckpoint | None:
        facts = has_manifest(path), self.kind.reads_without_manifest(path)
        seen = gather_or_raise(self.process, f"load of {path}", None, facts)
        # On one rank's word all open it and fail alike where its disk alone has the manifest.
        is_ours = any(has_one for has_one, _ in seen)
        return None if seen[0][1] and not is_ours else open_checkpoint(path, self.process, verify)

    def has_any(self, directory: Path, name: str | None = None) -> bool:
        """Whether a run's directory holds checkpoints, good or bad, or one of a name: rank 0's word. Collective."""
        found, error = False, None
        try:
            if self.process.is_main and name is not None:
                recover_target(directory / name)
                found = (directory / name).exists()
            elif self.process.is_main:
                found = bool(numbered_checkpoints(directory, self.kind.prefix))
                found = found or any(directory.glob(f"_bad-{self.kind.prefix}*"))
        except Exception as raised:
            error = raised
        return bool(gather_or_raise(self.process, f"selection of a checkpoint in {directory}", error, found)[0])

    @section("load")
    def select_named(self, path: Path, verify: Verify, files: FilesToRead) -> Selection:
        """Open and verify the checkpoint that the user has named, whatever is beside it. Collective."""
        self.metrics.begin_resume()
        with self.metrics.resuming("select"):
            selection = Selection(path, self.open_named(path, verify), is_named=True)
        # Before the caller changes anything: an object that is half loaded cannot go back.
        flaw = self._verify(selection, files)
        if flaw is not None:
            raise CorruptCheckpointError(flaw)
        return selection

    @section("load")
    def select_newest(
        self,
        directory: Path,
        verify: Verify,
        files: FilesToRead,
        missing: AccelTrainerError,
        known_bad: Sequence[str] = (),
    ) -> Selection:
        """Open and verify the newest good one of a run's checkpoints. Collective: rank 0 decides for all.

        An incomplete or corrupt one is renamed to `_bad-...`, with a warning that says why, and the next older one is
        taken. One that rank 0 can read and another rank cannot is an error.

        Args:
            missing: raised where there has never been one.
            known_bad: what an earlier selection has passed over; see `pass_over_together`.

        Raises:
            CorruptCheckpointError: there are some, and none of them is good.
            IncompatibleCheckpointError: the newest was written by a newer version.
            ProcessGroupError: another rank failed.
        """
        self.metrics.begin_resume()
        passed_over = list(known_bad)
        while True:
            fault_point("load.select")
            with self.metrics.resuming("select"):
                choice, error = None, None
                if self.process.is_main:
                    try:
                        choice = choose_newest(directory, verify, self.kind, passed_over, missing)
                    except (AccelTrainerError, OSError) as raised:
                        error = raised
                section = f"selection of a checkpoint in {directory}"
                path, passed_over = gather_or_raise(self.process, section, error, (choice, passed_over))[0]
                selection = Selection(path, self._open(path, verify), passed_over)
            flaw = self._verify(selection, files)
            if flaw is None:
                return selection
            if self.process.is_main:
                pass_over(path, flaw, passed_over)

    def pass_over_together(self, selection: Selection, error: Exception) -> bool:
        """Put a checkpoint aside that was found to be corrupt while it was loaded, and return whether it was that.

        Collective: the load has failed on every rank, on some of them because another one had.

        Args:
            error: this rank's. Of contents that match their checksums, as of a checkpoint that has none.
        """
        flaw = str(error) if isinstance(error, CorruptCheckpointError) else None
        votes = gather_or_raise(
            self.process, f"load of {selection.path}", None, (flaw, isinstance(error, ProcessGroupError))
        )
        flaws = [flaw for flaw, _ in votes if flaw is not None]
        if not flaws or not all(flaw is not None or is_others for flaw, is_others in votes):
            return False
        if self.process.is_main:
            pass_over(selection.path, flaws[0], selection.passed_over)
        return True

    def _verify(self, selection: Selection, files: FilesToRead) -> str | None:
        """Verify the files that the ranks will read; return the flaw of a corrupt one. Collective."""
        stored = selection.stored
        if stored is None:
            return None
        fault_point("load.verify", stored.manifest.step)
        with self.metrics.resuming("verify"):
            return stored.find_flaw_together(files(stored.manifest))

    # --- the end ---------------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Wait until a background save is complete, and raise the error that it met on any rank. Collective."""
        if self.background is not None:
            self.background.wait()

    def release_directory(self) -> None:
        """Let other runs save to this one's directory."""
        if self._release_lock is not None:
            self._release_lock()
        self._lock = self._release_lock = None

    def close(self) -> None:
        """Wait for a background save, and release the directory. Collective."""
        try:
            self.wait()
        finally:
            self.release_directory()

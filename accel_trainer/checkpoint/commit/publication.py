"""A checkpoint directory appears under its name only when every rank has written its files, and all are on the disk.

The order of a save, each step on every rank before the next:

1. rank 0 makes `.tmp-NAME-XXXXXXXX` beside the target and broadcasts its name;
2. each rank writes its files there, hashing while it writes, and brings each of them and its directory to the disk;
3. the ranks vote: an error removes the directory, and all ranks raise;
4. rank 0 gathers the tables of written files; it writes manifest.json, then COMMITTED with its sha256, and brings them
   and the directory to the disk;
5. rank 0 renames the directory, and brings its parent to the disk: a rename is durable with its directory only;
6. the ranks vote again. Only then may retention remove an older checkpoint.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from accel_trainer.checkpoint.commit.disk import check_space, explain_full_disk, fsync_path, write_durably
from accel_trainer.checkpoint.commit.lock import DirectoryLock, lock_of
from accel_trainer.checkpoint.commit.rename import check_target, publish_name, remove_tree, sweep
from accel_trainer.checkpoint.commit.staging import StagedDirectory
from accel_trainer.checkpoint.format.checksums import FileEntry
from accel_trainer.checkpoint.format.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    TensorEntry,
    used_versions,
)
from accel_trainer.checkpoint.format.safetensors_file import StagingMemory
from accel_trainer.checkpoint.format.verification import list_files
from accel_trainer.errors import ConfigError, ProcessGroupError
from accel_trainer.runtime.fault_injection import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together

__all__ = ["Publication"]

Tables = tuple[dict[str, FileEntry], dict[str, dict[str, TensorEntry]]]
"""The files and the tensors that a rank has written."""


def _error_of(action: Callable[[], object]) -> BaseException | None:
    """Return the error of an action, this rank's vote."""
    try:
        action()
    except (Exception, SystemExit) as error:
        return error
    return None


class Publication:
    """One save, from the temporary directory to the name; every rank enters it and calls `commit`.

        with Publication(target, process) as staged:
            ...
        publication.commit()

    An error of the block is kept: it is this rank's vote in `vote` and `commit`.
    """

    def __init__(
        self,
        target: Path,
        process: ProcessContext,
        *,
        step: int | None = None,
        each_node: bool = False,
        need_bytes: int = 0,
        memory: StagingMemory | None = None,
        owns_name: bool = False,
        is_locked: bool = False,
    ) -> None:
        """Describe the save; nothing happens yet.

        Args:
            step: number of the checkpoint, for its manifest.
            each_node: every node has a disk of its own, and commits the files of its ranks; rank 0's vote decides.
            need_bytes: size of the files of this rank; the sum over the ranks is compared with the free space.
            memory: for copies of the files until `commit`; see StagedDirectory.
            owns_name: a directory of that name is replaced with all its files, also those that no checkpoint wrote.
            is_locked: the caller holds the lock of the directory around it; otherwise `target` has one for this save.
        """
        # Of a link that the user has named, the target is replaced; one among a run's checkpoints is replaced itself.
        real = os.path.realpath
        self.target = Path(real(target.parent), target.name) if is_locked else Path(real(target))
        self.process = process
        self.step = step
        self.commits = process.is_local_main if each_node else process.is_main
        self._first = process.rank - process.local_rank if each_node else 0
        self._each_node = each_node
        self._need_bytes = need_bytes
        self._memory = memory
        self._owns_name = owns_name
        self._is_locked = is_locked
        self._section = f"save of {target}"
        self._leftover: Path | None = None
        self._lock: DirectoryLock | None = None
        self._error: BaseException | None = None
        self.staged: StagedDirectory | None = None
        self.num_bytes = 0
        """Size of the checkpoint, once it is committed; of this node's files with `each_node`."""

    def _ranks(self) -> range:
        """Return the ranks that write into this rank's directory."""
        last = self._first + self.process.local_world_size if self._each_node else self.process.world_size
        return range(self._first, min(last, self.process.world_size))

    def __enter__(self) -> StagedDirectory:
        """Make the temporary directory, and return it on every rank. Collective.

        Raises:
            ConfigError: the target is a file, or a directory that holds something else than a checkpoint.
            CheckpointLockedError: another run is saving to it.
            DiskFullError: there is no room.
            ProcessGroupError: another rank failed.
        """
        error = _error_of(partial(fault_point, "save.begin", self.step))
        needs = gather_or_raise(self.process, self._section, error, self._need_bytes)
        name = f".tmp-{self.target.name}-{uuid.uuid4().hex[:8]}"
        if self.commits:
            error = _error_of(partial(self._make, name, sum(needs[rank] for rank in self._ranks())))
        try:
            names = gather_or_raise(self.process, self._section, error, name)
        except BaseException:
            self.abandon(self.target.parent / name)
            raise
        # The committing rank is the first of those whose files it commits.
        path = self.target.parent / names[self._first]
        self.staged = StagedDirectory(path, self.step, commits=self.commits, memory=self._memory, ranks=self._ranks())
        self._error = _error_of(partial(fault_point, "save.tmp_made", self.step))
        return self.staged

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            return False
        if isinstance(error, Exception | SystemExit):
            self._error = error
            return True
        self.abandon()
        return False

    def _make(self, name: str, need_bytes: int) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_locked:
            self._lock = DirectoryLock.take(lock_of(self.target))
        sweep(self.target.parent, self.target.name)
        if not self._owns_name:
            check_target(self.target)
        check_space(self.target.parent, need_bytes)
        (self.target.parent / name).mkdir()

    def vote(self) -> None:
        """Raise on all ranks if the block failed on one of them; nothing is left of the save then. Collective."""
        try:
            gather_or_raise(self.process, self._section, self._error)
        except BaseException:
            self.abandon()
            raise

    def commit(self, group: dist.ProcessGroup | None = None, *, keeps: bool = False) -> Path:
        """Vote, and publish the directory under its name when all ranks have written their files. Collective.

        Args:
            group: whose ranks vote; a group of its own where a thread calls this.
            keeps: the staged directory outlives a failure, to be committed by another call, until `abandon`.

        Returns:
            The name.

        Raises:
            ProcessGroupError: another rank failed; nothing was published, and an older checkpoint is still there.
        """
        staged = self.staged
        assert staged is not None
        is_over = not keeps
        try:
            error = self._error or _error_of(partial(self._finish_writing, staged))
            firsts = gather_or_raise(self.process, self._section, error, self._first, group)
            tables = self._gather_tables(staged, sorted(set(firsts)), group)
            with raise_together(self.process, f"publication of {self.target}", group):
                fault_point("save.after_vote", self.step)
                self._publish(staged, tables)
            is_over = True
        finally:
            if is_over:
                self.abandon(self._leftover)
        return self.target

    def abandon(self, leftover: Path | None = None) -> None:
        """Remove a staged directory that was not committed, and `leftover`, and release the lock."""
        if self.commits:
            for path in (leftover, self.staged.path if self.staged is not None else None):
                if path is not None:
                    remove_tree(path)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _finish_writing(self, staged: StagedDirectory) -> None:
        staged.write_deferred()
        staged.sync_directories()
        fault_point("save.before_vote", self.step)

    def _gather_tables(
        self, staged: StagedDirectory, firsts: list[int], group: dist.ProcessGroup | None
    ) -> dict[int, Tables]:
        """Return the tables of each rank of this directory, on the rank that commits it: of `firsts`. Collective."""
        own = (staged.files, staged.tensors)
        if not self.process.is_distributed:
            return {self.process.rank: own}
        tables: dict[int, Tables] = {}
        for first in firsts:
            gathered: list[Any] | None = [None] * self.process.world_size if first == self.process.rank else None
            dist.gather_object(own if first == self._first else None, gathered, dst=first, group=group)
            tables |= {rank: table for rank, table in enumerate(gathered or []) if table is not None}
        return tables

    def _publish(self, staged: StagedDirectory, tables: dict[int, Tables]) -> None:
        """Write the manifest and the marker, and rename; other ranks pass the same fault points."""
        if self.commits:
            with explain_full_disk(staged.path):
                self._write_manifest(staged, tables)
        fault_point("save.manifest_written", self.step)
        if self.commits:
            fsync_path(staged.path)
        fault_point("save.before_rename", self.step)
        if self.commits:
            self._leftover = publish_name(staged.path, self.target)
        fault_point("save.after_rename", self.step)

    def _write_manifest(self, staged: StagedDirectory, tables: dict[int, Tables]) -> None:
        files: dict[str, FileEntry] = {}
        tensors: dict[str, Mapping[str, TensorEntry]] = {}
        for rank in self._ranks():
            own_files, own_tensors = tables[rank]
            twice = sorted(files.keys() & own_files.keys())
            if twice:
                raise ConfigError(f"rank {rank} and a lower one both wrote {twice[0]!r}; give each rank its own names")
            files |= own_files
            tensors |= own_tensors
        present = set(list_files(staged.path))
        missing = sorted(files.keys() - present)
        if missing:
            raise ProcessGroupError(
                f"{missing[0]!r} was written and is not in {staged.path.absolute()} on rank {self.process.rank}: the "
                "ranks do not see one disk. Save to a shared one, or set ProjectConfiguration(save_on_each_node=True)"
            )
        for name in sorted(present - files.keys()):
            staged.adopt(name)
            files[name] = staged.files[name]
        staged.sync_directories()
        manifest = Manifest(
            world_size=self.process.world_size,
            step=self.step,
            files=files,
            tensors=tensors,
            metadata=staged.metadata,
            versions=used_versions(),
        )
        self.num_bytes = manifest.num_bytes
        text = manifest.encode()
        write_durably(staged.path / MANIFEST_NAME, text)
        write_durably(staged.path / MARKER_NAME, manifest.digest(text))

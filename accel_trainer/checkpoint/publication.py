"""A checkpoint directory appears under its name only when every rank has written its files, and all are on the disk.

The order of a save, each step on every rank before the next:

1. rank 0 makes `_tmp-NAME-XXXXXXXX` beside the target and broadcasts its name;
2. each rank writes its files there, hashing while it writes, and brings each of them and its directory to the disk;
3. the ranks vote: an error removes the directory, and all ranks raise;
4. rank 0 gathers the tables of written files; it writes manifest.json, then COMMITTED with its sha256, and brings them
   and the directory to the disk;
5. rank 0 renames the directory, and brings its parent to the disk: a rename is durable with its directory only;
6. the ranks vote again. Only then may retention remove an older checkpoint.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as dist
from torch import Tensor

from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.disk import (
    MAX_JSON_BYTES,
    MAX_JSON_ITEMS,
    check_space,
    count_items,
    explain_full_disk,
    fsync_path,
    write_durably,
)
from accel_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    NODE_KEY,
    FileEntry,
    HashingFile,
    Manifest,
    NodePart,
    TensorEntry,
    check_name,
    hash_file,
    list_files,
    read_layout,
    used_versions,
)
from accel_trainer.checkpoint.safetensors_file import (
    LazyTensor,
    StagingMemory,
    dtype_name,
    tensor_file_bytes,
    write_tensor_file,
)
from accel_trainer.checkpoint.store import DirectoryLock, check_target, lock_of, publish_name, remove_tree, sweep
from accel_trainer.errors import CheckpointNotFoundError, ConfigError, ProcessGroupError
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.process import ProcessContext
from accel_trainer.runtime.shared_errors import gather_or_raise, raise_together
from accel_trainer.runtime.whereabouts import for_all

Slices = Mapping[str, tuple[Sequence[int], Sequence[int]]]
"""Shape of the full tensor and offsets in it, for each tensor that is a shard."""


class StagedDirectory(os.PathLike[str]):
    """A directory that becomes a checkpoint when it is committed; `staged / "name"` is a path in it.

    Each rank has its own, over one directory (one per node with `each_node`), and writes files under names that no
    other rank uses. Files that are written by path and not adopted are adopted at the end, by the committing rank.

    When it is given memory, `write_tensors`, `write_torch` and `write_json` keep copies, and `finish` writes them, on
    any thread. The other methods act at once.
    """

    def __init__(
        self,
        path: Path,
        step: int | None = None,
        *,
        commits: bool = True,
        memory: StagingMemory | None = None,
        group: dist.ProcessGroup | None = None,
        ranks: Sequence[int] = (0,),
    ) -> None:
        self.path = path
        self.ranks = ranks
        """The ranks that write into it."""
        self.commits = commits
        """Whether this rank commits the directory: it writes the files that would be the same on every rank."""
        self.step = step
        self.files: dict[str, FileEntry] = {}
        self.tensors: dict[str, dict[str, TensorEntry]] = {}
        self.metadata: dict[str, Any] = {}
        """For the manifest, as JSON; that of the committing rank counts."""
        self.memory = memory
        """For copies, where this is a save in the background."""
        self.group = group
        """Of all ranks, for what `finish` does on a thread."""
        self._deferred: list[Callable[[], None]] = []

    def __fspath__(self) -> str:
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def write_tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor | LazyTensor],
        *,
        slices: Slices | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write a safetensors file, one tensor at a time; the caller's tensors are neither copied nor kept.

        Args:
            tensors: lazy ones are made when their turn comes.
            slices: of tensors that are shards.

        Raises:
            ConfigError: the name is not a plain one, or was written before; a dtype is unknown to the format.
            DiskFullError: there is no room.
        """
        self.claim(name)
        entries = {key: _tensor_entry(key, tensor, (slices or {}).get(key)) for key, tensor in tensors.items()}
        if self.memory is not None:
            fault_point("stage", self.step)
            tensors = self.memory.copy(tensors)
        self._write(partial(self._write_tensors, name, tensors, metadata, entries))

    def write_tensors_now(
        self, name: str, tensors: Mapping[str, LazyTensor], metadata: Mapping[str, str] | None
    ) -> None:
        """Write a claimed file of full tensors, in a call that was deferred."""
        entries = {key: _tensor_entry(key, tensor, None) for key, tensor in tensors.items()}
        self._write_tensors(name, tensors, metadata, entries)

    def _write_tensors(
        self,
        name: str,
        tensors: Mapping[str, Tensor | LazyTensor],
        metadata: Mapping[str, str] | None,
        entries: dict[str, TensorEntry],
    ) -> None:
        need = tensor_file_bytes(tensors)
        check_space(self.path, need)
        with self._create(name, need) as file:
            write_tensor_file(file, tensors, metadata)
        self.tensors[name] = entries

    def _write(self, write: Callable[[], None]) -> None:
        if self.memory is None:
            write()
        else:
            self.defer(write)

    def defer(self, call: Callable[[], None]) -> None:
        """Have `finish` make a call, of a save in the background, after those before; again where it has failed."""
        self._deferred.append(call)

    def write_json(self, name: str, value: Any) -> None:
        """Write plain data, such as `json.dumps` takes; a ConfigError where it is more than a reader takes."""
        self.claim(name)
        text = json.dumps(value).encode()
        if len(text) > MAX_JSON_BYTES or count_items(text) > MAX_JSON_ITEMS:
            raise ConfigError(
                f"{name} would have {len(text):,} bytes and {count_items(text):,} pairs, lists and objects, and at "
                f"most {MAX_JSON_BYTES:,} and {MAX_JSON_ITEMS:,} are read of it; return tensors or NumPy arrays in "
                "place of long lists from state_dict()"
            )

        def write() -> None:
            with self._create(name, len(text)) as file:
                file.write(text)

        self._write(write)

    def write_torch(self, name: str, value: Any, *, is_private: bool = False) -> None:
        """Write nested values as `torch.save` does; with `is_private`, nobody changes their tensors any more."""
        self.claim(name)
        if self.memory is not None and not is_private:
            value = self.memory.copy_nested(value)

        def write() -> None:
            with self._create(name) as file:
                torch.save(value, file)

        self._write(write)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a new file to write into, for `torch.save` and the like; it cannot seek."""
        self.claim(name)
        with self._create(name) as file:
            yield file

    @contextmanager
    def _create(self, name: str, need_bytes: int | None = None) -> Iterator[BinaryIO]:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with explain_full_disk(path, need_bytes):
            try:
                with HashingFile(path, on_chunk=partial(fault_point, "save.mid_shard", self.step, path)) as file:
                    yield cast(BinaryIO, file)
                fault_point("save.after_shard", self.step, path)
            except Exception:
                path.unlink(missing_ok=True)  # incomplete, and on a full disk a retry needs its room
                raise
            assert file.entry is not None
            self.files[name] = file.entry

    def adopt(self, name: str) -> None:
        """Record a file, or a folder with all its files, that was written by path; it is read once to be hashed."""
        path = self.path / name
        if path.is_symlink() or not path.exists():
            kind = ConfigError if path.is_symlink() else CheckpointNotFoundError
            raise kind(f"{path.absolute()} was to be part of a checkpoint; expected a file or a folder")
        if path.is_dir():
            for child in sorted(path.iterdir()):
                self.adopt(f"{name}/{child.name}")
        elif name not in self.files:
            check_name(name)
            fsync_path(path)
            self.files[name] = hash_file(path)
            if layout := read_layout(path) if path.suffix == ".safetensors" else None:
                self.tensors[name] = layout

    def claim(self, name: str) -> None:
        """Refuse a name that is no plain one, or that is there already."""
        check_name(name)
        if name in self.files or (self.path / name).exists():
            raise ConfigError(f"{name!r} is in {self.path.absolute()} already; each file is written once")

    def finish(self) -> None:
        """Write the copies that are not written yet, and bring the names of this rank's files to the disk."""
        if self.memory is not None:
            self.memory.wait()
        while self._deferred:
            # Removed after it has been written: where the disk fails here, a retry goes on with this file.
            self._deferred[0]()
            del self._deferred[0]
        self.sync_directories()
        fault_point("save.before_vote", self.step)

    def sync_directories(self) -> None:
        """Bring the names of this rank's files to the disk."""
        # Up to the top: a name is durable with its directory, and that one with the directory above it (fsync(2)).
        for folder in sorted({(self.path / name).parent for name in self.files}, reverse=True):
            while folder != self.path:
                fsync_path(folder)
                folder = folder.parent
        fsync_path(self.path)


def _tensor_entry(
    name: str, tensor: Tensor | LazyTensor, place: tuple[Sequence[int], Sequence[int]] | None
) -> TensorEntry:
    dtype, sizes = dtype_name(tensor.dtype), tuple(int(length) for length in tensor.shape)
    if place is None:
        return TensorEntry(dtype, sizes, Box.full(sizes))
    shape, offsets = (tuple(int(number) for number in numbers) for numbers in place)
    box = Box(offsets, sizes)
    if not box.fits(shape):
        raise ConfigError(f"the shard {sizes} of tensor {name!r} does not lie at {offsets} of {shape}")
    return TensorEntry(dtype, shape, box)


Tables = tuple[dict[str, FileEntry], dict[str, dict[str, TensorEntry]]]
"""The files and the tensors that a rank has written."""


def _error_of(action: Callable[[], object]) -> BaseException | None:
    try:
        action()
    except (Exception, SystemExit) as error:
        return error
    return None


@dataclass
class Publication:
    """One save, from the temporary directory to the name; every rank enters it and calls `commit`.

        with Publication(target, process) as staged:
            ...
        publication.commit()

    An error of the block is kept: it is this rank's vote in `vote` and `commit`.
    """

    target: Path
    process: ProcessContext
    _: KW_ONLY
    step: int | None = None
    each_node: bool = False
    """Every node has a disk of its own, and commits the files of its ranks; rank 0's vote decides."""
    need_bytes: int = 0
    """Of the files of this rank; the sum over the ranks is compared with the free space."""
    memory: StagingMemory | None = None
    """For copies of the files until `commit`; see StagedDirectory."""
    group: dist.ProcessGroup | None = None
    """Whose ranks vote in `commit`; a group of its own where a thread calls that."""
    owns_name: bool = False
    """A directory of that name is replaced with all its files, also those that no checkpoint wrote."""
    is_locked: bool = False
    """The caller holds the lock of the directory around it; otherwise `target` has one for this save."""
    is_joined: bool = False
    """With `each_node`: the nodes' files come together in a store; see `part`."""

    def __post_init__(self) -> None:
        self._section = f"save of {self.target}"
        # Of a link that the user has named, the target is replaced; one among a run's checkpoints is replaced itself.
        real, target, process = os.path.realpath, self.target, self.process
        self.target = Path(real(target.parent), target.name) if self.is_locked else Path(real(target))
        self.commits = process.is_local_main if self.each_node else process.is_main
        self._first = process.rank - process.local_rank if self.each_node else 0
        last = self._first + process.local_world_size if self.each_node else process.world_size
        # Those that write into this rank's directory.
        self._ranks = range(self._first, min(last, process.world_size))
        self._leftover: Path | None = None
        self._lock: DirectoryLock | None = None
        self._error: BaseException | None = None
        self.staged: StagedDirectory | None = None
        self._nodes = [0]
        self._save = ""
        self._contents: dict[str, str] = {}
        self.part: NodePart | None = None
        """This node's part of a save that is committed, where it is joined and there are several."""
        self.num_bytes = 0
        """Size of the checkpoint, once it is committed; of this node's files with `each_node`."""

    def __enter__(self) -> StagedDirectory:
        """Make the temporary directory, and return it on every rank. Collective.

        Raises:
            ConfigError: the target is a file, or a directory that holds something else than a checkpoint.
            CheckpointLockedError: another run is saving to it.
            DiskFullError: there is no room; nothing was written.
            ProcessGroupError: another rank failed.
        """
        error = _error_of(partial(fault_point, "save.begin", self.step))
        # Before the directory exists: where one rank cannot begin, nothing has to be removed.
        needs = gather_or_raise(self.process, self._section, error, self.need_bytes)
        name = f"_tmp-{self.target.name}-{uuid.uuid4().hex[:8]}"
        if self.commits:
            error = _error_of(partial(self._make, name, sum(needs[rank] for rank in self._ranks)))
        try:
            # Also a barrier: no rank writes into the directory before the committing rank has made it.
            names = gather_or_raise(self.process, self._section, error, name)
        except BaseException:
            self.abandon(self.target.parent / name)
            raise
        # The committing rank is the first of those whose files it commits.
        path, self._save = self.target.parent / names[self._first], names[0].rpartition("-")[2]
        self.staged = StagedDirectory(
            path, self.step, commits=self.commits, memory=self.memory, group=self.group, ranks=self._ranks
        )
        self._error = _error_of(partial(fault_point, "save.tmp_made", self.step))
        return self.staged

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None:
            return False
        # Kept and not raised: the others are on their way to the vote, and would wait there for this rank. Ctrl-C is
        # raised at once: whoever presses it waits for no vote.
        if isinstance(error, Exception | SystemExit):
            self._error = error
            return True
        self.abandon()
        return False

    @for_all
    def _make(self, name: str, need_bytes: int) -> None:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if not self.is_locked:
            self._lock = DirectoryLock.take(lock_of(self.target))
        # After the lock: what has this name and is not ours by now was left by a dead run.
        sweep(self.target.parent, self.target.name)
        if not self.owns_name:
            check_target(self.target)
        # After the sweep, which makes room; for all ranks at once, of which each sees the same free space.
        check_space(self.target.parent, need_bytes)
        (self.target.parent / name).mkdir()

    def vote(self) -> None:
        """Raise on all ranks if the block failed on one of them; nothing is left of the save then. Collective."""
        try:
            gather_or_raise(self.process, self._section, self._error)
        except BaseException:
            self.abandon()
            raise

    def commit(self, *, keeps: bool = False) -> Path:
        """Vote, and publish the directory under its name when all ranks have written their files. Collective.

        Args:
            keeps: the staged directory outlives a failure, to be committed by another call, until `abandon`.

        Raises:
            ProcessGroupError: another rank failed; nothing was published, and an older checkpoint is still there.
        """
        staged = self.staged
        assert staged is not None
        is_over = not keeps
        try:
            # Every rank brings its files to the disk before it votes: after the vote any of them may die.
            error = self._error or _error_of(staged.finish)
            firsts = gather_or_raise(self.process, self._section, error, self._first, self.group)
            self._nodes = sorted(set(firsts))
            tables = self._gather_tables(staged, self._nodes)
            # The second vote: before the rename is durable no rank calls it saved, and none removes an older one.
            with raise_together(self.process, f"publication of {self.target}", self.group):
                fault_point("save.after_vote", self.step)
                self._publish(staged, tables)
            is_over = True
            if self.is_joined and len(self._nodes) > 1:
                self.part = self._share_out()
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

    def _share_out(self) -> NodePart:
        """Return the files of this node that none before it has. Collective."""
        own = self._contents
        held = gather_or_raise(self.process, self._section, None, set(own.values()), self.group)
        before = set[str]().union(*(held[first] for first in self._nodes if first < self._first))
        return NodePart(self._save, self._nodes, self._first, [name for name in own if own[name] not in before])

    def _gather_tables(self, staged: StagedDirectory, firsts: list[int]) -> dict[int, Tables]:
        """Return the tables of each rank of this directory, on the rank that commits it: of `firsts`. Collective."""
        own = (staged.files, staged.tensors)
        if not self.process.is_distributed:
            return {self.process.rank: own}
        tables: dict[int, Tables] = {}
        for first in firsts:
            # gather, not all_gather: the tables of many ranks are large, and one rank per directory needs them.
            gathered: list[Any] | None = [None] * self.process.world_size if first == self.process.rank else None
            dist.gather_object(own if first == self._first else None, gathered, dst=first, group=self.group)
            tables |= {rank: table for rank, table in enumerate(gathered or []) if table is not None}
        return tables

    @for_all
    def _publish(self, staged: StagedDirectory, tables: dict[int, Tables]) -> None:
        """Write the manifest and the marker, and rename; other ranks pass the same fault points."""
        if self.commits:
            with explain_full_disk(staged.path):
                self._write_manifest(staged, tables)
        # Of every rank, not of the committing one alone: the fault matrix kills any of them at each point.
        fault_point("save.manifest_written", self.step)
        if self.commits:
            fsync_path(staged.path)
        fault_point("save.before_rename", self.step)
        if self.commits:
            # Removed by `abandon` after the vote: until then all ranks know of the older checkpoint alone.
            self._leftover = publish_name(staged.path, self.target)
        fault_point("save.after_rename", self.step)

    def _write_manifest(self, staged: StagedDirectory, tables: dict[int, Tables]) -> None:
        files: dict[str, FileEntry] = {}
        tensors: dict[str, Mapping[str, TensorEntry]] = {}
        for rank in self._ranks:
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
        # What engines and hooks of the user wrote by path, which no table names.
        for name in sorted(present - files.keys()):
            staged.adopt(name)
            files[name] = staged.files[name]
        tensors |= staged.tensors
        staged.sync_directories()
        if len(self._nodes) > 1:
            staged.metadata[NODE_KEY] = {"save": self._save, "ranks": [self._ranks.start, self._ranks.stop]}
        manifest = Manifest(
            world_size=self.process.world_size,
            step=self.step,
            files=files,
            tensors=tensors,
            metadata=staged.metadata,
            versions=used_versions(),
        )
        self.num_bytes = manifest.num_bytes
        self._contents = {name: manifest.content_of(name) for name in files}
        text = manifest.encode()
        write_durably(staged.path / MANIFEST_NAME, text)
        # Last, after the fsync of the manifest: a marker that reaches the disk first would certify a torn one.
        write_durably(staged.path / MARKER_NAME, manifest.digest(text))

"""The lifecycle of checkpoints: save, select, wait, close. `Accelerator.save_state` and the Trainer both drive it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.background import BackgroundSaver, SavePolicy, save_persistently
from accel_trainer.checkpoint.boxes import balance_bytes
from accel_trainer.checkpoint.disk import explain_full_disk
from accel_trainer.checkpoint.manifest import Manifest
from accel_trainer.checkpoint.object_store import ObjectStore, Uploads, blocks_of, is_copy, shown, stage_copy
from accel_trainer.checkpoint.publication import Publication, StagedDirectory
from accel_trainer.checkpoint.reader import (
    CheckpointKind,
    Selection,
    StoredCheckpoint,
    Verify,
    choose_newest,
    has_manifest,
    open_checkpoint,
)
from accel_trainer.checkpoint.store import (
    LOCK_NAME,
    DirectoryLock,
    identify,
    is_complete,
    next_number,
    numbered_checkpoints,
    pass_over,
    recover_target,
    remove_tree,
    retire,
    sweep,
)
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ProcessGroupError,
)
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.memory import register_memory_owner
from accel_trainer.runtime.process import ProcessContext, find_attempt, read_environment
from accel_trainer.runtime.shared_errors import gather_calls, gather_or_raise, raise_together
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
    ends_run: bool = False
    """It is made at a signal that ends the run, which an upload that has failed does not change."""


def _pass_over_parts(paths: Iterable[Path], passed_over: list[str]) -> None:
    for path in paths:
        if is_complete(path):  # others are passed over for what they lack
            pass_over(path, "it is a part of one: this run has other nodes, or one has lost its own", passed_over)


class Checkpointer:
    """A run's checkpoints: one save in flight at most, one directory locked, metrics of the last save and resume.

    Every method is called by every rank, in the same order.
    """

    def __init__(
        self,
        process: ProcessContext,
        kind: CheckpointKind,
        metrics: CheckpointMetrics | None = None,
        store: str | None = None,
        upload_mib_per_second: float | None = None,
    ) -> None:
        self.process = process
        self.alone: ProcessContext | None = None
        """Rank 0 as a job of its own, while it saves without the others."""
        self._store = store
        """Address of the object store that gets a copy of each of a run's checkpoints."""
        self._upload_mib_per_second = upload_mib_per_second
        self._seen_in_store: Iterator[tuple[str, Manifest]] | None = None
        """What the store was found to hold, for the next selection; on rank 0."""
        self._flaws_in_store: list[str] = []
        """What was found there and is damaged; on rank 0."""
        self._tried_in_store = set[str]()
        """Names that were fetched: one that turns out to be no good is not fetched again."""
        self._resumes_from_store = False
        self._each_node = False
        """Whether the ranks have saved so together, last time."""
        # By the process that commits.
        self._uploads: Uploads | None = None
        self._upload_error: BaseException | None = None
        """Of an upload, until it is raised."""
        self._raises_upload_errors = False
        """Whether the last save asked for that."""
        self._left_out: Callable[[Uploads], None] | None = None
        """Submits the last save, where the nodes have left it out because one of them was still sending another."""
        self._make_room: Callable[[], object] | None = None
        """Removes what the last save has kept for the uploads alone."""
        self.kind = kind
        self.metrics = CheckpointMetrics() if metrics is None else metrics
        self.background: BackgroundSaver | None = None
        """Once there has been a save in the background."""
        self._lock: DirectoryLock | None = None
        self._release_lock: weakref.finalize[..., object] | None = None
        register_memory_owner(self)

    def save(self, job: SaveJob) -> Path | None:
        """Save, after the background save that is in flight. Collective; a failure on one rank is raised on all.

        Returns None where nothing is saved and the policy is to go on without.

        Raises:
            SaveTimeoutError: the background save before this one has not ended in time; for others see `Publication`.
            OSError, CheckpointLockedError: an upload has failed since the save before. This one is written.
        """
        begin = time.perf_counter()
        sends = self._check_uploads(job)
        if self.background is not None and not self.background.wait_for_turn(job.policy):
            return None
        # After the wait: two saves would share the staging memory, and the directory may lack the room for both.
        outcome = save_persistently(partial(self._publish, job), self.process, job.policy, job.section)
        if outcome is None:
            return None
        path, publication = outcome
        on_commit = partial(self._end_save, job, path, publication, begin, sends)
        if job.in_background and self.background is not None:
            self.background.start(publication, on_commit, job.policy)
        else:
            on_commit()
        stalled = time.perf_counter() - begin
        self.metrics.record("ckpt/stall_s", stalled)
        self.metrics.stalled_seconds += stalled
        self._raise_upload_error()
        return path

    @contextmanager
    def saving_alone(self) -> Iterator[None]:
        """Context in which rank 0 saves, at once, without the others: as the only rank of a job."""
        everyone = self.process
        self.process = self.alone = replace(everyone, world_size=1, local_world_size=1)
        try:
            yield
        finally:
            self.process, self.alone = everyone, None

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
            group=None if background is None else background.thread_group,
            owns_name=job.replaces,
            is_locked=job.name is None,
            is_joined=job.name is None and self._store is not None,
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
        commits, number = self.process.is_local_main if job.each_node else self.process.is_main, job.number or 0

        def reserve() -> int:
            if commits:
                self._lock_directory(job.directory)
            is_given = job.replaces or not commits
            return number if is_given else max(number, next_number(job.directory, self.kind.prefix))

        # With a disk on every node each has counted its own, and all take the highest.
        return max(gather_calls(self.process, f"save to {job.directory}", reserve))

    def _lock_directory(self, directory: Path) -> None:
        """Lock a run's directory until `release_directory`, and remove the remains of dead runs in it."""
        if self._lock is not None and self._lock.path.parent == directory.absolute():
            return
        self.release_directory()
        if self._store is not None:
            self._open_store(self._store).refuse_source(directory)
        self._lock = DirectoryLock.take(directory / LOCK_NAME)
        # A Checkpointer that is dropped without `close` gives the directory back, too.
        self._release_lock = weakref.finalize(self, self._lock.release)
        if not self._lock.is_shared:  # with another Checkpointer of this process, whose save may be under way
            sweep(directory)

    def _end_save(self, job: SaveJob, path: Path, publication: Publication, begin: float, sends: bool) -> None:
        """Record a save that is committed, and make room for it; the thread of a background save calls it."""
        seconds = time.perf_counter() - begin
        self.metrics.record("ckpt/duration_s", seconds)
        self.metrics.record("ckpt/bytes", float(publication.num_bytes))
        if job.name is None and publication.commits:
            protected = set(job.protected())
            if self._store is not None:
                uploads = self._uploads = self._uploads or Uploads(self._open_store(self._store))
                names = [each.name for each in protected]
                submit = partial(Uploads.submit, path=path, keep=job.keep, protected=names, part=publication.part)
                self._left_out = None if sends else submit
                if sends:
                    submit(uploads)
                else:
                    logger.warning("%s is slower than saves come: %s is not uploaded", uploads.store.uri, path)
                protected.update(uploads.in_use)
            # Not the new one by itself: where another save of this process has overtaken it, the higher number stays.
            # Only here, after the second vote: until then the older one may be the last good one.
            if job.keep is not None:
                make_room = partial(retire, job.directory, job.keep, step=publication.step, prefix=self.kind.prefix)
                make_room(protected=protected)
                stay = job.protected  # and not the job, which holds its caller
                self._make_room = lambda: make_room(protected=stay())
        logger.info("saved %s: %.1f MiB in %.2f s", path, publication.num_bytes / 2**20, seconds)

    def _open_store(self, uri: str) -> ObjectStore:
        job = find_attempt(read_environment())[1]
        pace = self._upload_mib_per_second
        return ObjectStore(uri, self.kind.prefix, job, takes_over=self._resumes_from_store, mib_per_second=pace)

    def _check_uploads(self, job: SaveJob) -> bool:
        """Return whether this save is handed to the uploads, of which one may wait. Collective."""
        if self.alone is None:
            self._each_node = job.each_node
        self._raises_upload_errors = job.policy.on_save_error == "raise" and not job.ends_run
        is_busy = self._look_at_uploads()
        # Of nodes with disks of their own each has to send the same saves: none is dropped that waits.
        return not (self._are_apart and is_busy)

    def _raise_upload_error(self) -> None:
        """Raise, on all ranks, the error of an upload that was looked at, where that was asked for. Collective."""
        error, self._upload_error = self._upload_error, None
        if self._store is not None:
            raised = error if self._raises_upload_errors else None
            gather_or_raise(self.process, f"upload to {shown(self._store)}", raised)

    @property
    def _are_apart(self) -> bool:
        """Whether nodes with disks of their own send parts of one checkpoint."""
        return self._store is not None and self._each_node and self.process.local_world_size < self.process.world_size

    def _look_at_uploads(self) -> bool:
        """Return whether a node is sending; where one has failed, the others wait for it no more. Collective."""
        uploads = self._uploads
        is_busy = bool(uploads and uploads.in_use)  # before its error: who is idle here has no untold one
        error = None if uploads is None else uploads.take_error()
        self._upload_error = error or self._upload_error
        if not self._are_apart:
            return is_busy
        section, has_failed = f"upload to {shown(self._store)}", True
        try:
            looks = gather_or_raise(self.process, section, None, (is_busy, error is not None))
            has_failed = any(failed for _, failed in looks)
            return any(busy for busy, _ in looks)
        finally:
            if has_failed and uploads is not None:
                uploads.give_up()

    def finish_uploads(self, *, is_good: bool = True) -> None:
        """Wait until what has been saved is in the store, or cannot be. Collective, but for a run that has failed."""
        together = self._are_apart and is_good
        left_out, self._left_out = self._left_out, None
        self._wait_for_uploads(together=together)
        if left_out is not None and self._uploads is not None and is_good:
            left_out(self._uploads)
        self._wait_for_uploads(together=together)
        make_room, self._make_room = self._make_room, None
        if make_room is not None and self._uploads is not None and is_good:
            make_room()

    def _wait_for_uploads(self, *, together: bool) -> None:
        # Where all ranks come here, those that wait for a node that has failed learn of it.
        while together and self._look_at_uploads():
            if self._uploads is not None:
                self._uploads.wait(within_s=0.5)
        if self._uploads is not None:
            self._uploads.wait()

    def find_stored(self, is_wanted: Callable[[Manifest], bool]) -> str | None:
        """Return the address of the newest complete checkpoint of the store that is wanted. Not collective."""
        if self._store is None:
            return None
        store = self._open_store(self._store)
        names = (name for name, manifest in store.complete(store.names()) if is_wanted(manifest))
        return next((f"{self._store.rstrip('/')}/{name}" for name in names), None)

    def fetch(self, uri: str, directory: Path) -> Path:
        """Copy a checkpoint of an object store, or the newest of a run there, into a directory. Collective.

        Each process reads a part, each byte is read once for a disk; the same one is taken as it is where it is
        complete there, and another one of that name is renamed to `_bad-...`.

        Raises:
            CheckpointNotFoundError: there is no complete one.
        """
        section, (address, name) = f"fetch from {shown(uri)}", self._split(uri)

        def find() -> tuple[str, Manifest] | None:
            if not self.process.is_main:
                return None
            store = self._open_store(address)
            found = (name, store.manifest(name)) if name else next(store.complete(store.names()), None)
            if found is None:
                raise CheckpointNotFoundError(f"no complete checkpoint in {store.uri}; give the address of a run's")
            return found

        found = gather_calls(self.process, section, find)[0]
        assert found is not None
        path = directory / found[0]
        held = self._held_together([path], section)
        if not self._is_any_in_store(held, [found], section):
            flaw = self._copy_together(address, *found, directory)
            if flaw is not None:
                raise CorruptCheckpointError(flaw)
        self._resumes_from_store = self._store is not None and address.rstrip("/") == self._store.rstrip("/")
        return path

    def _is_any_in_store(self, held: Collection[Path], complete: Iterable[tuple[str, Manifest]], section: str) -> bool:
        """Whether one of the checkpoints here is that of its name in a store. Collective."""
        places = {path.name: path for path in held}

        def look() -> bool:
            return self.process.is_main and any(is_copy(places[n], manifest) for n, manifest in complete if n in places)

        return bool(held) and gather_calls(self.process, section, look)[0]

    def _held_together(self, paths: Iterable[Path], section: str) -> list[Path]:
        """Return the checkpoints that are complete on the disks of all nodes. Collective."""
        process = self.process
        first = process.rank - process.local_rank
        ranks = [first, min(first + process.local_world_size, process.world_size)]

        def look() -> dict[Path, str] | None:
            if not process.is_local_main:
                return None
            return {path: found for path in paths if (found := identify(path, ranks, process.world_size))}

        seen = [held for held in gather_calls(process, section, look) if held is not None]
        return [path for path, found in seen[0].items() if all(held.get(path) == found for held in seen)]

    def _fetch_newer(
        self, directory: Path, passed_over: list[str], is_wanted: Callable[[Manifest], bool] | None
    ) -> str | None:
        """Fetch the newest good checkpoint of the store, where it is newer than all complete ones here. Collective.

        Returns its name; None where there is none. What is on the disks of some nodes alone joins `passed_over`.
        """
        store = self._store
        if store is None:
            return None
        section, numbered = f"fetch from {shown(store)}", numbered_checkpoints(directory, self.kind.prefix)
        held = self._held_together([path for _, path in numbered], section)
        newest = max((number for number, path in numbered if path in held), default=-1)
        find = partial(self._find_newer, store, newest, is_wanted)

        while (found := gather_calls(self.process, section, find)[0]) is not None:
            flaw = self._copy_together(store, *found, directory)
            self._tried_in_store.add(found[0])
            if flaw is None:
                self._resumes_from_store = True
                break
            logger.warning("%s/%s is passed over: %s", shown(store), found[0], flaw)
        else:
            # Not where all here are of another run than those in the store: that one may be saving there.
            self._resumes_from_store = self._is_any_in_store(held, self._complete_of(held), section)
        if self.process.is_main:
            good = newest if found is None else int(found[0].removeprefix(self.kind.prefix))
            _pass_over_parts([path for number, path in numbered if number > good], passed_over)
        return None if found is None else found[0]

    def _complete_of(self, paths: Iterable[Path]) -> Iterator[tuple[str, Manifest]]:
        """Yield those of the store that have the names of `paths`, with their manifests, the highest number first."""
        assert self._store is not None
        store, names = self._open_store(self._store), {path.name for path in paths}
        yield from store.complete(name for name in store.names() if name in names)

    def _find_newer(
        self, store: str, newest: int, is_wanted: Callable[[Manifest], bool] | None
    ) -> tuple[str, Manifest] | None:
        """Return the newest of a store that is wanted, above a number and not tried yet; on rank 0, elsewhere None."""
        if not self.process.is_main:
            return None
        complete, self._seen_in_store = self._seen_in_store, None
        opened = self._open_store(store)
        if complete is None:
            names = (name for name in opened.names() if opened.number_of(name) > newest)
            complete = opened.complete(names, self._flaws_in_store)
        untried = (found for found in complete if found[0] not in self._tried_in_store)
        if is_wanted is not None:
            untried = (found for found in untried if is_wanted(found[1]))
        return next((found for found in untried if opened.number_of(found[0]) > newest), None)

    def _copy_together(self, uri: str, name: str, manifest: Manifest, directory: Path) -> str | None:
        """Copy a checkpoint of a store into a directory: each process a part of its bytes, each byte once for a disk.

        Collective. Returns the flaw of one that is not good; then nothing is left of it.
        """
        process, section, begin = self.process, f"fetch from {shown(uri)}", time.perf_counter()
        staged, ranks = self._stage_together(name, manifest, directory, section)
        store, leads = self._open_store(uri), process.rank == ranks[0]

        def fetch() -> str | None:
            try:
                blocks = blocks_of(manifest)
                # A byte more, so that many small files spread too.
                takers = balance_bytes([block.num_bytes + 1 for block in blocks], len(ranks))
                own = [block for block, taker in zip(blocks, takers, strict=True) if ranks[taker] == process.rank]
                store.fetch_blocks(name, manifest, staged, own, len(ranks))
            except (CorruptCheckpointError, CheckpointNotFoundError) as found:
                return str(found)
            return None

        try:
            flaw = next(filter(None, gather_calls(process, section, fetch)), None)
            with raise_together(process, section):
                if leads and flaw is None:
                    store.publish_copy(name, manifest, staged)
        finally:
            if leads:
                remove_tree(staged)
        if flaw is None:
            seconds = time.perf_counter() - begin
            logger.info("fetched %s/%s to %s in %.2f s", shown(uri), name, directory, seconds)
        return flaw

    def _stage_together(
        self, name: str, manifest: Manifest, directory: Path, section: str
    ) -> tuple[Path, Sequence[int]]:
        """Return a directory for a copy of a checkpoint, and the ranks that see it. Collective."""
        process = self.process

        def stage(makes: bool) -> Path | None:
            if not makes:
                return None
            self._lock_directory(directory)
            return stage_copy(directory, name, manifest)

        shared = gather_calls(process, section, partial(stage, process.is_main))[0]
        assert shared is not None
        # Nodes that do not see rank 0's disk have one each.
        sees = gather_or_raise(process, section, None, shared.is_dir())
        first = process.rank - process.local_rank
        node = range(first, min(first + process.local_world_size, process.world_size))
        ranks = [rank for rank, same in enumerate(sees) if same] if sees[process.rank] else node
        makes = not sees[process.rank] and process.rank == first
        own = gather_calls(process, section, partial(stage, makes))[ranks[0]]
        return own or shared, ranks

    def open_named(self, path: Path, verify: Verify = "full") -> StoredCheckpoint | None:
        """Open a checkpoint that the user has named; None for one of another library. Collective."""
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

    def places(self, directory: Path) -> str:
        """Return the places of a run's checkpoints, for messages."""
        return str(directory) if self._store is None else f"{directory} or {shown(self._store)}"

    def has_any(self, directory: Path, name: str | None = None) -> bool:
        """Whether a run's directory, on any node, or its store holds checkpoints, or one of a name. Collective."""

        def look() -> bool:
            if not self.process.is_local_main:
                return False
            if name is not None:
                recover_target(directory / name)
                return (directory / name).exists()
            prefix = self.kind.prefix
            if bool(numbered_checkpoints(directory, prefix)) or any(directory.glob(f"_bad-{prefix}*")):
                return True
            if self._store is None or not self.process.is_main:
                return False
            opened = self._open_store(self._store)
            complete = opened.complete(opened.names(), self._flaws_in_store)
            newest = next(complete, None)
            self._seen_in_store = None if newest is None else chain([newest], complete)
            return newest is not None or bool(self._flaws_in_store)

        return any(gather_calls(self.process, f"selection of a checkpoint in {directory}", look))

    def has_any_at(self, uri: str) -> bool:
        """Whether an object store holds a complete checkpoint, or one of the name in an address. Collective."""
        address, name = self._split(uri)

        def look() -> bool:
            if not self.process.is_main:
                return False
            store = self._open_store(address)
            return name in store.names() if name else store.newest() is not None

        return any(gather_calls(self.process, f"fetch from {shown(uri)}", look))

    def _split(self, uri: str) -> tuple[str, str]:
        """Return the address of a run in an object store, and the name of a checkpoint there, or ""."""
        place, _, name = uri.rstrip("/").rpartition("/")
        is_one = name.startswith(self.kind.prefix) and name.removeprefix(self.kind.prefix).isdecimal()
        return (place, name) if is_one else (uri, "")

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
        is_wanted: Callable[[Manifest], bool] | None = None,
    ) -> Selection:
        """Open and verify the newest good one of a run's checkpoints. Collective: rank 0 decides for all.

        An incomplete or corrupt one is renamed to `_bad-...`, with a warning that says why, and the next older one is
        taken. One that rank 0 can read and another rank cannot is an error.

        Args:
            missing: raised where there has never been one.
            known_bad: what an earlier selection has passed over; see `pass_over_together`.
            is_wanted: which of the store's may be fetched; None for any.

        Raises:
            CorruptCheckpointError: there are some, and none of them is good.
            IncompatibleCheckpointError: the newest was written by a newer version.
        """
        self.metrics.begin_resume()
        section, passed_over = f"selection of a checkpoint in {directory}", list(known_bad)

        def choose(bad: list[str]) -> tuple[Path, list[str]]:
            is_main = self.process.is_main
            return choose_newest(directory, verify, self.kind, bad, missing) if is_main else directory, bad

        while True:
            fault_point("load.select")
            with self.metrics.resuming("select"):
                # Again where one here was not good: the store may have it.
                fetched = self._fetch_newer(directory, passed_over, is_wanted)
                flaws = dict.fromkeys([*passed_over, *self._flaws_in_store])
                passed_over = [line for line in flaws if line.partition(":")[0] != fetched]
                path, passed_over = gather_calls(self.process, section, partial(choose, passed_over))[0]
                selection = Selection(path, self._open(path, verify), passed_over)
            flaw = self._verify(selection, files)
            if flaw is None:
                return selection
            if self.process.is_main:
                pass_over(path, flaw, passed_over)

    def pass_over_together(self, selection: Selection, error: Exception) -> bool:
        """Put a checkpoint aside that was found to be corrupt while it was loaded, and return whether it was that.

        Collective: the load has failed on every rank, with `error` on this one, and on some because another one had.
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

    def wait(self) -> None:
        """Wait until a background save is complete; see `BackgroundSaver.wait`. Collective."""
        if self.background is not None:
            self.background.wait()

    def free_memory(self) -> None:
        """Let go of copies and groups of background saves, once that in flight has written its files."""
        if self.background is not None:
            self.background.join()  # its error is logged: the ranks have no group to vote in
            self.background = None

    def release_directory(self) -> None:
        """Let other runs save to this one's directory."""
        if self._release_lock is not None:
            self._release_lock()
        self._lock = self._release_lock = None

    def close(self, *, is_failed: bool = False) -> None:
        """Wait for a background save and uploads, whose errors are raised, and release the directory.

        Collective, but where `is_failed`, which raises none.
        """
        is_good = False
        try:
            if is_failed and self.background is not None:
                self.background.join()
            self.wait()
            is_good = not is_failed
        finally:
            try:
                self.finish_uploads(is_good=is_good)
                if is_good:
                    self._look_at_uploads()
                    self._raise_upload_error()
            finally:
                self.release_directory()

"""Checkpoints in an object store, for a machine that loses its disk: any address that fsspec opens.

    URI/_owner.json            the run that saves there, when it last did, and its newest complete checkpoint
    URI/NAME/...               the files of a checkpoint, then manifest.json, and COMMITTED last

One without its marker is never read; what an upload that was killed has left is written over by the next of that name.
"""

from __future__ import annotations

import atexit
import errno
import inspect
import json
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_128_hexdigest

from accel_trainer import logging
from accel_trainer.checkpoint.disk import check_space, explain_full_disk, fsync_path
from accel_trainer.checkpoint.manifest import (
    BLOCK_BYTES,
    MANIFEST_NAME,
    MARKER_NAME,
    Manifest,
    NodePart,
    num_blocks,
)
from accel_trainer.checkpoint.store import is_gone, pass_over, signature
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    MissingExtraError,
)

logger = logging.get_logger(__name__)

T = TypeVar("T")

OWNER_NAME = "_owner.json"
OWNER_SECONDS = 600.0
"""A run that has not written to its store for so long is taken for dead by another one."""
GIVE_UP_SECONDS = 300.0
"""How long a request is tried again, with growing waits: stores ask for less, and networks come back."""
_CHUNK_BYTES = 2**20
_PART_BYTES = 32 * 2**20
_NUM_THREADS = 4
_POLL_SECONDS = 0.5
_UPLOADING = "checkpoint-upload"
_LASTING = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError)
"""Errors that no waiting mends; of the system's others, most come from networks."""
_CLIENTS = ("aiohttp", "aiobotocore", "azure", "botocore", "gcsfs", "google", "httpx", "requests", "urllib3")


def is_uri(value: object) -> bool:
    """Whether a place is an address such as `s3://bucket/run`, and no path."""
    return isinstance(value, str) and re.match(r"[a-z][a-z0-9+.-]*://", value) is not None


def shown(text: object) -> str:
    """Return an address, or an error about one, without the credentials that it may hold."""
    return re.sub(r"(//)[^/@\s]*@", r"\1***@", str(text))


def _may_pass(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return not isinstance(error, _LASTING)
    return type(error).__module__.partition(".")[0] in _CLIENTS


class ObjectStore:
    """The checkpoints of one run at an address. Every method is called by one process."""

    def __init__(
        self, uri: str, prefix: str, job: str = "", *, takes_over: bool = False, mib_per_second: float | None = None
    ) -> None:
        """Open an address; nothing is asked of the store yet.

        Args:
            prefix: of the names of checkpoints, before their numbers.
            job: name of the run, the same after a restart.
            takes_over: whether it has resumed from there.
            mib_per_second: bound on what uploads take of the network; None sets none.

        Raises:
            ConfigError: the address has no scheme that is known.
            MissingExtraError: the package for it is not installed.
        """
        self.uri = shown(uri.rstrip("/"))
        """As it may be shown."""
        self.prefix, self.takes_over = prefix, takes_over
        self._job, self._is_claimed = job or uuid.uuid4().hex, False
        self.is_given_up = threading.Event()
        """Set where another node of this run has failed to send its part: none waits for it any longer."""
        self._newest = ""
        """The highest that was sent to its end, by this run or the one before."""
        self._pace = None if mib_per_second is None else _Pace(mib_per_second * 2**20)
        try:
            from fsspec.core import url_to_fs

            filesystem, root = url_to_fs(uri.rstrip("/"))
        except ImportError as error:
            raise MissingExtraError(f"{self.uri} is opened by a package that is not installed: {error}") from error
        except ValueError as error:
            raise ConfigError(
                f"{self.uri!r} is no address of a store ({error}); use one such as s3://bucket/run, gs://bucket/run or "
                "file:///mnt/runs"
            ) from error
        self._files: Any = filesystem
        self._root = root.rstrip("/")

    def _try(self, call: Callable[[], T]) -> T:
        """Call the store until it answers; errors that may pass are waited out."""
        import tenacity

        failures: list[float] = []

        def is_over(state: tenacity.RetryCallState) -> bool:
            # From the first failure on: a large file may take longer than that to be sent.
            failures.append(time.monotonic())
            return failures[-1] - failures[0] >= GIVE_UP_SECONDS

        def note(state: tenacity.RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome is not None else None
            if state.attempt_number == 3:
                logger.warning("%s does not answer (%s); it is tried again", self.uri, shown(repr(error)))

        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            wait=tenacity.wait_random_exponential(multiplier=0.2, max=20.0),
            stop=is_over,
            before_sleep=note,
            reraise=True,
        )
        return attempts(call)

    def _read(self, name: str) -> bytes:
        return bytes(self._try(partial(self._files.cat_file, f"{self._root}/{name}")))

    def _remove(self, place: str, *, recursive: bool = False) -> None:
        with suppress(FileNotFoundError):
            self._try(partial(self._files.rm, place, recursive=recursive))

    # --- what is there ---------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of checkpoints, complete or not, lowest number first."""
        self._files.invalidate_cache()
        try:
            found = self._try(partial(self._files.ls, self._root, detail=False))
        except FileNotFoundError:
            return []
        names = {self._checked(str(place).rstrip("/").rpartition("/")[2]) for place in found} | {self._noted()}
        return sorted(filter(None, names), key=self.number_of)

    def _noted(self) -> str:
        """Return the name of the highest that was sent to its end, which a listing may not show yet; or ""."""
        with suppress(FileNotFoundError, ValueError, AttributeError):
            return self._checked(json.loads(self._read(OWNER_NAME)).get("newest"))
        return ""

    def _checked(self, name: Any) -> str:
        """Return the name of a checkpoint, "" for anything else."""
        is_one = isinstance(name, str) and re.fullmatch(re.escape(self.prefix) + "[0-9]{1,18}", name)
        return name if is_one else ""

    def number_of(self, name: str) -> int:
        """Return the number in a checkpoint's name."""
        return int(name.removeprefix(self.prefix))

    def manifest(self, name: str) -> Manifest:
        """Return the manifest of a complete checkpoint; see `Manifest.read` for the errors of others."""
        texts: dict[str, bytes] = {}
        try:
            for each in (MARKER_NAME, MANIFEST_NAME):
                texts[each] = self._read(f"{name}/{each}")
        except FileNotFoundError as error:
            if texts:
                raise CorruptCheckpointError(
                    f"{self.uri}/{name} has lost its {MANIFEST_NAME}; load another checkpoint"
                ) from error
            raise CheckpointNotFoundError(
                f"{self.uri}/{name} is incomplete: it has no {MARKER_NAME}, so its upload never ended; load another"
            ) from error
        with tempfile.TemporaryDirectory(prefix="accel-trainer-") as own:
            for each, text in texts.items():
                Path(own, each).write_bytes(text)
            # A manifest may be as long as its checkpoint's size allows.
            with open(Path(own, "size"), "wb") as file:
                file.truncate(self._try(partial(self._files.du, f"{self._root}/{name}")))
            try:
                return Manifest.read(Path(own))
            except AccelTrainerError as error:
                raise type(error)(str(error).replace(own, f"{self.uri}/{name}")) from None

    def complete(self, names: Iterable[str], flaws: list[str] | None = None) -> Iterator[tuple[str, Manifest]]:
        """Yield those of `names` that are complete, the last one first, each with its manifest; warn of others.

        Damage joins `flaws`, a line for each checkpoint.
        """
        for name in reversed([*names]):
            try:
                yield name, self.manifest(name)
            except (CheckpointNotFoundError, CorruptCheckpointError) as error:
                logger.warning("%s/%s is passed over: %s", self.uri, name, error)
                if flaws is not None and isinstance(error, CorruptCheckpointError):
                    flaws.append(f"{self.uri}/{name}: {error}")

    def newest(self) -> str | None:
        """Return the name of the newest complete checkpoint; None without any."""
        return next((name for name, _ in self.complete(self.names())), None)

    def _size(self, name: str) -> int | None:
        """Return the bytes of a file; None where there is none."""
        with suppress(FileNotFoundError):
            return int(self._try(partial(self._files.info, f"{self._root}/{name}"))["size"])
        return None

    # --- writing ---------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Write down that this run saves here.

        A run that has resumed from here takes over, and the one before is refused from then on: of a machine that is
        gone nobody can know more. So does any once a process of this machine that saved here has ended.

        Raises:
            CheckpointLockedError: another run does, or has taken over.
        """
        try:
            if not self._is_claimed:
                self._make_folder(self._root)
                # The store decides between two runs that begin at once, where it can.
                self._sign(mode="create")
            else:
                self._check_owner(time.time())
        except FileExistsError:
            self._check_owner(time.time())
        self._sign()
        self._is_claimed = True

    def _sign(self, **options: str) -> None:
        mine = {"job": self._job, **signature(), "boot": _boot(), "time": time.time()}
        text = json.dumps({**mine, "newest": self._newest}).encode()
        self._try(partial(self._files.pipe_file, f"{self._root}/{OWNER_NAME}", text, **options))

    def _check_owner(self, now: float) -> None:
        try:
            owner = json.loads(self._read(OWNER_NAME))
            job, host, age = owner["job"], owner["host"], now - float(owner["time"])
            self._newest = self._newest or self._checked(owner.get("newest"))
            # Machines may have one name, and each numbers its processes: they are of one that has not started again.
            has_ended = owner.get("boot") == _boot() != "" and owner["pid"] != os.getpid() and is_gone(owner)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return
        if job == self._job or not self._is_claimed and (self.takes_over or has_ended or age > OWNER_SECONDS):
            return
        if self._is_claimed:
            raise CheckpointLockedError(
                f"{self.uri} was taken over by a run on {host}, {age:.0f} s ago: this one saves there no more. End "
                "one of them, or give it an address of its own"
            )
        raise CheckpointLockedError(
            f"{self.uri} is the store of another run, on {host}, which wrote to it {age:.0f} s ago. Give this run an "
            f"address of its own, resume from there, or wait until {OWNER_SECONDS:.0f} s have passed since it ended"
        )

    def refuse_source(self, directory: Path) -> None:
        """Raise ConfigError where checkpoints of a directory would be copied over themselves, which unmakes them."""
        if getattr(self._files, "local_file", False) and os.path.realpath(self._root) == os.path.realpath(directory):
            raise ConfigError(
                f"checkpoint_uri is {self.uri}, the directory {directory.absolute()} in which the run saves; give its "
                "copies another place"
            )

    def put(self, path: Path, part: NodePart | None = None) -> int:
        """Copy a committed checkpoint, its marker last; return the bytes that this process has sent.

        Args:
            part: of nodes with disks of their own, each of which calls it; the store has one checkpoint then, as of a
                disk that all share.

        Raises:
            CheckpointLockedError: another run saves here.
            ConfigError: it is a node's part of one, and comes without the others.
            OSError: the store has refused a file, or has not answered for five minutes; or another node has not.
        """
        manifest, place = Manifest.read(path), f"{self._root}/{path.name}"
        if part is None and manifest.node_save is not None:
            raise ConfigError(
                f"{path} is one node's part of a checkpoint of {manifest.world_size} ranks, of no use by "
                "itself; a run with checkpoint_uri sends the parts of all nodes to its store"
            )
        if part is not None:
            manifest = manifest.of_files(part.files)
            if part.first > 0:
                self._follow(path, manifest, part)
                return manifest.num_bytes
        self.claim()
        # Of an earlier upload of that name: from here on it is not complete.
        self._remove(f"{place}/{MARKER_NAME}")
        self._make_folder(place)
        if part is None:
            self._put_files(path, manifest)
            text = (path / MANIFEST_NAME).read_bytes()
        else:
            text = self._lead(path, manifest, part).encode()
        self._put_text(f"{place}/{MANIFEST_NAME}", text)
        self._put_text(f"{place}/{MARKER_NAME}", Manifest.digest(text))
        for first in () if part is None else part.nodes:
            self._remove(self._note(path.name, first))
        self._newest = max(self._newest or path.name, path.name, key=self.number_of)
        self._sign()
        return manifest.num_bytes

    def _note(self, name: str, first: int) -> str:
        return f"{self._root}/{name}/_node_{first}.json"

    def _lead(self, path: Path, manifest: Manifest, part: NodePart) -> Manifest:
        """Send the first node's files while the others send theirs; return the manifest of all."""
        begin = time.monotonic()
        self._put_text(self._note(path.name, 0), json.dumps({"save": part.save}).encode())
        self._put_files(path, manifest)
        notes = [self._wait_for_note(self._note(path.name, first), part.save, begin) for first in part.nodes[1:]]
        return manifest.with_files_of([Manifest.decode(said["manifest"]) for said in notes])

    def _follow(self, path: Path, manifest: Manifest, part: NodePart) -> None:
        """Send the files of another node, once the first one has begun."""
        # Not before: where another run saves here, the first node is refused, and nobody touches its files.
        self._wait_for_note(self._note(path.name, 0), part.save, time.monotonic())
        self._put_files(path, manifest)
        said = {"save": part.save, "manifest": json.loads(manifest.encode())}
        self._put_text(self._note(path.name, part.first), json.dumps(said).encode())

    def _wait_for_note(self, place: str, save: str, begin: float) -> dict[str, Any]:
        """Return a note of another node about this save, once it is there."""
        # Its part is about as large as this one.
        end = time.monotonic() + GIVE_UP_SECONDS + 2 * (time.monotonic() - begin)
        while True:
            with suppress(FileNotFoundError, ValueError, TypeError, KeyError):
                said: dict[str, Any] = json.loads(bytes(self._try(partial(self._files.cat_file, place))))
                if said["save"] == save:
                    return said
            if self.is_given_up.wait(_POLL_SECONDS):
                raise OSError(
                    f"{self.uri}: another node could not send its part of {place.split('/')[-2]}; its log says why"
                )
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{self.uri}: {place.removeprefix(self._root + '/')} has not come from that node's first process "
                    f"in {time.monotonic() - begin:.0f} s; its log says why. The checkpoint is not complete there"
                )

    def _put_files(self, path: Path, manifest: Manifest) -> None:
        place = f"{self._root}/{path.name}"
        for folder in {name.rpartition("/")[0] for name in manifest.files} - {""}:
            self._make_folder(f"{place}/{folder}")
        self._in_threads(lambda name: self._put_file(path / name, f"{place}/{name}"), manifest.files)

    def _make_folder(self, place: str) -> None:
        # Once a folder, not once a file: S3 has none, and s3fs asks for the bucket (a fourth of an upload's requests).
        self._try(partial(self._files.makedirs, place, exist_ok=True))

    def _put_text(self, place: str, text: bytes) -> None:
        with tempfile.NamedTemporaryFile(prefix="accel-trainer-") as own:
            own.write(text)
            own.flush()
            self._put_file(Path(own.name), place)

    def _put_file(self, source: Path, place: str) -> None:
        num_bytes = source.stat().st_size

        def put() -> None:
            if self._pace is None:
                self._files.put_file(os.fspath(source), place, **self._put_options)
            else:
                self._put_slowly(source, place, self._pace)
            self._files.invalidate_cache(place.rpartition("/")[0])
            found = self._files.info(place)["size"]
            if found != num_bytes:
                raise OSError(f"{self.uri} has {found} bytes of {source.name}, and {num_bytes} were sent")

        self._try(put)

    def _put_slowly(self, source: Path, place: str, pace: _Pace) -> None:
        # Where it fails in the middle, a torn file is there, until the next attempt: it has no marker.
        with open(source, "rb") as own, self._files.open(place, "wb", block_size=_PART_BYTES) as target:
            while chunk := own.read(_CHUNK_BYTES):
                pace.wait_for(len(chunk))
                target.write(chunk)

    @cached_property
    def _put_options(self) -> dict[str, int]:
        """Bounds on a file's parts in memory: s3fs holds ten of 50 MiB, of each of four files."""
        asked = {"chunksize": _PART_BYTES, "max_concurrency": 2}
        known = inspect.signature(getattr(self._files, "_put_file", self._files.put_file)).parameters
        return asked if asked.keys() <= known.keys() else {}

    def _in_threads(self, function: Callable[[Any], object], items: Iterable[Any], num: int = _NUM_THREADS) -> None:
        # No executor: those take no work any more once the script is over, and its last upload is still under way.
        queue, errors = [*items], list[BaseException]()
        left = iter(queue)

        def work() -> None:
            try:
                for item in left:
                    if errors:
                        return
                    function(item)
            except BaseException as error:
                errors.append(error)

        others = [threading.Thread(target=work, name="checkpoint-store") for _ in range(min(num, len(queue)) - 1)]
        with suppress(RuntimeError):  # Python 3.12 starts none then
            for thread in others:
                thread.start()
        work()
        for thread in others:
            if thread.is_alive():
                thread.join()
        if errors:
            raise errors[0]

    def retire(self, keep: int, protected: Collection[str] = ()) -> list[str]:
        """Remove complete checkpoints of lower numbers until `keep` are left, and return their names.

        The `protected` ones and the newest stay; so do incomplete ones.
        """
        complete = [name for name in self.names() if self._size(f"{name}/{MARKER_NAME}") is not None]
        going = [name for name in complete[:-1] if name not in protected][: max(0, len(complete) - max(keep, 1))]
        for name in going:
            # The marker first: a kill in the middle leaves none that looks complete.
            self._remove(f"{self._root}/{name}/{MARKER_NAME}")
            self._remove(f"{self._root}/{name}", recursive=True)
        return going

    # --- reading ---------------------------------------------------------------------------------------------------

    def fetch(self, name: str, directory: Path) -> Path:
        """Copy a checkpoint into a directory, each byte compared with its checksum while it arrives; return its path.

        It appears under its name once it is complete; what stands there is renamed to `_bad-...`. The caller has locked
        `directory`.

        Raises:
            CheckpointNotFoundError, CorruptCheckpointError: it is incomplete, or not as it was saved.
            DiskFullError: there is no room.
        """
        manifest = self.manifest(name)
        staged = stage_copy(directory, name, manifest)
        try:
            self.fetch_blocks(name, manifest, staged, blocks_of(manifest))
            return self.publish_copy(name, manifest, staged)
        finally:
            shutil.rmtree(staged, ignore_errors=True)

    def fetch_blocks(
        self, name: str, manifest: Manifest, staged: Path, blocks: Iterable[FileBlock], num_processes: int = 1
    ) -> None:
        """Copy blocks of a checkpoint's files, each compared with its checksum, and bring them to the disk.

        Args:
            num_processes: that do so together, each with blocks of its own.
        """

        def fetch(block: FileBlock) -> None:
            data, path = self._read_block(name, manifest, block), staged / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            with explain_full_disk(path, len(data)):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                try:
                    while data:
                        begin = block.number * BLOCK_BYTES + block.num_bytes - len(data)
                        data = data[os.pwrite(descriptor, data, begin) :]
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)

        self._in_threads(fetch, blocks, max(2, _NUM_THREADS // num_processes))

    def publish_copy(self, name: str, manifest: Manifest, staged: Path) -> Path:
        """Give a copy that has all its files its name, and what has it another; return its path. By one process."""
        for each in (MANIFEST_NAME, MARKER_NAME):
            (staged / each).write_bytes(self._read(f"{name}/{each}"))
            fsync_path(staged / each)
        for folder in {(staged / file).parent for file in manifest.files} | {staged}:
            fsync_path(folder)
        target = staged.with_name(name)
        try:
            os.rename(staged, target)  # over an empty directory, too
        except OSError:
            # Files of the user may be in it, or another run's weights.
            pass_over(target, f"It is not {self.uri}/{name} as it was saved, which gets its name", [])
            os.rename(staged, target)
        fsync_path(target.parent)
        return target

    def _read_block(self, name: str, manifest: Manifest, block: FileBlock) -> memoryview:
        """Return a block once its bytes have the checksum that they were saved with."""
        place, entry, begin = f"{name}/{block.file}", manifest.files[block.file], block.number * BLOCK_BYTES
        expected, end = (entry.blocks or (entry.checksum,))[block.number], begin + block.num_bytes

        def read() -> bytes:
            if not block.num_bytes:  # a store knows no empty range
                return b""
            try:
                return bytes(self._files.cat_file(f"{self._root}/{place}", start=begin, end=end))
            except OSError as error:
                if error.errno != errno.EINVAL:  # s3fs's, where the file ends before the range begins
                    raise
                return b""

        for _ in range(2):  # it may have been damaged on its way
            try:
                found = self._try(read)
            except FileNotFoundError as error:
                raise CheckpointNotFoundError(f"{self.uri}/{place} is missing; load another checkpoint") from error
            if xxh3_128_hexdigest(found) == expected:
                return memoryview(found)
        raise CorruptCheckpointError(
            f"{self.uri}/{place} is not as it was saved: from byte {begin:,} it has {len(found)} with checksum "
            f"{xxh3_128_hexdigest(found)}, and {block.num_bytes} with {expected} were written; load another one"
        )

    def verify(self, name: str, *, contents: bool = True) -> None:
        """Compare a checkpoint's files with its manifest, their lengths or `contents`; see `fetch` for the errors."""
        manifest = self.manifest(name)

        def check(file: str) -> None:
            expected = manifest.files[file].num_bytes
            size = self._size(f"{name}/{file}")
            if size is None:
                raise CheckpointNotFoundError(f"{self.uri}/{name}/{file} is missing; load another checkpoint")
            if size != expected:
                raise CorruptCheckpointError(
                    f"{self.uri}/{name}/{file} is not as it was saved: it has {size} bytes of {expected}; load another"
                )

        self._in_threads(check, manifest.files)
        if contents:
            self._in_threads(partial(self._read_block, name, manifest), blocks_of(manifest))


class FileBlock(NamedTuple):
    """A block of a checkpoint's file that has a checksum of its own."""

    file: str
    number: int
    num_bytes: int


def blocks_of(manifest: Manifest) -> list[FileBlock]:
    """Return the blocks of all files, the last one of each cut where it ends."""
    found = []
    for name, entry in manifest.files.items():
        count = num_blocks(entry.num_bytes)
        if len(entry.blocks or (entry.checksum,)) != count:
            raise CorruptCheckpointError(
                f"the manifest has {len(entry.blocks)} checksums for the {count} blocks of {name}; load another one"
            )
        sizes = [min(BLOCK_BYTES, entry.num_bytes - index * BLOCK_BYTES) for index in range(count)]
        found += [FileBlock(name, index, size) for index, size in enumerate(sizes)]
    return found


def is_copy(path: Path, stored: Manifest) -> bool:
    """Whether a checkpoint on a disk has the manifest of one in a store, or is the first node's part of that."""
    try:
        own = Manifest.read(path)
    except (AccelTrainerError, OSError):
        return False
    return own.files.keys() <= stored.files.keys() and own.of_files(own.files) == stored.of_files(own.files)


def stage_copy(directory: Path, name: str, manifest: Manifest) -> Path:
    """Make a directory for a copy of a checkpoint beside its place, where there is room for it; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    check_space(directory, manifest.num_bytes)
    staged = directory / f"_tmp-{name}-{uuid.uuid4().hex[:8]}"
    staged.mkdir()
    return staged


class _Pace:
    """Keeps the threads of an upload together to a number of bytes a second."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free_at, self._lock = bytes_per_second, 0.0, threading.Lock()

    def wait_for(self, num_bytes: int) -> None:
        """Wait until so many bytes more may go."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + num_bytes / self._rate
        time.sleep(max(0.0, begin - time.monotonic()))


def _boot() -> str:
    """Return what tells this start of this machine from all others; nothing where the system does not."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class _Upload(NamedTuple):
    path: Path
    keep: int | None
    protected: Collection[str]
    part: NodePart | None


def _wait_for_last_upload() -> None:
    """Wait at the end of the script for a save in the background, which begins an upload, and for uploads."""
    while own := [each for each in threading.enumerate() if each.name in ("checkpoint-writer", _UPLOADING)]:
        own[0].join()


# Before the end of Python's executors, in which aiohttp looks up the addresses of stores. Those have registered theirs
# on import (`manifest`); the last is called first, and there is no public way (3.11 to 3.14).
getattr(threading, "_register_atexit", atexit.register)(_wait_for_last_upload)


class Uploads:
    """The copies of a run's checkpoints in its store, made by a thread one after the other, on one process."""

    # The thread is not a daemon: the interpreter waits for it at exit, so that the last upload of a script completes.

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.error: BaseException | None = None
        """Of an upload that has failed, until somebody takes it."""
        self._waiting: _Upload | None = None
        self._active: _Upload | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def in_use(self) -> list[Path]:
        """Checkpoints that are being read, or wait for it, and must stay."""
        with self._lock:
            return [each.path for each in (self._active, self._waiting) if each is not None]

    def submit(
        self, path: Path, keep: int | None, protected: Collection[str] = (), part: NodePart | None = None
    ) -> None:
        """Have a committed checkpoint copied, after the one that is under way; one that still waits gives way to it.

        Args:
            keep: how many stay in the store; None keeps all.
            protected: names of those that stay whatever their number.
            part: of this node, where several have disks of their own.
        """
        with self._lock:
            if self._waiting is not None:
                logger.warning("%s is slower than saves come: %s is not uploaded", self.store.uri, self._waiting.path)
            self._waiting = _Upload(path, keep, protected, part)
            self.store.is_given_up.clear()
            if self._thread is not None and self._thread.is_alive():
                return
            self._thread = threading.Thread(target=self._run, name=_UPLOADING)
            with suppress(RuntimeError):
                self._thread.start()
                return
        # Python 3.12 starts none once the script is over: it is the thread of a background save that comes here then.
        self._run()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._waiting is None:
                    self._active = self._thread = None
                    return
                self._active, self._waiting = self._waiting, None
                path, keep, protected, part = self._active
            begin, is_first = time.perf_counter(), part is None or part.first == 0
            try:
                num_bytes = self.store.put(path, part)
                if keep is not None and is_first:
                    self.store.retire(keep, protected)
            except BaseException as error:
                self.error = error
                logger.error("upload of %s to %s failed: %s", path, self.store.uri, shown(str(error)))
            else:
                seconds = time.perf_counter() - begin
                logger.info("uploaded %s to %s: %.1f MiB in %.2f s", path, self.store.uri, num_bytes / 2**20, seconds)

    def give_up(self) -> None:
        """Wait for no part of another node in the upload that is under way."""
        self.store.is_given_up.set()

    def wait(self, within_s: float | None = None) -> None:
        """Wait until nothing is left to be copied, or about so long."""
        while (thread := self._thread) is not None:
            thread.join(within_s)
            if within_s is not None:
                return

    def take_error(self) -> BaseException | None:
        """Return the error of an upload, once."""
        error, self.error = self.error, None
        return error

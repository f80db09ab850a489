"""Checksums of files: while they are written, and in parallel when they are read.

A file is hashed in blocks of 64 MiB, so that several cores can check one large file. A file of one block has the plain
checksum of its contents; a longer one that of its blocks' digests, one after the other.

The checksum is XXH3 of 128 bits: it tells damage, not forgery, and is as fast as memory (29.6 GB/s on one core of an
i7-9700K, https://xxhash.com). sha256 takes ten times as long on a processor without instructions for it, more than the
disk.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import stat
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import xxhash
from safetensors import SafetensorError, safe_open

from accel_trainer import logging
from accel_trainer.checkpoint.boxes import Box
from accel_trainer.checkpoint.disk import (
    MAX_JSON_BYTES,
    MAX_JSON_ITEMS,
    as_corrupt,
    check_regular,
    parse_json,
    read_regular,
)
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)

CHECKSUM = "xxh3-128"

# Part of the format. Large enough that the manifest stays small (16 digests a GiB), small enough that a 1 GiB file
# keeps 16 threads busy.
BLOCK_BYTES = 64 * 2**20
# Smaller pieces are not faster, and each of them asks for the interpreter's lock, which a run that trains wants too.
_READ_BYTES = 4 * 2**20
_WRITE_BYTES = 16 * 2**20
# The amount of written data after which the disk is set to work on it.
_FLUSH_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and checksums of a file as it was written."""

    num_bytes: int
    checksum: str
    """Of the file; of the concatenated digests of its `blocks` when it has more than one."""
    blocks: tuple[str, ...] = ()


class BlockHasher:
    """The block checksums of a file whose bytes come in order."""

    def __init__(self) -> None:
        self._digests: list[bytes] = []
        self._current = xxhash.xxh3_128()
        self._room = BLOCK_BYTES
        self.num_bytes = 0

    def update(self, data: memoryview) -> None:
        """Add the next bytes."""
        self.num_bytes += len(data)
        while len(data):
            if not self._room:
                self._digests.append(self._current.digest())
                self._current, self._room = xxhash.xxh3_128(), BLOCK_BYTES
            head = data[: self._room]
            self._current.update(head)
            self._room -= len(head)
            data = data[len(head) :]

    def entry(self) -> FileEntry:
        """Return size and checksums of the bytes so far."""
        return make_entry(self.num_bytes, [*self._digests, self._current.digest()])


def make_entry(num_bytes: int, digests: list[bytes]) -> FileEntry:
    """Return the entry of a file whose blocks have these digests."""
    if len(digests) == 1:
        return FileEntry(num_bytes, digests[0].hex())
    root = xxhash.xxh3_128_hexdigest(b"".join(digests))
    return FileEntry(num_bytes, root, tuple(digest.hex() for digest in digests))


class HashingFile(io.RawIOBase):
    """A new file whose bytes are hashed while they are written. Not seekable; `close` makes its contents durable.

    The entry is known after `close`. While this thread hashes and writes, another one brings earlier bytes to the disk,
    so that the final fsync has little left to wait for. `on_chunk` is called after each chunk.
    """

    def __init__(self, path: Path, on_chunk: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.path = path
        self.entry: FileEntry | None = None
        self._on_chunk = on_chunk
        self._hasher = BlockHasher()
        # No executor: those take no work any more once the script is over, and its last save is still being written.
        self._flushing: threading.Thread | None = None
        self._flush_error: OSError | None = None
        self._unflushed_bytes = 0
        # O_EXCL: a name that exists belongs to another rank, or is a link to somewhere.
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, data: Any) -> int:
        """Write all of `data`, any contiguous buffer."""
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), _WRITE_BYTES):
            self._write_chunk(view[begin : begin + _WRITE_BYTES])
        return len(view)

    def _write_chunk(self, chunk: memoryview) -> None:
        # Of the bytes that were given, before the system has them: reading them back would certify the damage.
        self._hasher.update(chunk)
        left = chunk
        while len(left):
            left = left[os.write(self._descriptor, left) :]
        self._unflushed_bytes += len(chunk)
        if self._unflushed_bytes >= _FLUSH_BYTES:
            self._flush_early()
        self._on_chunk()

    def _flush_early(self) -> None:
        # One at a time: a slow disk shall slow down the next chunk, not pile up threads.
        if self._flushing is not None and self._flushing.is_alive():
            return
        self._end_flush()
        thread = threading.Thread(target=self._flush, name="checkpoint-flush")
        try:
            thread.start()
            self._flushing = thread
        except RuntimeError:
            # Python 3.12 starts none once the script is over, and its last save is still being written.
            self._flush()
        self._unflushed_bytes = 0

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._flush_error = error

    def _end_flush(self) -> None:
        if self._flushing is not None:
            self._flushing.join()
        if self._flush_error is not None:
            raise self._flush_error

    def close(self) -> None:
        """Bring the file to the disk, and close it."""
        if self.closed:
            return
        try:
            # First its error: Linux reports a failed write-back to one fsync of a descriptor only, and a later one
            # would succeed without the data (https://wiki.postgresql.org/wiki/Fsync_Errors).
            self._end_flush()
            os.fsync(self._descriptor)
            self.entry = self._hasher.entry()
        finally:
            os.close(self._descriptor)
            super().close()


def _hash_block(path: Path, index: int) -> bytes:
    digest, left = xxhash.xxh3_128(), BLOCK_BYTES
    # Read, not mapped: a bad sector is an error that names the file, and no signal that ends the process.
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        buffer = memoryview(bytearray(min(_READ_BYTES, size)))  # zeroed: 1 ms, for each file of a few KiB too
        file.seek(index * BLOCK_BYTES)
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def hash_blocks(tasks: Iterable[tuple[Path, int]], num_threads: int) -> list[bytes]:
    """Return the digest of each block, given as a path and the block's index."""
    tasks = list(tasks)
    # No pool for one block, which most files of a small run are.
    if num_threads < 2 or len(tasks) < 2:
        return [_hash_block(path, index) for path, index in tasks]
    with ThreadPoolExecutor(min(num_threads, len(tasks)), thread_name_prefix="checkpoint-hash") as pool:
        return list(pool.map(lambda task: _hash_block(*task), tasks))


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks of a file of this size; an empty file has one."""
    return max(1, -(-num_bytes // BLOCK_BYTES))


def hash_file(path: Path, num_threads: int = 1) -> FileEntry:
    """Return size and checksums of a file by reading it."""
    num_bytes = path.stat().st_size
    digests = hash_blocks(((path, index) for index in range(num_blocks(num_bytes))), num_threads)
    return make_entry(num_bytes, digests)


FORMAT_VERSION = 3
"""The one that is written, and the lowest that is read: no release wrote an earlier one."""

MANIFEST_NAME = "manifest.json"
MARKER_NAME = "COMMITTED"
_FREE_ITEMS, _BYTES_PER_ITEM = 200_000, 4
"""A manifest has at most so many items, and one more for so many bytes of the files that it describes.

Each tensor has 9 of them, and stands in the header of its file, too, in 50 bytes or more.
"""


NODE_KEY = "node"
"""In the metadata of a checkpoint that one of several nodes has on a disk of its own: the save, and the ranks in it."""


class NodePart(NamedTuple):
    """The part of a node in a save that several have on disks of their own."""

    save: str
    """The same on all nodes."""
    nodes: Sequence[int]
    """By their first ranks."""
    first: int
    """Of this node."""
    files: Collection[str]
    """That no node before it has."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor of a safetensors file, which holds a box of it."""

    dtype: str
    """As safetensors names it: "F32", "BF16"."""
    shape: tuple[int, ...]
    """Of the full tensor."""
    box: Box


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    world_size: int
    step: int | None = None
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, TensorEntry]] = field(default_factory=dict)
    """By file, then by tensor."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The saver's own entries: plain JSON."""
    versions: Mapping[str, str] = field(default_factory=dict)

    def reserves(self, name: str) -> bool:
        """Whether a file of this name may not lie in the checkpoint unlisted: any, or those of `reserved_names`."""
        patterns = self.metadata.get("reserved_names")
        return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, the manifest not counted."""
        return sum(entry.num_bytes for entry in self.files.values())

    @property
    def node_save(self) -> str | None:
        """Name of the save that this is a node's part of; None of a full one."""
        node = self.metadata.get(NODE_KEY)
        return str(node.get("save"))[:80] if isinstance(node, dict) else None

    def of_files(self, names: Collection[str]) -> Manifest:
        """Return the manifest of some of the files, as of a full checkpoint."""
        return replace(
            self,
            files={name: self.files[name] for name in names},
            tensors={name: table for name, table in self.tensors.items() if name in names},
            metadata={key: value for key, value in self.metadata.items() if key != NODE_KEY},
        )

    def with_files_of(self, others: Iterable[Manifest]) -> Manifest:
        """Return the manifest of the files of several."""
        files, tensors = dict(self.files), dict(self.tensors)
        for other in others:
            files |= other.files
            tensors |= other.tensors
        return replace(self, files=files, tensors=tensors)

    def content_of(self, name: str) -> str:
        """Return a word that is the same for files of two nodes of which one will do."""
        # Each node writes what its ranks hold alike, by the names of its own ranks: under DDP all of it on every node.
        found = re.fullmatch(r"(.+)\.\d{5}\.safetensors", name)
        if found is None or name not in self.tensors:
            return name
        table = sorted((tensor, entry.box.offsets, entry.box.sizes) for tensor, entry in self.tensors[name].items())
        return f"{found[1]} {xxhash.xxh3_128_hexdigest(repr(table).encode())}"

    def encode(self) -> bytes:
        """Return the text of `manifest.json`."""
        data = {
            "format_version": FORMAT_VERSION,
            "step": self.step,
            "world_size": self.world_size,
            "versions": dict(self.versions),
            "metadata": dict(self.metadata),
            "checksum": CHECKSUM,
            "files": {
                name: {"bytes": entry.num_bytes, "checksum": entry.checksum}
                | ({"blocks": list(entry.blocks)} if entry.blocks else {})
                for name, entry in sorted(self.files.items())
            },
            "tensors": {
                file: {name: _encode_tensor(entry) for name, entry in tensors.items()}
                for file, tensors in sorted(self.tensors.items())
            },
        }
        # With line breaks and sorted files: diff compares two of them.
        return (json.dumps(data, indent=1) + "\n").encode()

    @staticmethod
    def digest(text: bytes) -> bytes:
        """Return the content of the marker that commits this text of a manifest."""
        return hashlib.sha256(text).hexdigest().encode() + b"\n"

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the manifest of a checkpoint and compare it with the marker.

        Raises:
            CheckpointNotFoundError: there is none, or the save was never completed.
            CorruptCheckpointError: it was changed after it was committed, or names files that no checkpoint may name.
            IncompatibleCheckpointError: its format is newer than this version reads.
        """
        path = directory / MANIFEST_NAME
        if not os.path.lexists(path):
            raise CheckpointNotFoundError(f"no checkpoint in {directory.absolute()}: {MANIFEST_NAME} is missing")
        # Read once, and hashed as it was read: a second read could see another file than the digest.
        text = read_regular(path, MAX_JSON_BYTES)
        digest = hashlib.sha256(text).hexdigest()
        marker = directory / MARKER_NAME
        has_marker = os.path.lexists(marker)
        committed = read_regular(marker, 4096).decode(errors="replace").strip() if has_marker else None
        if committed not in (None, digest):
            # For its message: a newer version may commit in another way, and is refused as newer, not as corrupt.
            _read_object(text, path)
            raise CorruptCheckpointError(
                f"{path.absolute()} was changed after the checkpoint was committed: its sha256 is {digest}, and "
                f"{MARKER_NAME} has {str(committed)[:80]!r}; load another checkpoint"
            )
        data = _read_object(text, path)
        if committed is None:
            raise CheckpointNotFoundError(
                f"{directory.absolute()} is incomplete: {MARKER_NAME} is missing, so its save never ended; load another"
            )
        try:
            with as_corrupt(path):
                return cls.decode(data)
        except ConfigError as error:
            raise CorruptCheckpointError(
                f"{path.absolute()} is not a manifest ({type(error).__name__}: {error}); load another checkpoint"
            ) from error

    @classmethod
    def decode(cls, data: dict[str, Any]) -> Manifest:
        """Return the manifest that `encode` made this JSON of."""
        for name in (*data["files"], *data["tensors"]):
            check_name(name)
        return cls(
            world_size=int(data["world_size"]),
            step=data["step"],
            files={
                name: FileEntry(int(entry["bytes"]), str(entry["checksum"]), tuple(map(str, entry.get("blocks", ()))))
                for name, entry in data["files"].items()
            },
            tensors={
                file: {name: _decode_tensor(entry) for name, entry in tensors.items()}
                for file, tensors in data["tensors"].items()
            },
            metadata=dict(data["metadata"]),
            versions=dict(data["versions"]),
        )


def _encode_tensor(entry: TensorEntry) -> dict[str, Any]:
    data: dict[str, Any] = {"dtype": entry.dtype, "shape": list(entry.shape)}
    if entry.box != Box.full(entry.shape):
        data |= {"offsets": list(entry.box.offsets), "sizes": list(entry.box.sizes)}
    return data


def _decode_tensor(data: dict[str, Any]) -> TensorEntry:
    shape = checked_sizes(data["shape"])
    box = Box(checked_sizes(data["offsets"]), checked_sizes(data["sizes"])) if "offsets" in data else Box.full(shape)
    return TensorEntry(str(data["dtype"]), shape, box)


def checked_sizes(values: Any) -> tuple[int, ...]:
    """Return sizes or offsets that a file holds, a few non-negative numbers; of others a TypeError, without them."""
    # The same list twice in a list, thirty times over, is a hundred bytes in a pickle, and printing it does not end.
    numbers = tuple(values)
    if len(numbers) > 64 or not all(isinstance(number, int) and 0 <= number < 2**63 for number in numbers):
        raise TypeError("something else stands where sizes were expected")
    return numbers


def _max_items(text: bytes, path: Path) -> int:
    """Return how many items a manifest may have, by the size of its checkpoint."""
    if text.count(b":") <= _FREE_ITEMS // 2:
        return _FREE_ITEMS
    # lstat: a link to a large file elsewhere shall not raise the bound.
    num_bytes = sum(Path(folder, name).lstat().st_size for folder, _, names in os.walk(path.parent) for name in names)
    return min(_FREE_ITEMS + (num_bytes - len(text)) // _BYTES_PER_ITEM, MAX_JSON_ITEMS)


def _read_object(text: bytes, path: Path) -> dict[str, Any]:
    """Return a manifest's content when its format is one that this version reads."""
    data = parse_json(text, path, _max_items(text, path))
    version = data.get("format_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or version < FORMAT_VERSION:
        raise CorruptCheckpointError(
            f"{path.absolute()} has format version {str(version)[:20]}, which no release of accel_trainer wrote: it is "
            "no manifest; load another checkpoint"
        )
    if version > FORMAT_VERSION:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} has format version {version} and this version reads {FORMAT_VERSION}; install the "
            "version of accel_trainer that wrote it"
        )
    checksum = data.get("checksum")
    if checksum != CHECKSUM:
        raise IncompatibleCheckpointError(
            f"{path.absolute()} has checksums of the kind {checksum!r} and this version knows {CHECKSUM!r}; "
            "install the version of accel_trainer that wrote it"
        )
    return data


def used_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that compute a run, as far as they are imported."""
    names = ("accel_trainer", "torch", "transformers", "deepspeed", "peft", "torchao")
    found = {name: getattr(sys.modules.get(name), "__version__", None) for name in names}
    return {"python": platform.python_version(), **{name: str(version) for name, version in found.items() if version}}


def check_name(name: str) -> None:
    """Refuse a file name that is not a plain relative path below the checkpoint."""
    parts = PurePosixPath(name).parts
    is_plain = parts and not name.startswith("/") and "\\" not in name and "\0" not in name
    if not is_plain or any(part in ("..", ".") for part in name.split("/")) or "/".join(parts) != name:
        raise ConfigError(f"{name!r} is not a file name inside a checkpoint; use a relative path without '..'")
    if name in (MANIFEST_NAME, MARKER_NAME):
        raise ConfigError(f"{name!r} is written by the store itself; choose another name")


logger = logging.get_logger(__name__)

WEIGHT_FILES = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")
"""Names that `save_pretrained` gives to weights."""


def read_layout(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a safetensors file by its header; none of one that is not complete, or is no such file."""
    try:
        check_regular(path)
        with safe_open(path, framework="np") as file:  # which compares header and length, and reads no values
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
            shapes = {name: tuple(tensor.get_shape()) for name, tensor in slices.items()}
            return {
                name: TensorEntry(slices[name].get_dtype(), shape, Box.full(shape)) for name, shape in shapes.items()
            }
    except (AccelTrainerError, SafetensorError, OSError):
        return {}


def _way_out(directory: Path, manifest: Manifest, names: Iterable[str]) -> str:
    """Return how to load a checkpoint all the same whose files `names` are not the manifest's."""
    way = "this one with verify='off' (an argument of load_state() and of TrainingArguments) if you changed it yourself"
    for name in names:
        # Damage leaves a file's layout, or no file that is complete.
        layout = read_layout(directory / name) if WEIGHT_FILES.fullmatch(name) else {}
        if layout and layout != manifest.tensors.get(name):
            way += (
                f". {name} is a complete file of weights, saved anew: `accel-trainer ckpt adopt "
                f"{directory.absolute()}` makes it the checkpoint's own"
            )
            break
    return way


def list_files(directory: Path) -> list[str]:
    """Return the names of all files below `directory`, the manifest and the marker left out, sorted."""
    names = []
    for folder, _, files in os.walk(directory):
        names += [Path(folder, file).relative_to(directory).as_posix() for file in files]
    return sorted(set(names) - {MANIFEST_NAME, MARKER_NAME})


def refuse_extra_files(directory: Path, manifest: Manifest) -> None:
    """Refuse files that the manifest does not name and that a reader might take; see `Manifest.reserves`."""
    extra = [name for name in list_files(directory) if name not in manifest.files and manifest.reserves(name)]
    if extra:
        raise CorruptCheckpointError(
            f"{directory.absolute()} holds {', '.join(map(repr, extra[:5]))}, which its manifest does not name: "
            f"something was added after the save. Move it out of the checkpoint, or load "
            f"{_way_out(directory, manifest, extra)}"
        )


def warn_of_writers(directory: Path) -> None:
    """Warn of a checkpoint that every user may write to: matching checksums do not prove that it is the saved one."""
    for path in (directory, directory / MANIFEST_NAME):
        mode = path.stat().st_mode
        # Not S_IWGRP: groups are how people share a disk.
        if mode & stat.S_IWOTH:
            logger.warning(
                "every user of this machine can write to %s (mode %o), and checksums tell damage, not forgery: load it "
                "if you trust them all, and take the right away with `chmod -R o-w`", path, stat.S_IMODE(mode),
            )  # fmt: skip
            return


def check_checkpoint(directory: Path, mode: str, num_threads: int = 1) -> Manifest:
    """Compare a checkpoint with its manifest, and return that; see `Manifest.read` and `check_files`."""
    manifest = Manifest.read(directory)
    refuse_extra_files(directory, manifest)
    check_files(directory, manifest, manifest.files, mode, num_threads)
    return manifest


def check_files(directory: Path, manifest: Manifest, names: Iterable[str], mode: str, num_threads: int) -> None:
    """Compare files with the manifest: their presence inside the checkpoint, their lengths, and their contents.

    Args:
        mode: "full" compares contents, "size" lengths, "off" neither.

    Raises:
        CheckpointNotFoundError: a file is missing.
        CorruptCheckpointError: a file was changed, or is a link out of the checkpoint.
    """
    names = [name for name in names if name in manifest.files]
    # Names, lengths and places of all first: they cost nothing, and a missing file is told before gigabytes are read.
    for name in names:
        path, num_bytes = directory / name, manifest.files[name].num_bytes
        found_bytes = check_regular(path, directory).st_size
        if mode != "off" and found_bytes != num_bytes:
            raise CorruptCheckpointError(
                f"{path.absolute()} has {found_bytes} bytes, and {num_bytes} were written; it was cut or "
                f"changed after the save. Load another checkpoint, or {_way_out(directory, manifest, [name])}"
            )
    if mode == "full":
        tasks = [
            (directory / name, index) for name in names for index in range(num_blocks(manifest.files[name].num_bytes))
        ]
        # The blocks of all files in one pool: a large file beside small ones keeps every thread busy.
        digests = iter(hash_blocks(tasks, num_threads))
        for name in names:
            entry = manifest.files[name]
            own = [next(digests) for _ in range(num_blocks(entry.num_bytes))]
            found = make_entry(entry.num_bytes, own)
            if found != entry:
                way_out = _way_out(directory, manifest, [name])
                raise CorruptCheckpointError(f"{_describe_change(directory / name, entry, found)}, or {way_out}")


def _describe_change(path: Path, expected: FileEntry, found: FileEntry) -> str:
    where = ""
    if expected.blocks:
        pairs = enumerate(zip(expected.blocks, found.blocks, strict=False))
        changed = [index for index, (a, b) in pairs if a != b]
        where = f" (first in the {BLOCK_BYTES >> 20} MiB at byte {changed[0] * BLOCK_BYTES:,})" if changed else ""
    return (
        f"{path.absolute()} was changed after the save{where}: its {CHECKSUM} is {found.checksum}, and "
        f"{expected.checksum} was written. Load another checkpoint"
    )

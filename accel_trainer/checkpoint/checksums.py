"""Checksums of files: while they are written, and in parallel when they are read.

A file is hashed in blocks of 64 MiB, so that several cores can check one large file. A file of one block has the plain
checksum of its contents; a longer one that of its blocks' digests, one after the other.

The checksum is XXH3 of 128 bits: it tells damage, not forgery, and is as fast as memory (29.6 GB/s on one core of an
i7-9700K, https://xxhash.com). sha256 takes ten times as long on a processor without instructions for it, more than the
disk.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

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
    """Of the file; of the concatenated digests of its blocks when it has more than one."""
    blocks: tuple[str, ...] = ()
    """Checksum of each block of `BLOCK_BYTES`, when there is more than one."""


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
    so that the final fsync has little left to wait for.
    """

    def __init__(self, path: Path, on_chunk: Callable[[], None] = lambda: None) -> None:
        """Create `path`.

        Args:
            on_chunk: called after each chunk that has reached the system.

        Raises:
            FileExistsError: it exists.
        """
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
        """Start to flush on a thread, unless the previous flush is still running; its error is raised here."""
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
    buffer = memoryview(bytearray(_READ_BYTES))
    # Read, not mapped: a bad sector is an error that names the file, and no signal that ends the process.
    with open(path, "rb", buffering=0) as file:
        file.seek(index * BLOCK_BYTES)
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count
    return digest.digest()


def hash_blocks(tasks: Iterable[tuple[Path, int]], num_threads: int) -> list[bytes]:
    """Return the digest of each block, given as a path and the block's index; more threads than cores do not help."""
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

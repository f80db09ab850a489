"""How files of checkpoints are opened and made durable: regular files, inside their directory, of a bounded size.

A reader follows no link out of the directory, and waits for no FIFO. A writer goes through no link: whatever else has
the name keeps its contents. A disk that is full is named, before a save and in it. Needs no torch.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    DiskFullError,
)

MAX_JSON_BYTES = 256 * 2**20
MAX_JSON_ITEMS = 12_000_000
"""Pairs, lists and objects in a JSON file: parsed, one takes up to 200 bytes, a hundred times the shortest text.

A manifest has 9 for the shard of a tensor: room for 1.3 million, as of 1,200 parameters and two moments on 360 ranks.
"""

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a symbolic link",
}
# Damage makes readers stumble anywhere. Errors of the system are not among them: the disk may answer the next time.
_STUMBLES: tuple[type[Exception], ...] = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "no file")


def _stays_inside(real: Path, directory: Path) -> bool:
    """Whether a resolved path lies below a directory, or in the blobs of the Hub's cache that it is a snapshot of."""
    # A snapshot is `models--ORG--NAME/snapshots/COMMIT`, and its files are links to `models--ORG--NAME/blobs/HASH`.
    home = directory.resolve()
    if real.is_relative_to(home):
        return True
    for folder in (home, *home.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith(("models--", "datasets--")):
            return real.parent == repository / "blobs"
    return False


def check_regular(path: Path, directory: Path | None = None) -> os.stat_result:
    """Return the status of a regular file that lies in `directory`; in its own by default."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointNotFoundError(f"{path.absolute()} is missing; the checkpoint is incomplete") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise CorruptCheckpointError(f"{path.absolute()} is a link that leads in a circle") from error
    real = Path(os.path.realpath(path))
    if not _stays_inside(real, path.parent if directory is None else directory):
        raise CorruptCheckpointError(
            f"{path.absolute()} is a link to {real}, out of its checkpoint, and is not followed; put a copy of the "
            "file in its place if it belongs there"
        )
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError(
            f"{path.absolute()} is {_kind(status.st_mode)}, and checkpoints have regular files only; load another one"
        )
    return status


def read_regular(path: Path, max_bytes: int, directory: Path | None = None) -> bytes:
    """Return the contents of a regular file in `directory`; see `check_regular`."""
    check_regular(path, directory)
    # It may have become a FIFO since: no open or read of one waits then.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        content = b"" if num_bytes > max_bytes else file.read(num_bytes) or b""
    if num_bytes > max_bytes:
        raise CorruptCheckpointError(
            f"{path.absolute()} has {num_bytes:,} bytes, and at most {max_bytes:,} are read of such "
            "a file; load another checkpoint"
        )
    return content


def read_json(path: Path, directory: Path | None = None) -> Any:
    """Return the content of a JSON file in `directory`; see `read_regular` and `parse_json`."""
    return parse_json(read_regular(path, MAX_JSON_BYTES, directory), path)


def parse_json(text: bytes, path: Path, max_items: int = MAX_JSON_ITEMS) -> Any:
    """Return the JSON in `text`, which is that of `path`; a key that stands twice is an error."""
    # Counted before anything is built of it.
    if (num_items := count_items(text)) > max_items:
        raise CorruptCheckpointError(
            f"{path.absolute()} has about {num_items:,} pairs, lists and objects, and at most {max_items:,} are read "
            "of it; load another checkpoint"
        )
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path.absolute()} is not JSON ({error}); load another checkpoint") from error


def count_items(text: bytes) -> int:
    """Return about how many pairs, lists and objects JSON text has; signs in strings count as well."""
    return sum(text.count(sign) for sign in (b":", b"[", b"{"))


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {key[:200]!r} stands twice")
    return data


@contextmanager
def as_corrupt(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Context in which errors that damaged contents cause, and `kinds`, are CorruptCheckpointErrors of `path`."""
    # For what reads files, never for code of the user: its mistakes are no damage.
    try:
        yield
    except (*_STUMBLES, *kinds) as error:
        if isinstance(error, AccelTrainerError):
            raise
        raise CorruptCheckpointError(
            f"{path.absolute()} does not hold what its writer puts there ({type(error).__name__}: {str(error)[:200]}); "
            "load another checkpoint"
        ) from error


def open_own(path: Path) -> int:
    """Return a descriptor to read and write a file of ours, which is created if need be; refuse anything else."""
    # O_NOFOLLOW: through a link the signature would overwrite a file elsewhere. O_NONBLOCK: a FIFO would wait.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _not_ours(path, _kind(os.lstat(path).st_mode)) from error
    status = os.fstat(descriptor)
    # A second name is a hard link to a file of somebody else, which O_NOFOLLOW does not see.
    if stat.S_ISREG(status.st_mode) and status.st_nlink < 2:
        return descriptor
    os.close(descriptor)
    kind = f"one of {status.st_nlink} names of a file" if stat.S_ISREG(status.st_mode) else _kind(status.st_mode)
    raise _not_ours(path, kind)


def _not_ours(path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"{path.absolute()} is {kind}; accel_trainer keeps a file of its own there and writes to nothing else under "
        "that name. Remove it, or choose another directory"
    )


def create_file(path: Path) -> BinaryIO:
    """Open a new file to write into. A file or a link that has the name loses it, and is not written to."""
    path.unlink(missing_ok=True)
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")


# For directories, journals and rounding up to blocks, which files take beyond their bytes.
_MARGIN = 1.05
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _describe(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def check_space(directory: Path, need_bytes: int) -> None:
    """Refuse a save that will not fit."""
    # f_bavail, not f_bfree: the blocks that are reserved for root are no room for a run.
    free = _free_bytes(directory)
    if need_bytes * _MARGIN > free:
        raise DiskFullError(
            f"{directory.absolute()} has {_describe(free)} free, and the save needs {_describe(need_bytes * _MARGIN)}; "
            "nothing was written. Make room (a checkpoint is removed only after its successor is complete, so "
            "total_limit=1 needs room for two), or save to another disk"
        )


@contextmanager
def explain_full_disk(path: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Raise a DiskFullError in place of the system's error where a disk, a quota or a file-size limit is exceeded."""
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = _free_bytes(path if path.is_dir() else path.parent)
        reasons = {
            errno.ENOSPC: "its disk is full",
            errno.EDQUOT: "the quota is used up",
            errno.EFBIG: f"it exceeds the limit on the size of a file ({_file_size_limit()})",
        }
        need = "" if need_bytes is None else f"{_describe(need_bytes)} were needed, and "
        raise DiskFullError(
            f"{path.absolute()} could not be written: {reasons[error.errno]}. {need}{_describe(free)} are free. "
            "Earlier checkpoints are untouched; make room and save again"
        ) from error


def _file_size_limit() -> str:
    try:
        import resource
    except ImportError:  # not Unix
        return "the file system's"
    return f"{_describe(resource.getrlimit(resource.RLIMIT_FSIZE)[0])}; see `ulimit -f`"


def fsync_path(path: Path) -> None:
    """Bring a file's contents, or a directory's entries, to the disk."""
    # After a rename or a new file, the directory too: fsync of a file does not make its name durable (fsync(2)). File
    # systems over a network often cannot do it for directories, and need not: their server keeps the names.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small new file and bring it to the disk; see `create_file`."""
    with create_file(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

"""Free space, checked before a save and named when it runs out, and files and directories made durable."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accel_trainer.checkpoint.format.regular_files import create_file
from accel_trainer.errors import DiskFullError

__all__ = ["check_space", "explain_full_disk", "fsync_path", "write_durably"]

# For directories, journals and rounding up to blocks, which files take beyond their bytes.
_MARGIN = 1.05
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _free_bytes(directory: Path) -> int:
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def _describe(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def check_space(directory: Path, need_bytes: int) -> None:
    """Refuse a save that will not fit.

    Raises:
        DiskFullError: `need_bytes` and a margin of 5% are more than the filesystem of `directory` has free.
    """
    free = _free_bytes(directory)
    if need_bytes * _MARGIN > free:
        raise DiskFullError(
            f"{directory.absolute()} has {_describe(free)} free, and the save needs {_describe(need_bytes * _MARGIN)}; "
            "nothing was written. Make room (a checkpoint is removed only after its successor is complete, so "
            "total_limit=1 needs room for two), or save to another disk"
        )


@contextmanager
def explain_full_disk(path: Path, need_bytes: int | None = None) -> Iterator[None]:
    """Raise a DiskFullError in place of the system's error where a disk, a quota or a file-size limit is exceeded.

    Raises:
        DiskFullError: names the path, what was needed and what is free.
    """
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        free = _free_bytes(path if path.is_dir() else path.parent)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        reasons = {
            errno.ENOSPC: "its disk is full",
            errno.EDQUOT: "the quota is used up",
            errno.EFBIG: f"it exceeds the limit on the size of a file ({_describe(limit)}; see `ulimit -f`)",
        }
        need = "" if need_bytes is None else f"{_describe(need_bytes)} were needed, and "
        raise DiskFullError(
            f"{path.absolute()} could not be written: {reasons[error.errno]}. {need}{_describe(free)} are free. "
            "Earlier checkpoints are untouched; make room and save again"
        ) from error


def fsync_path(path: Path) -> None:
    """Bring a file's contents, or a directory's entries, to the disk.

    After a rename or a new file, the directory too: fsync of a file does not make its name durable (fsync(2)). File
    systems over a network often cannot do it for directories, and need not: their server keeps the names.
    """
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

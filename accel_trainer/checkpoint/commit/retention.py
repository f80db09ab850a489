"""Numbered checkpoints in one directory: their list, the next number, quarantine of bad ones, removal of old ones.

Needs no torch. Numbers decide, never names or times. Only complete checkpoints of ours are ever removed.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Collection
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.commit.disk import fsync_path
from accel_trainer.checkpoint.commit.lock import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.commit.rename import remove_tree
from accel_trainer.checkpoint.format.manifest import MARKER_NAME
from accel_trainer.checkpoint.format.verification import check_checkpoint
from accel_trainer.errors import AccelTrainerError, CheckpointLockedError, ConfigError
from accel_trainer.runtime.fault_injection import fault_point

__all__ = ["PREFIX", "is_complete", "next_number", "numbered_checkpoints", "quarantine", "retire"]

logger = logging.get_logger(__name__)

PREFIX = "checkpoint_"


def numbered_checkpoints(directory: Path, prefix: str = PREFIX) -> list[tuple[int, Path]]:
    """Return the checkpoints in `directory` called `prefix` and a number, by number; other files are ignored."""
    if not directory.is_dir():
        return []
    return [(number, path) for number, path in _numbered(directory, prefix) if path.is_dir()]


def _numbered(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return everything that is called `prefix` and a number, by number."""
    numbers = ((path.name.removeprefix(prefix), path) for path in directory.glob(f"{prefix}*"))
    # No longer ones: int() of 5,000 digits is an error, and no run comes so far.
    return sorted((int(number), path) for number, path in numbers if re.fullmatch("[0-9]{1,18}", number))


def next_number(directory: Path, prefix: str = PREFIX) -> int:
    """Return the lowest number above those of all checkpoints, and of those that are being saved; the owner calls it.

    Links count, wherever they lead, and files: their names are taken.
    Another Accelerator of the process may save in the background; leftovers of dead runs have been removed.
    """
    staged = (path.name.removeprefix(f".tmp-{prefix}").rpartition("-")[0] for path in directory.glob(f".tmp-{prefix}*"))
    saving = [int(number) for number in staged if number.isascii() and number.isdecimal()]
    return 1 + max([-1, *saving, *(number for number, _ in _numbered(directory, prefix))])


def is_complete(path: Path) -> bool:
    """Whether a checkpoint has its manifest, its marker, and every file at its length."""
    try:
        check_checkpoint(path, "size")
    except (AccelTrainerError, OSError):
        return False
    return True


def quarantine(path: Path, reason: object) -> None:
    """Rename a bad checkpoint to `_bad-...`, where nobody looks for one; nothing of it is removed."""
    bad = path.with_name(f"_bad-{path.name}-{uuid.uuid4().hex[:8]}")
    try:
        lock = DirectoryLock.take(path.parent / LOCK_NAME)
        try:
            os.rename(path, bad)
        finally:
            lock.release()
        kept = f"it is kept as {bad.name}"
    except (OSError, CheckpointLockedError, ConfigError) as error:
        kept = f"it keeps its name ({error})"
    logger.warning("%s is not a good checkpoint and is passed over; %s. %s", path, kept, reason)


def retire(
    directory: Path, keep: int, protected: Collection[Path] = (), *, step: int | None = None, prefix: str = PREFIX
) -> list[Path]:
    """Remove complete checkpoints of lower numbers until `keep` are left; one process calls it, after a commit.

    Links to checkpoints stay, and do not count: what they lead to is not this run's.

    Args:
        keep: 1 or more: the last good one never goes.
        protected: checkpoints that stay, whatever their number: the best one, for instance. They count.
        step: number of the checkpoint that was just committed.

    Returns:
        The removed ones, or at least renamed: failing to remove one is a warning.
    """
    own = [path for _, path in numbered_checkpoints(directory, prefix) if not path.is_symlink()]
    complete = [path for path in own if is_complete(path)]
    removed = []
    for path in [path for path in complete if path not in protected][: max(0, len(complete) - max(keep, 1))]:
        trash = path.with_name(f".trash-{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            os.rename(path, trash)
            fsync_path(directory)
        except FileNotFoundError:
            continue  # another save of this process has ended at the same moment, and removed it
        except OSError as error:
            logger.warning("%s should be removed and cannot be (%s); remove it by hand", path, error)
            continue
        removed.append(path)
        fault_point("save.retention_renamed", step)
        try:
            _remove_marker(trash)
        except OSError as error:
            logger.warning("%s could not be removed (%s); remove it by hand", trash, error)
            continue
        fault_point("save.retention_rm", step)
        remove_tree(trash)
    return removed


def _remove_marker(directory: Path) -> None:
    """Take the marker out of a directory, and out of no other one that a link of its name may lead to by now."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.unlink(MARKER_NAME, dir_fd=folder)
    except FileNotFoundError:
        pass
    finally:
        os.close(folder)

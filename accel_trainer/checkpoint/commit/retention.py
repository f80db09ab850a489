"""Numbered checkpoints in one directory: their list, the next number, quarantine of bad ones, removal of old ones.

Needs no torch. Numbers decide, never names or times. Only complete checkpoints of ours are ever removed.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.commit.disk import fsync_path
from accel_trainer.checkpoint.commit.lock import LOCK_NAME, DirectoryLock
from accel_trainer.checkpoint.commit.rename import remove_tree
from accel_trainer.checkpoint.format.manifest import MARKER_NAME
from accel_trainer.checkpoint.format.verification import check_checkpoint
from accel_trainer.errors import AccelTrainerError, CheckpointLockedError
from accel_trainer.runtime.fault_injection import fault_point

__all__ = ["PREFIX", "is_complete", "next_number", "numbered_checkpoints", "quarantine", "retire"]

logger = logging.get_logger(__name__)

PREFIX = "checkpoint_"


def numbered_checkpoints(directory: Path, prefix: str = PREFIX) -> list[tuple[int, Path]]:
    """Return the checkpoints in `directory` called `prefix` and a number, by number; other files are ignored."""
    if not directory.is_dir():
        return []
    numbers = ((path.name.removeprefix(prefix), path) for path in directory.glob(f"{prefix}*") if path.is_dir())
    return sorted((int(number), path) for number, path in numbers if number.isascii() and number.isdecimal())


def next_number(directory: Path, prefix: str = PREFIX) -> int:
    """Return the lowest number above those of all checkpoints, and of those that are being saved; the owner calls it.

    Another Accelerator of the process may save in the background; leftovers of dead runs have been removed.
    """
    staged = (path.name.removeprefix(f".tmp-{prefix}").rpartition("-")[0] for path in directory.glob(f".tmp-{prefix}*"))
    saving = [int(number) for number in staged if number.isascii() and number.isdecimal()]
    return 1 + max([-1, *saving, *(number for number, _ in numbered_checkpoints(directory, prefix))])


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
    except (OSError, CheckpointLockedError) as error:
        kept = f"it keeps its name ({error})"
    logger.warning("%s is not a good checkpoint and is passed over; %s. %s", path, kept, reason)


def retire(
    directory: Path, keep: int, protected: Collection[Path] = (), *, step: int | None = None, prefix: str = PREFIX
) -> list[Path]:
    """Remove complete checkpoints of lower numbers until `keep` are left; one process calls it, after a commit.

    Args:
        keep: 1 or more: the last good one never goes.
        protected: checkpoints that stay, whatever their number: the best one, for instance. They count.
        step: number of the checkpoint that was just committed.

    Returns:
        The removed ones, or at least renamed: failing to remove one is a warning.
    """
    complete = [path for _, path in numbered_checkpoints(directory, prefix) if is_complete(path)]
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
            (trash / MARKER_NAME).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s could not be removed (%s); remove it by hand", trash, error)
            continue
        fault_point("save.retention_rm", step)
        remove_tree(trash)
    return removed

"""The rename of a complete directory to its name, also where an older one has it: one of both is always there."""

from __future__ import annotations

import ctypes
import glob
import os
import shutil
import uuid
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.commit.disk import fsync_path
from accel_trainer.checkpoint.commit.lock import DirectoryLock, lock_of
from accel_trainer.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from accel_trainer.checkpoint.format.verification import refuse_extra_files
from accel_trainer.errors import (
    CheckpointLockedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)

__all__ = ["check_target", "publish_name", "recover_target", "remove_tree", "sweep"]

logger = logging.get_logger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNIQUE = "-" + "[0-9a-f]" * 8


def check_target(target: Path) -> None:
    """Refuse to replace a directory that is not a checkpoint: a save replaces all of it.

    Raises:
        ConfigError: `target` is a file, or a directory with files that no checkpoint wrote.
    """
    if target.is_dir():
        inside = sorted(path.name for path in target.iterdir())
        if inside and MANIFEST_NAME not in inside:
            raise ConfigError(
                f"{target.absolute()} is no checkpoint of accel_trainer and holds {', '.join(map(repr, inside[:5]))}, "
                "which a save would replace; save to a directory of its own"
            )
        try:
            if inside:
                refuse_extra_files(target, Manifest.read(target))
        except CorruptCheckpointError as error:
            if "does not name" in str(error):
                raise ConfigError(f"{error}. A save would remove it") from error
        except CheckpointNotFoundError:
            pass
    elif target.exists():
        raise ConfigError(f"{target.absolute()} is a file; save to a directory")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step of the filesystem; False where it cannot (renameat2(2): Linux, not on NFS)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    paths = os.fsencode(one), os.fsencode(other)
    return bool(libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0)


def publish_name(staged: Path, target: Path) -> Path | None:
    """Rename `staged` to `target`, durably; return the new place of an older `target`, to be removed.

    Where the filesystem can swap two names, there is no moment without a checkpoint of that name. Elsewhere the older
    one is moved aside first, and `recover_target` brings it back after a kill in between.
    """
    leftover = None
    if not os.path.lexists(target) or (not target.is_symlink() and not any(target.iterdir())):
        os.rename(staged, target)
    elif _exchange(staged, target):
        leftover = staged
    else:
        leftover = target.with_name(f".old-{target.name}-{uuid.uuid4().hex[:8]}")
        os.rename(target, leftover)
        os.rename(staged, target)
    fsync_path(target.parent)
    return leftover


def recover_target(target: Path) -> None:
    """Bring back the checkpoint that a save had moved aside when it was killed; one process calls it."""
    asides = target.parent.glob(f".old-{glob.escape(target.name)}{_UNIQUE}")
    aside = next(iter(sorted(path for path in asides if not path.is_symlink())), None)
    if aside is None or os.path.lexists(target):
        return
    try:
        lock = DirectoryLock.take(lock_of(target))
    except (CheckpointLockedError, ConfigError):
        return  # the save is alive, and about to give the new one its name
    try:
        if os.path.lexists(target):
            return
        try:
            os.rename(aside, target)
        except FileNotFoundError:
            return  # another machine has brought it back meanwhile
        fsync_path(target.parent)
        logger.warning("%s was moved aside by a save that never ended; it is back", target)
    finally:
        lock.release()


def remove_tree(path: Path) -> None:
    """Remove a directory, or a link, that has lost its name; a failure is a warning. No link is followed."""
    if os.path.lexists(path):
        try:
            if path.is_symlink():
                path.unlink()
            else:
                shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s could not be removed (%s); remove it by hand", path, error)


def sweep(directory: Path, name: str | None = None) -> None:
    """Remove the leftovers of dead runs, of checkpoints called `name` or of all; only the owner of the lock calls it.

    Of all, those stay that another run is saving under a name with a lock of its own.
    """
    pattern = "*" if name is None else glob.escape(name)
    for kind in (".tmp", ".trash", ".old"):
        for path in directory.glob(f"{kind}-{pattern}{_UNIQUE}"):
            if path.is_symlink():
                continue  # no save leaves one
            target = path.with_name(path.name.removeprefix(f"{kind}-")[: -len("-01234567")])
            lock = DirectoryLock.take_free(lock_of(target)) if name is None else None
            if name is None and lock is None:
                continue
            try:
                _remove_leftover(path, target if kind == ".old" else None)
            finally:
                if lock is not None:
                    lock.release()


def _remove_leftover(path: Path, target: Path | None) -> None:
    """Remove a dead run's directory, or bring it back where it is all that is left of `target`."""
    if target is not None and not target.exists():
        recover_target(target)
    else:
        logger.info("removing %s, which a run that has ended left behind", path)
        remove_tree(path)

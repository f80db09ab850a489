"""The names of checkpoints: given to a complete directory in one step, numbered, taken from bad and old ones.

    NAME                       a checkpoint; one of both is always there while a new one replaces an older one
    _tmp-NAME-XXXXXXXX         a save that has not ended
    _old-NAME-XXXXXXXX         the older one, moved aside where the filesystem cannot swap two names
    _trash-NAME-XXXXXXXX       one that is being removed
    _bad-NAME-XXXXXXXX         one that was found not to be good; it is kept

All but the first begin with "_": a push of the run's directory to a hub passes such names over (transformers'
patterns), and ends with an error where what it has listed gets another name.

Numbers decide, never names or times. Only complete checkpoints of ours are ever removed. Needs no torch.
"""

from __future__ import annotations

import ctypes
import glob
import os
import re
import shutil
import uuid
from collections.abc import Collection
from pathlib import Path

from accel_trainer import logging
from accel_trainer.checkpoint.disk import fsync_path
from accel_trainer.checkpoint.lock import LOCK_NAME, DirectoryLock, lock_of
from accel_trainer.checkpoint.manifest import MANIFEST_NAME, MARKER_NAME, Manifest, check_checkpoint, refuse_extra_files
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)
from accel_trainer.runtime.fault_point import fault_point

logger = logging.get_logger(__name__)

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNIQUE = "-" + "[0-9a-f]" * 8


def check_target(target: Path) -> None:
    """Refuse to replace a directory that is not a checkpoint: a save replaces all of it."""
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
    # rename(2) replaces no directory that has files: either both names are swapped, or the older one goes aside first.
    elif _exchange(staged, target):
        leftover = staged
    else:
        leftover = target.with_name(f"_old-{target.name}-{uuid.uuid4().hex[:8]}")
        os.rename(target, leftover)
        os.rename(staged, target)
    # Without it a crash of the machine may undo the rename after the save was acknowledged (rename(2), fsync(2)).
    fsync_path(target.parent)
    return leftover


def recover_target(target: Path) -> None:
    """Bring back the checkpoint that a save had moved aside when it was killed; one process calls it."""
    asides = target.parent.glob(f"_old-{glob.escape(target.name)}{_UNIQUE}")
    aside = next(iter(sorted(path for path in asides if not path.is_symlink())), None)
    # Looked at before the lock is taken, which writes: a load from a read-only disk must work.
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
    for kind in ("_tmp", "_trash", "_old"):
        for path in directory.glob(f"{kind}-{pattern}{_UNIQUE}"):
            if path.is_symlink():
                continue  # no save leaves one
            target = path.with_name(path.name.removeprefix(f"{kind}-")[: -len("-01234567")])
            # A save to a name of its own has its own lock, and its temporary directory looks like that of a dead run.
            lock = DirectoryLock.take_free(lock_of(target)) if name is None else None
            if name is None and lock is None:
                continue
            try:
                _remove_leftover(path, target if kind == "_old" else None)
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
    staged = (path.name.removeprefix(f"_tmp-{prefix}").rpartition("-")[0] for path in directory.glob(f"_tmp-{prefix}*"))
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
    # Protected ones count: with keep=2 the best and the newest are left, not the best and two more.
    for path in [path for path in complete if path not in protected][: max(0, len(complete) - max(keep, 1))]:
        trash = path.with_name(f"_trash-{path.name}-{uuid.uuid4().hex[:8]}")
        try:
            # First the name, in one step: a kill in the middle of the removal leaves no checkpoint that looks complete.
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
            # Then the marker, so that even under its new name nobody takes half of it for a checkpoint.
            _remove_marker(trash)
        except OSError as error:
            logger.warning("%s could not be removed (%s); remove it by hand", trash, error)
            continue
        fault_point("save.retention_rm", step)
        remove_tree(trash)
    return removed


def _remove_marker(directory: Path) -> None:
    """Take the marker out of a directory, and out of no other one that a link of its name may lead to by now."""
    # By descriptor: between the rename and here, somebody may have put a link in its place.
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.unlink(MARKER_NAME, dir_fd=folder)
    except FileNotFoundError:
        pass
    finally:
        os.close(folder)

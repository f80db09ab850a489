"""The directory that a run saves to: its lock, and the names of the checkpoints in it.

    _lock                      held by the run that saves here; it refuses a second run, and dies with its owner
    NAME                       a checkpoint; one of both is always there while a new one replaces an older one
    _tmp-NAME-XXXXXXXX         a save that has not ended
    _old-NAME-XXXXXXXX         the older one, moved aside where the filesystem cannot swap two names
    _trash-NAME-XXXXXXXX       one that is being removed
    _bad-NAME-XXXXXXXX         one that was found not to be good; it is kept

All but NAME begin with "_": a push of the run's directory to a hub passes such names over (transformers' patterns), and
ends with an error where what it has listed gets another name.

Numbers decide, never names or times. Only complete checkpoints of ours are ever removed. Needs no torch.
"""

from __future__ import annotations

import atexit
import ctypes
import errno
import glob
import json
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accel_trainer import logging
from accel_trainer.checkpoint.disk import as_corrupt, fsync_path, open_own, read_json
from accel_trainer.checkpoint.manifest import (
    MANIFEST_NAME,
    MARKER_NAME,
    NODE_KEY,
    Manifest,
    check_checkpoint,
    refuse_extra_files,
)
from accel_trainer.errors import (
    AccelTrainerError,
    CheckpointLockedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
)
from accel_trainer.runtime.fault_point import fault_point
from accel_trainer.runtime.whereabouts import for_all

logger = logging.get_logger(__name__)

LOCK_NAME = "_lock"
HEARTBEAT_SECONDS = 30.0
STALE_SECONDS = 300.0
"""Where `flock` does not reach, a lock that was not touched for so long is taken over.

Ten heartbeats: network disks cache times of files, NFS up to 60 s by default (acregmax in nfs(5)).
"""
SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS
"""The same, where its time is that old already: two heartbeats and a network disk's cache."""
SIGNING_SECONDS = 5.0
"""A process that has locked a file signs it at once: one without a signature for so long is in use, whoever it is."""
_SIGNATURE = b'{"host": "'

_held: dict[Path, DirectoryLock] = {}
_beating: threading.Thread | None = None


def lock_of(target: Path) -> Path:
    """Return the lock of a save to a name of its own, outside of a run's numbered checkpoints."""
    return target.with_name(f".{target.name}.lock")


class DirectoryLock:
    """A file that its owner holds by `flock` and has signed; a process may take it several times."""

    # The kernel drops a `flock` with its owner's last descriptor, however that ended. The signature names the owner in
    # messages, and decides where a network disk has no locks, or none between machines: see `_wait_for_sign_of_life`.

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._count = 1

    @classmethod
    def take(cls, path: Path) -> DirectoryLock:
        """Lock the file `path`, which is created if need be; one that no lock has written is renamed, with a warning.

        Raises:
            CheckpointLockedError: another process has it; the message says which, where and since when.
            ConfigError: a link, a FIFO or the like has the name; nothing is written through it.
        """
        path = path.absolute()
        if path in _held:
            _held[path]._count += 1
            return _held[path]
        path.parent.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + SIGNING_SECONDS
        while True:
            descriptor = open_own(path)
            try:
                if _claim(path, descriptor, may_wait=time.monotonic() < deadline):
                    lock = _held[path] = cls(path, descriptor)
                    _start_heartbeat()
                    return lock
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    @classmethod
    def take_free(cls, path: Path) -> DirectoryLock | None:
        """Lock the file `path` if nobody has it, this process included; None otherwise, or where it can be no lock."""
        if path.absolute() in _held:
            return None
        try:
            return cls.take(path)
        except (CheckpointLockedError, ConfigError):
            return None

    @property
    def is_shared(self) -> bool:
        """Whether this process has taken it more than once."""
        return self._count > 1

    def release(self) -> None:
        """Release the lock once; the last time removes the file. A forked child has none to release."""
        if _held.get(self.path) is not self:
            return
        self._count -= 1
        if self._count == 0:
            del _held[self.path]
            # Removed while it is still locked: after the close another process may hold it, and would lose it.
            if _is_same_file(self.path, self._descriptor):
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)


def _forget() -> None:
    """Drop a forked child's copies of its parent's locks: they share its `flock`, which would outlive the parent."""
    global _beating
    for lock in _held.values():
        os.close(lock._descriptor)
    _held.clear()
    _beating = None


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _release_all() -> None:
    for lock in list(_held.values()):
        # However often it was taken: the process ends.
        lock._count = 1
        lock.release()


def _claim(path: Path, descriptor: int, *, may_wait: bool) -> bool:
    """Lock and sign an opened file; False where it has to be opened again. Raises where another process has it."""
    owner = _owner(descriptor)
    has_locks = True
    try:
        _flock(path, descriptor)
    except BlockingIOError:
        if not owner and may_wait:  # locked and not yet signed, or just released
            time.sleep(0.01)
            return False
        if not owner or not is_gone(owner):
            raise _locked(path, owner) from None
        # Children that no fork of Python's has made, and that outlive the owner, keep the file locked: not its name.
        _warn_of_takeover(path, owner)
        path.unlink(missing_ok=True)
        return False
    except OSError:
        has_locks = False  # a filesystem without them: ENOTSUP, ENOSYS, ENOLCK
    if not _is_ours(descriptor):
        _set_aside(path, descriptor)
        return False
    # The owner before this one may have removed the name since it was opened: another process locks a new file by now.
    if not _is_same_file(path, descriptor):
        return False
    if owner := _owner(descriptor):
        _take_over(path, descriptor, owner, has_locks)
    _sign(descriptor)
    return True


def _flock(path: Path, descriptor: int) -> None:
    try:
        import fcntl
    except ImportError as error:  # not Unix
        logger.warning_once(
            "this system has no flock (fcntl): a second run that saves to %s is told by the signature in the "
            "lock of the first, and a lock whose owner is gone is taken over as on a network disk, after up to %.0f s",
            path.parent,
            STALE_SECONDS,
        )
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(path)) from error
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _take_over(path: Path, descriptor: int, owner: dict[str, Any], has_locks: bool) -> None:
    """Warn of the signature of an owner that is gone; raise where it is not."""
    # Of a host of the same name the kernel has told; NFS and Lustre can be mounted with locks of one machine alone.
    is_told = has_locks and owner["host"] == socket.gethostname()
    if not is_told and not is_gone(owner) and _wait_for_sign_of_life(path, descriptor, owner):
        raise _locked(path, owner)
    _warn_of_takeover(path, owner)


def signature() -> dict[str, Any]:
    """Return what names this process, as `is_gone` reads it."""
    return {"host": socket.gethostname(), "space": _space(), "pid": os.getpid()}


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({**signature(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode(), 0)


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Whether `path` still names an opened file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# --- signatures ------------------------------------------------------------------------------------------------------


def _owner(descriptor: int) -> dict[str, Any]:
    """Return the signature of a lock; {} where there is none, or one that was cut short."""
    try:
        data = json.loads(os.pread(descriptor, 4096, 0))
        # kill(2) takes 0 and negative numbers for whole groups of processes, and a pid_t is 31 bits and a sign.
        is_signature = isinstance(data["host"], str) and isinstance(data["pid"], int) and 0 < data["pid"] < 2**31
        return data if is_signature else {}
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}


def _is_ours(descriptor: int) -> bool:
    """Whether a lock has written the file: it holds a signature, or the beginning of one, as a crash leaves it."""
    begin = os.pread(descriptor, len(_SIGNATURE), 0)
    return bool(_owner(descriptor)) or not begin.rstrip(b"\0") or _SIGNATURE.startswith(begin)


def _set_aside(path: Path, descriptor: int) -> None:
    """Give a file that is no lock another name, with its contents; the caller has it locked where locks work."""
    if _is_same_file(path, descriptor):
        other = path.with_name(f"_bad-{path.name}-{uuid.uuid4().hex[:8]}")
        os.rename(path, other)
        logger.warning("%s was no lock of accel_trainer: it is kept as %s, and a lock has its name", path, other.name)


def _space() -> str:
    """Return the namespace of process ids: a container has its own, often under the host's name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner is known to have ended: its process id is of this machine and container, and nobody else's."""
    if owner["host"] != socket.gethostname() or owner.get("space", _space()) != _space():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # One with our own id came before us: locks that we hold ourselves are in `_held`.
    return bool(owner["pid"] == os.getpid())


def _describe_owner(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"


def _warn_of_takeover(path: Path, owner: dict[str, Any]) -> None:
    logger.warning("taking over %s from %s, which is gone", path, _describe_owner(owner))


def _locked(path: Path, owner: dict[str, Any]) -> CheckpointLockedError:
    return CheckpointLockedError(
        f"{path.parent} is written to by another run ({_describe_owner(owner)}; {path.name}); give this run a "
        "directory of its own, or end the other one first"
    )


# --- network disks, on which `flock` is not supported or does not reach other machines ------------------------------


def _wait_for_sign_of_life(path: Path, descriptor: int, owner: dict[str, Any]) -> bool:
    """Wait for an owner elsewhere to touch its lock, and return whether it did; else it is dead."""
    # The file's time is compared with itself alone: this machine's clock or the other's may be minutes ahead.
    seen = os.fstat(descriptor).st_mtime
    seconds = STALE_SECONDS if time.time() - seen <= STALE_SECONDS else SILENCE_SECONDS
    logger.warning("waiting up to %.0f s for a sign of life of %s at %s", seconds, _describe_owner(owner), path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(HEARTBEAT_SECONDS / 30)
        if not _is_same_file(path, descriptor) or os.fstat(descriptor).st_mtime != seen:
            return True
    return False


def _start_heartbeat() -> None:
    # On every disk, for none tells whether its locks reach other machines.
    global _beating
    if _beating is None or not _beating.is_alive():
        _beating = threading.Thread(target=_beat, name="checkpoint-heartbeat", daemon=True)
        _beating.start()


def _beat() -> None:
    while _held:
        time.sleep(HEARTBEAT_SECONDS)
        for lock in list(_held.values()):
            try:
                os.utime(lock._descriptor)
            except OSError as error:
                logger.warning("%s could not be touched (%s); other machines may take this run for dead", lock, error)


_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNIQUE = "-" + "[0-9a-f]" * 8


def _manifest_of(directory: Path) -> Manifest:
    """Return the manifest of a checkpoint, also of one whose save never ended."""
    try:
        return Manifest.read(directory)
    except CheckpointNotFoundError:
        with as_corrupt(directory / MANIFEST_NAME):
            return Manifest.decode(read_json(directory / MANIFEST_NAME))


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
                refuse_extra_files(target, _manifest_of(target))
        except CorruptCheckpointError as error:
            # Without a marker, a manifest.json that is none of ours is the user's.
            if "does not name" in str(error) or MARKER_NAME not in inside:
                raise ConfigError(f"{error}. A save would remove it") from error
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
    """Rename `staged` to `target`, durably; return the new place of an older `target`, to be removed."""
    # Where names cannot be swapped in one step, `recover_target` brings the older one back after a kill in between.
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
    """Remove the leftovers of dead runs, of checkpoints called `name` or of all; the owner of the lock calls it."""
    # Of all, those stay that another run is saving under a name with a lock of its own.
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
                if kind == "_old" and not target.exists():
                    recover_target(target)  # all that is left of it
                else:
                    logger.info("removing %s, which a run that has ended left behind", path)
                    remove_tree(path)
            finally:
                if lock is not None:
                    lock.release()


PREFIX = "checkpoint_"


def numbered_checkpoints(directory: Path, prefix: str = PREFIX) -> list[tuple[int, Path]]:
    """Return the checkpoints in `directory` called `prefix` and a number, by number; other files are ignored."""
    return [(number, path) for number, path in _numbered(directory, prefix) if path.is_dir()]


def _numbered(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    """Return everything that is called `prefix` and a number, by number."""
    numbers = ((path.name.removeprefix(prefix), path) for path in directory.glob(f"{prefix}*"))
    # No longer ones: int() of 5,000 digits is an error, and no run comes so far.
    return sorted((int(number), path) for number, path in numbers if re.fullmatch("[0-9]{1,18}", number))


def next_number(directory: Path, prefix: str = PREFIX) -> int:
    """Return the lowest number above those of all checkpoints, and of those that are being saved; the owner calls it.

    Links and files count: their names are taken.
    """
    # Another Accelerator of the process may save in the background; leftovers of dead runs have been removed.
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


def identify(path: Path, ranks: list[int], world_size: int) -> str:
    """Return a word that is the same for a complete checkpoint on the disks of all nodes; "" of one that will not do.

    Args:
        ranks: of this node, the first and the one after the last: a part of a save that others hold is of use to them
            alone, in a run of as many ranks.
    """
    try:
        manifest = check_checkpoint(path, "size")
        if manifest.node_save is None:
            return (path / MARKER_NAME).read_text()
        is_ours = (manifest.metadata[NODE_KEY].get("ranks"), manifest.world_size) == (ranks, world_size)
        return manifest.node_save if is_ours else ""
    except (AccelTrainerError, OSError):
        return ""


def pass_over(path: Path, reason: str, passed_over: list[str]) -> None:
    """Rename a bad checkpoint to `_bad-...`, where nobody looks for one, and note why; nothing of it is removed."""
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
    passed_over.append(f"{path.name}: {reason}")


@for_all
def retire(
    directory: Path, keep: int, protected: Collection[Path] = (), *, step: int | None = None, prefix: str = PREFIX
) -> list[Path]:
    """Remove complete checkpoints of lower numbers until `keep` are left, the `protected` ones always among them.

    One process calls it, after a commit. A failure is a warning. Returns the removed ones, or at least renamed.
    """
    # Links to checkpoints stay, and do not count: what they lead to is not this run's.
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

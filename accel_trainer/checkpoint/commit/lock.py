"""The lock of a directory that one run writes to: it refuses a second run, and dies with its owner."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from accel_trainer import logging
from accel_trainer.errors import CheckpointLockedError

__all__ = ["LOCK_NAME", "DirectoryLock", "lock_of"]

logger = logging.get_logger(__name__)

LOCK_NAME = "_lock"
"""In a directory of numbered checkpoints, held by the run that saves to it.

Begins with an underscore, as `_bad-...` does: pushing a Trainer's output directory to a hub leaves such names out.
"""
HEARTBEAT_SECONDS = 30.0
STALE_SECONDS = 300.0
"""A lock of another machine that was not touched for so long is taken over.

Ten heartbeats: network disks cache times of files, NFS up to 60 s by default (acregmax in nfs(5)).
"""

_held: dict[Path, DirectoryLock] = {}
_beating: threading.Thread | None = None


def lock_of(target: Path) -> Path:
    """Return the lock of a save to a name of its own, outside of a run's numbered checkpoints."""
    return target.with_name(f".{target.name}.lock")


class DirectoryLock:
    """A lock file: `flock` within a machine, and a signature with a heartbeat for network disks without locks.

    A process may take it several times, and releases it as often.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor
        self._count = 1

    @classmethod
    def take(cls, path: Path) -> DirectoryLock:
        """Lock the file `path`, which is created if need be.

        Raises:
            CheckpointLockedError: another process has it; the message says which, where and since when.
        """
        path = path.absolute()
        if path in _held:
            _held[path]._count += 1
            return _held[path]
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                is_locked = _try_flock(descriptor)
                if is_locked is False:
                    _refuse_or_remove(path, descriptor)
                elif _is_same_file(path, descriptor):
                    _check_signature(path, descriptor, has_locks=is_locked is True)
                    lock = cls(path, descriptor)
                    lock._sign()
                    _held[path] = lock
                    _start_heartbeat()
                    return lock
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    @classmethod
    def take_free(cls, path: Path) -> DirectoryLock | None:
        """Lock the file `path` if nobody has it, this process included; None otherwise."""
        if path.absolute() in _held:
            return None
        try:
            return cls.take(path)
        except CheckpointLockedError:
            return None

    def _sign(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = {"host": socket.gethostname(), "space": _space(), "pid": os.getpid(), "since": since}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner).encode(), 0)

    @property
    def is_shared(self) -> bool:
        """Whether this process has taken it more than once."""
        return self._count > 1

    def beat(self) -> None:
        """Touch the file, a sign of life for other machines."""
        os.utime(self._descriptor)

    def release(self) -> None:
        """Release the lock once; the last time removes the file. A forked child has none to release."""
        if _held.get(self.path) is not self:
            return
        self._count -= 1
        if self._count == 0:
            del _held[self.path]
            if _is_same_file(self.path, self._descriptor):
                self.path.unlink(missing_ok=True)
            os.close(self._descriptor)


def _forget() -> None:
    """Drop a forked child's copies of its parent's locks; closing them leaves the parent's alone."""
    global _beating
    for lock in _held.values():
        os.close(lock._descriptor)
    _held.clear()
    _beating = None


os.register_at_fork(after_in_child=_forget)


@atexit.register
def _release_all() -> None:
    for lock in list(_held.values()):
        lock._count = 1
        lock.release()


def _try_flock(descriptor: int) -> bool | None:
    """Return whether the file could be locked; None on a filesystem without locks, where the signature decides."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _space() -> str:
    """Return the namespace of process ids: a container has its own, often under the host's name."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the locked file: its owner removes it when it releases the lock."""
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)


def _owner(descriptor: int) -> dict[str, Any]:
    try:
        data = json.loads(os.pread(descriptor, 4096, 0))
        return data if isinstance(data, dict) else {}
    except ValueError:
        return {}


def _is_near(owner: dict[str, Any]) -> bool:
    """Whether the owner's process id is valid here: it is of this machine and this container."""
    return owner.get("host") == socket.gethostname() and owner.get("space", _space()) == _space()


def _is_dead(owner: dict[str, Any], descriptor: int) -> bool:
    """Whether the owner is known to be gone: no such process on this machine, or long silent on another."""
    if _is_near(owner):
        if owner.get("pid") == os.getpid():
            return True  # an earlier process with our id: locks that we hold ourselves are in `_held`
        try:
            os.kill(int(owner.get("pid", 0)), 0)
        except ProcessLookupError:
            return True
        except (PermissionError, ValueError):
            return False
        return False
    return time.time() - os.fstat(descriptor).st_mtime > STALE_SECONDS


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"


def _refuse_or_remove(path: Path, descriptor: int) -> None:
    """Raise where a live owner has the file locked; remove a file that orphans of a dead owner keep locked."""
    owner = _owner(descriptor)
    if not owner:
        # Locked and not yet signed, or just released: look again.
        time.sleep(0.01)
    elif _is_dead(owner, descriptor):
        logger.warning("taking over %s from %s, which is gone", path, _describe(owner))
        path.unlink(missing_ok=True)
    else:
        raise _locked(path, owner)


def _locked(path: Path, owner: dict[str, Any]) -> CheckpointLockedError:
    return CheckpointLockedError(
        f"{path.parent} is written to by another run ({_describe(owner)}; {path.name}); give this run a directory "
        "of its own, or end the other one first"
    )


def _check_signature(path: Path, descriptor: int, *, has_locks: bool) -> None:
    """Raise where a file that we could lock is signed by a live owner, out of the reach of locks."""
    owner = _owner(descriptor)
    if not owner:
        return
    reaches = has_locks and owner.get("host") == socket.gethostname()
    if not reaches and _shows_life(path, owner, descriptor):
        raise _locked(path, owner)
    logger.warning("taking over %s from %s, which is gone", path, _describe(owner))


def _shows_life(path: Path, owner: dict[str, Any], descriptor: int) -> bool:
    """Wait until the owner is known to be dead, or touches its lock: a job that restarts on another machine goes on."""
    seen = os.fstat(descriptor).st_mtime_ns
    if not _is_dead(owner, descriptor) and not _is_near(owner):
        logger.warning("waiting up to %.0f s for a sign of life of %s at %s", STALE_SECONDS, _describe(owner), path)
    while not _is_dead(owner, descriptor):
        if _is_near(owner) or not _is_same_file(path, descriptor) or os.fstat(descriptor).st_mtime_ns != seen:
            return True
        time.sleep(HEARTBEAT_SECONDS / 30)
    return False


def _start_heartbeat() -> None:
    global _beating
    if _beating is None or not _beating.is_alive():
        _beating = threading.Thread(target=_beat, name="checkpoint-heartbeat", daemon=True)
        _beating.start()


def _beat() -> None:
    while _held:
        time.sleep(HEARTBEAT_SECONDS)
        for lock in list(_held.values()):
            try:
                lock.beat()
            except OSError as error:
                logger.warning("%s could not be touched (%s); other machines may take this run for dead", lock, error)

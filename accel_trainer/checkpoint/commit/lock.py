"""The lock of a directory that one run writes to: it refuses a second run, and dies with its owner."""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from accel_trainer import logging
from accel_trainer.checkpoint.format.regular_files import open_own
from accel_trainer.errors import CheckpointLockedError, ConfigError

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
SILENCE_SECONDS = 4 * HEARTBEAT_SECONDS
"""The same, where its time is that old already: two heartbeats and a network disk's cache."""
FORGOTTEN_SECONDS = 25 * 3600.0
"""One that old is taken over at once: more than a clock is wrong by, time zones included."""
SIGNING_SECONDS = 5.0
"""A process that has locked a file signs it at once: one without a signature for so long is in use, whoever it is."""
_SIGNATURE = b'{"host": "'

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

        A file of that name that no lock has written is renamed, with a warning, and keeps its contents.

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
                is_locked = _try_flock(descriptor)
                if is_locked is False:
                    _refuse_or_remove(path, descriptor, may_wait=time.monotonic() < deadline)
                elif not _is_ours(descriptor):
                    _set_aside(path, descriptor)
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
        """Lock the file `path` if nobody has it, this process included; None otherwise, or where it can be no lock."""
        if path.absolute() in _held:
            return None
        try:
            return cls.take(path)
        except (CheckpointLockedError, ConfigError):
            return None

    def _sign(self) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        owner = {"host": socket.gethostname(), "space": _space(), "pid": os.getpid(), "since": since}
        owner["birth"] = _birth(os.getpid())
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
        named = os.lstat(path)
    except FileNotFoundError:
        return False
    own = os.fstat(descriptor)
    return (named.st_dev, named.st_ino) == (own.st_dev, own.st_ino)


def _birth(pid: int) -> str:
    """Return when a process began, as the system counts it: its id alone may be another's by now; "" where unknown."""
    try:
        # proc_pid_stat(5): after the name, which may hold anything, field 22 is the 20th.
        began = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {began}"
    except (OSError, IndexError):
        return ""


def _owner(descriptor: int) -> dict[str, Any]:
    """Return the signature of a lock; {} where there is none, or one that was cut short."""
    try:
        data = json.loads(os.pread(descriptor, 4096, 0))
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


def _is_near(owner: dict[str, Any]) -> bool:
    """Whether the owner's process id is valid here: it is of this machine and this container."""
    return owner.get("host") == socket.gethostname() and owner.get("space", _space()) == _space()


def _is_alive(owner: dict[str, Any]) -> bool | None:
    """Whether the owner runs; None where that cannot be told: on another machine, or where its id may be another's."""
    if not _is_near(owner):
        return None
    if owner["pid"] == os.getpid():
        return False  # an earlier process with our id: locks that we hold ourselves are in `_held`
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    born, found = owner.get("birth"), _birth(owner["pid"])
    return born == found if born and found else None


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"


def _refuse_or_remove(path: Path, descriptor: int, *, may_wait: bool) -> None:
    """Raise where a live owner has the file locked; remove a file that orphans of a dead owner keep locked."""
    owner = _owner(descriptor)
    if not owner and may_wait:
        # Locked and not yet signed, or just released: look again.
        time.sleep(0.01)
    elif owner and not _shows_life(path, owner, descriptor, is_locked=True):
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
    if not reaches and _shows_life(path, owner, descriptor, is_locked=False):
        raise _locked(path, owner)
    logger.warning("taking over %s from %s, which is gone", path, _describe(owner))


def _shows_life(path: Path, owner: dict[str, Any], descriptor: int, *, is_locked: bool) -> bool:
    """Whether the owner lives. Where that cannot be told, wait for it to touch its lock, or let so much time pass.

    The file's time is not compared with this machine's clock alone: one of them may be minutes ahead.
    """
    is_alive = _is_alive(owner)
    if is_alive is not None:
        return is_alive
    seen = os.fstat(descriptor).st_mtime
    age = time.time() - seen
    if age <= STALE_SECONDS and (is_locked or _is_near(owner)):
        return True
    if age > FORGOTTEN_SECONDS:
        return False
    seconds = SILENCE_SECONDS if age > STALE_SECONDS else STALE_SECONDS
    logger.warning("waiting up to %.0f s for a sign of life of %s at %s", seconds, _describe(owner), path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(HEARTBEAT_SECONDS / 30)
        if not _is_same_file(path, descriptor) or os.fstat(descriptor).st_mtime != seen:
            return True
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

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
from accel_trainer.checkpoint.disk import open_own
from accel_trainer.errors import CheckpointLockedError, ConfigError

logger = logging.get_logger(__name__)

LOCK_NAME = "_lock"
"""In a directory of numbered checkpoints, held by the run that saves to it.

Begins with an underscore, as `_bad-...` does: pushing a Trainer's output directory to a hub leaves such names out.
"""
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
    """A file that its owner holds by `flock` and has signed; a process may take it several times.

    The kernel drops a `flock` with the last descriptor of its owner, however that ended: nothing else need tell whether
    the owner lives. The signature names it in the message of a run that is refused, and decides where a network disk
    has no locks, or none between machines: see `_wait_for_sign_of_life`.
    """

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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if not owner and may_wait:  # locked and not yet signed, or just released
            time.sleep(0.01)
            return False
        if not owner or not _is_gone(owner):
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
    owner = _owner(descriptor)
    if owner:
        # Of a host of the same name the kernel has told; NFS and Lustre can be mounted with locks of one machine alone.
        is_told = has_locks and owner["host"] == socket.gethostname()
        if not is_told and not _is_gone(owner) and _wait_for_sign_of_life(path, descriptor, owner):
            raise _locked(path, owner)
        _warn_of_takeover(path, owner)
    signature = {"host": socket.gethostname(), "space": _space(), "pid": os.getpid()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({**signature, "since": time.strftime("%Y-%m-%d %H:%M:%S")}).encode(), 0)
    return True


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


def _is_gone(owner: dict[str, Any]) -> bool:
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


def _describe(owner: dict[str, Any]) -> str:
    return f"process {owner.get('pid', '?')} on {owner.get('host', '?')}, since {owner.get('since', '?')}"


def _warn_of_takeover(path: Path, owner: dict[str, Any]) -> None:
    logger.warning("taking over %s from %s, which is gone", path, _describe(owner))


def _locked(path: Path, owner: dict[str, Any]) -> CheckpointLockedError:
    return CheckpointLockedError(
        f"{path.parent} is written to by another run ({_describe(owner)}; {path.name}); give this run a directory "
        "of its own, or end the other one first"
    )


# --- network disks, on which `flock` is not supported or does not reach other machines ------------------------------


def _wait_for_sign_of_life(path: Path, descriptor: int, owner: dict[str, Any]) -> bool:
    """Wait for an owner elsewhere to touch its lock, and return whether it did; so much time without means it is dead.

    The file's time is compared with itself alone: this machine's clock or the other's may be minutes ahead.
    """
    seen = os.fstat(descriptor).st_mtime
    seconds = STALE_SECONDS if time.time() - seen <= STALE_SECONDS else SILENCE_SECONDS
    logger.warning("waiting up to %.0f s for a sign of life of %s at %s", seconds, _describe(owner), path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(HEARTBEAT_SECONDS / 30)
        if not _is_same_file(path, descriptor) or os.fstat(descriptor).st_mtime != seen:
            return True
    return False


def _start_heartbeat() -> None:
    """Have a thread touch the locks of this process; on every disk, for none tells whether its locks reach others."""
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

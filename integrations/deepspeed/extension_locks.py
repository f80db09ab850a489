"""The locks under which torch compiles DeepSpeed's ops: a warning while a run waits for one that nobody releases.

`torch.utils.cpp_extension` makes a file `lock` in the folder of an op, compiles, and removes it. A process that is
killed meanwhile leaves it there, and torch makes every later one wait for it for ever, without a word.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from accel_trainer import logging
from accel_trainer.errors import ConfigError

logger = logging.get_logger(__name__)

_PATIENCE_SECONDS = 20.0
"""Compiling the collectives for the CPU, the smallest op, takes about as long."""
_ABANDONED_SECONDS = 3600.0
"""The largest op, which writes to NVMe, takes nine minutes of one processor."""


class _AbandonedLockError(Exception):
    """Raised in a thread that waits for a lock which nobody will release."""


@contextmanager
def watch_locks() -> Iterator[None]:
    """Run a block that may load ops of DeepSpeed, and speak up where it waits for the lock of one for 20 s.

    A warning on each rank says which lock, how old, which process holds it, and what to delete; the run goes on as soon
    as the lock is gone.

    Raises:
        ConfigError: no process of this machine holds the lock, and it is an hour old.
    """
    is_over = threading.Event()
    watch = threading.Thread(
        target=_watch, args=(threading.get_ident(), is_over), name="deepspeed-lock-watch", daemon=True
    )
    watch.start()
    try:
        yield
    except _AbandonedLockError:
        raise ConfigError(_messages.pop(threading.get_ident())) from None
    finally:
        is_over.set()
        watch.join()


_messages: dict[int, str] = {}
"""Of the lock that a thread has waited for in vain: what is raised in another thread takes no arguments."""


def _watch(thread: int, is_over: threading.Event) -> None:
    """Warn once, after a thread has waited for one lock for a while; end its wait if that has no end."""
    waits_for: Path | None = None
    since, has_warned = time.monotonic(), False
    while not is_over.wait(_PATIENCE_SECONDS / 20):
        lock = _lock_waited_for(thread)
        if lock is None or lock != waits_for:
            waits_for, since = lock, time.monotonic()
        elif time.monotonic() - since >= _PATIENCE_SECONDS:
            holders, age_seconds = _find_holders(lock), _age_seconds(lock)
            if age_seconds is None:
                continue
            message = _describe(lock, age_seconds, holders)
            if not holders and age_seconds >= _ABANDONED_SECONDS:
                _messages[thread] = message
                # The wait is a loop of short sleeps in Python, after one of which this is raised.
                error = ctypes.py_object(_AbandonedLockError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)
                return
            if not has_warned:
                has_warned = True
                logger.warning("%s. Waiting for it", message, main_process_only=False)


def _lock_waited_for(thread: int) -> Path | None:
    """Return the lock that a thread waits for in `torch.utils.file_baton`."""
    baton = sys.modules.get("torch.utils.file_baton")  # of a release of torch without it, nothing is known
    wait = getattr(getattr(baton, "FileBaton", None), "wait", None)
    frame: FrameType | None = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is getattr(wait, "__code__", None):
            path = getattr(frame.f_locals.get("self"), "lock_file_path", None)
            return None if path is None else Path(path)
        frame = frame.f_back
    return None


def _age_seconds(lock: Path) -> float | None:
    try:
        return time.time() - lock.stat().st_mtime
    except OSError:  # released
        return None


def _find_holders(lock: Path) -> list[str]:
    """Return the processes of this machine that have the lock open, as far as this one may look (on Linux)."""
    holders = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.path.samefile(link, lock):
                pid = link.parts[2]
                command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders.append(f"{pid} ({command.strip()[:100]})")
        except OSError:  # gone, or another user's
            continue
    return holders


def _describe(lock: Path, age_seconds: float, holders: list[str]) -> str:
    waited = f"DeepSpeed waits for the lock {lock}, which is {age_seconds:.0f} s old"
    if holders:
        return f"{waited}: process {', '.join(holders)} compiles there. If that one hangs, end it and delete the lock"
    return (
        f"{waited} and which no process on {socket.gethostname()} is seen to hold: one that compiled there was killed, "
        "unless another machine or container compiles into the same folder. If none does, delete the folder "
        f"{lock.parent} and start again; it is compiled anew"
    )

"""The number of CPU cores that a process or a rank may use: by its affinity mask and by the quota of its cgroup."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_FILE_SYSTEM = Path("/")


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy, 1 at least."""
    return max(1, min(_cores_in_mask(0), _cores_in_quota()))


def cores_of_rank(local_world_size: int) -> int:
    """Return the number of cores that are this rank's own when the ranks of its node share them alike, 1 at least."""
    own = _cores_in_mask(0)
    # A launcher may have bound each rank to cores of its own. The launcher, parent of the ranks, still has all of them
    # in its mask: they are shared out, and not the few that are this rank's already.
    shared = min(max(own, _cores_in_mask(os.getppid())), _cores_in_quota())
    return max(1, min(own, shared // local_world_size))


def _cores_in_mask(pid: int) -> int:
    if not hasattr(os, "sched_getaffinity"):  # only Linux and some BSDs bind processes to cores
        return os.cpu_count() or 1
    try:
        return len(os.sched_getaffinity(pid))
    except OSError:  # a parent that is gone
        return 1


def _cores_in_quota() -> int:
    """Return the least quota of this process's cgroups and of those above them, rounded up to full cores."""
    # A container's quota leaves `os.cpu_count()` and the mask as they are: with 64 threads on a quota of 4 cores, all
    # threads are halted for most of each period (https://docs.kernel.org/scheduler/sched-bwc.html).
    limits = [-(-quota // period) for quota, period in _quotas() if quota > 0 and period > 0]
    return min(limits, default=os.cpu_count() or 1)


def _quotas() -> Iterator[tuple[int, int]]:
    """Yield quota and period, in microseconds, of every cgroup that has a quota of CPU time."""
    mounted = _FILE_SYSTEM / "sys/fs/cgroup"
    for line in _read(_FILE_SYSTEM / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may be that of the host: it does not exist, and the container's own is the root.
        group = Path(path.lstrip("/"))
        for directory in (group, *group.parents):
            if number == "0":  # version 2
                words = _read(mounted / directory / "cpu.max").split()
            else:
                base = mounted / controllers / directory
                words = [_read(base / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            if len(words) == 2 and all(word.lstrip("-").isdigit() for word in words):
                yield int(words[0]), int(words[1])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

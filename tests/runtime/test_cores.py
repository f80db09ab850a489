from __future__ import annotations

import os
from pathlib import Path

import pytest

from accel_trainer.runtime import cores


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a machine with 16 cores, no quota, and nobody bound to cores."""
    monkeypatch.setattr(cores, "_FILE_SYSTEM", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    bind(monkeypatch, own=16, parent=16)
    return tmp_path


def bind(monkeypatch: pytest.MonkeyPatch, own: int, parent: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(own if pid == 0 else parent)), raising=False)


def write(machine: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = machine / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, 16, id="no cgroups"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 16, id="v2 without"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4, id="v2 container"),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2, id="rounded up"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job.slice/task\n",
                "sys/fs/cgroup/job.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/job.slice/task/cpu.max": "max 100000\n",
            },
            3,
            id="v2 of the group above",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "50000\n",
            },
            5,
            id="v1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu:/docker/on-the-host\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            2,
            id="v1 path of the host",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            16,
            id="v1 without",
        ),
        pytest.param({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "64000000 100000\n"}, 16, id="above all"),
    ],
)
def test_a_quota_bounds_the_cores(machine: Path, files: dict[str, str], expected: int) -> None:
    write(machine, files)
    assert cores.usable_cores() == expected
    assert cores.cores_of_rank(1) == expected
    assert cores.cores_of_rank(2) == max(1, expected // 2)


@pytest.mark.parametrize(
    ("own", "parent", "ranks", "expected"),
    [
        pytest.param(16, 16, 4, 4, id="nobody is bound"),
        pytest.param(6, 6, 4, 1, id="the launcher is bound"),
        pytest.param(4, 16, 4, 4, id="each rank has its own"),
        pytest.param(8, 16, 4, 4, id="two ranks share a NUMA node"),
        pytest.param(2, 1, 4, 1, id="more ranks than cores"),
    ],
)
def test_ranks_share_the_cores_of_their_launcher(
    machine: Path, monkeypatch: pytest.MonkeyPatch, own: int, parent: int, ranks: int, expected: int
) -> None:
    bind(monkeypatch, own, parent)
    assert cores.usable_cores() == own
    assert cores.cores_of_rank(ranks) == expected


def test_a_system_without_masks_counts_its_cores(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores.usable_cores() == 16
    assert cores.cores_of_rank(4) == 4

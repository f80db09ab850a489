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


def v1(line: str, folder: str, quota: int, period: int) -> dict[str, str]:
    folder = f"sys/fs/cgroup/{folder}"
    limits = {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": f"{period}\n"}
    return {"proc/self/cgroup": line} | limits


def v2(quota: str, **of_groups: str) -> dict[str, str]:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    return files | {f"sys/fs/cgroup/{name}/cpu.max": f"{group} 100000\n" for name, group in of_groups.items()}


QUOTAS: dict[str, tuple[dict[str, str], int]] = {
    "no cgroups": ({}, 16),
    "v2 without": (v2("max"), 16),
    "v2 container": (v2("400000"), 4),
    "rounded up": (v2("150000"), 2),
    "v2 of the group above": (
        v2("max", **{"job.slice": "300000", "job.slice/task": "max"}) | {"proc/self/cgroup": "0::/job.slice/task\n"},
        3,
    ),
    "v1": (v1("4:memory:/box\n1:cpu,cpuacct:/box\n0::/\n", "cpu,cpuacct/box", 250000, 50000), 5),
    "v1 path of the host": (v1("1:cpu:/docker/on-the-host\n", "cpu", 200000, 100000), 2),
    "v1 without": (v1("1:cpu:/\n", "cpu", -1, 100000), 16),
    "above all": (v2("64000000"), 16),
}


@pytest.mark.parametrize(("files", "expected"), QUOTAS.values(), ids=QUOTAS)
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

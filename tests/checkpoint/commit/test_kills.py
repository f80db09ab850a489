"""A save that is killed, at every point and at any moment: what was acknowledged is still there, whole (R1)."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel_trainer.runtime.fault_injection import POINTS
from tests.checkpoint.crash_job import acknowledged, assert_survived, random_kill, save_repeatedly
from tests.ranks import RankFailure, run_ranks

SAVE_POINTS = [point for point in POINTS if point.startswith("save.")]
TARGETS = {"rank0": ":rank=0", "rank1": ":rank=1", "both": ""}


def faults(spec: str) -> dict[str, str]:
    return {"ACCEL_TRAINER_TEST_MODE": "1", "ACCEL_TRAINER_FAULT": spec}


def test_there_are_eleven_points():
    assert len(SAVE_POINTS) == 11


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("point", SAVE_POINTS)
def test_r1_a_kill_at_any_point_loses_nothing_acknowledged(tmp_path: Path, point: str, target: str):
    env = faults(f"kill9@{point}{TARGETS[target]}:step=1")
    if "retention" in point and target == "rank1":
        # Only the rank that commits removes anything: nothing waits for the others there.
        run_ranks(save_repeatedly, 2, tmp_path, 3, env=env)
        assert assert_survived(tmp_path) == 2
        return
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(save_repeatedly, 2, tmp_path, 3, env=env)
    assert acknowledged(tmp_path) == 0
    is_published = point in ("save.after_rename", "save.retention_renamed", "save.retention_rm")
    held = assert_survived(tmp_path)
    assert held in ((1,) if is_published and target != "rank1" else (0, 1))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("point", ["save.mid_shard", "save.before_rename", "save.after_rename"])
def test_r1_a_directory_that_is_saved_again_is_never_lost_or_mixed(tmp_path: Path, point: str, target: str):
    run_ranks(save_repeatedly, 2, tmp_path, 1, explicit=True)
    # A name without a number: the point counts its passes.
    env = faults(f"kill9@{point}{TARGETS[target]}:step=0")
    with pytest.raises(RankFailure, match="SIGKILL"):
        run_ranks(save_repeatedly, 2, tmp_path, 3, first=10, explicit=True, env=env)
    held = assert_survived(tmp_path, explicit=True)
    assert held in ((10,) if point == "save.after_rename" and target != "rank1" else (0, 10))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_r1_a_kill_at_any_moment_loses_nothing_acknowledged(tmp_path: Path, seed: int):
    random_kill(tmp_path, seed)

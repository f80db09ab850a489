"""A save that is killed, at every point and at any moment: what was acknowledged is still there, whole (R1)."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from tests.cells import beyond, crossed, selected
from tests.checkpoint.crash_job import acknowledged, assert_survived, kill_at_random, save_repeatedly
from tests.fault_injection import SAVE_POINTS, fault_env
from tests.ranks import RankFailure, map_jobs, run_ranks

TARGETS = {"rank0": ":rank=0", "rank1": ":rank=1", "both": ""}


@pytest.fixture(scope="module")
def killed_at_a_point(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Where each job has saved that was killed at its second save."""

    def run(case: tuple[str, str]) -> Path:
        folder = tmp_path_factory.mktemp("-".join(case))
        env = fault_env(f"kill9@{case[0]}{TARGETS[case[1]]}:step=1")
        # Only the rank that commits removes anything: nothing waits for the others there.
        survives = "retention" in case[0] and case[1] == "rank1"
        with contextlib.nullcontext() if survives else pytest.raises(RankFailure, match="SIGKILL"):
            run_ranks(save_repeatedly, 2, folder, 3, env=env)
        return folder

    return map_jobs(run, selected(request, "test_r1_a_kill_at_any_point_loses_nothing_acknowledged"))


@pytest.mark.timeout(300)  # the first test waits for the jobs of all
@pytest.mark.parametrize(("point", "target"), crossed(SAVE_POINTS, TARGETS))
def test_r1_a_kill_at_any_point_loses_nothing_acknowledged(killed_at_a_point: dict[Any, Path], point: str, target: str):
    folder = killed_at_a_point[point, target]
    if "retention" in point and target == "rank1":
        assert assert_survived(folder) == 2
        return
    assert acknowledged(folder) == 0
    is_published = point in ("save.after_rename", "save.retention_renamed", "save.retention_rm")
    held = assert_survived(folder)
    assert held in ((1,) if is_published and target != "rank1" else (0, 1))


@pytest.fixture(scope="module")
def killed_in_one_place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Path]:
    """Where each job has saved that was killed when it saved to a directory again."""

    def run(case: tuple[str, str]) -> Path:
        folder = tmp_path_factory.mktemp("-".join(case))
        run_ranks(save_repeatedly, 2, folder, 1, explicit=True)
        # A name without a number: the point counts its passes.
        env = fault_env(f"kill9@{case[0]}{TARGETS[case[1]]}:step=0")
        with pytest.raises(RankFailure, match="SIGKILL"):
            run_ranks(save_repeatedly, 2, folder, 3, first=10, explicit=True, env=env)
        return folder

    return map_jobs(run, selected(request, "test_r1_a_directory_that_is_saved_again_is_never_lost_or_mixed"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("point", "target"), crossed(["save.mid_shard", "save.before_rename", "save.after_rename"], TARGETS)
)
def test_r1_a_directory_that_is_saved_again_is_never_lost_or_mixed(
    killed_in_one_place: dict[Any, Path], point: str, target: str
):
    held = assert_survived(killed_in_one_place[point, target], explicit=True)
    assert held in ((10,) if point == "save.after_rename" and target != "rank1" else (0, 10))


@pytest.fixture(scope="module")
def killed_at_a_moment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Where each job has saved that was killed while it saved all the time, and whether to one directory."""

    def run(case: tuple[int]) -> tuple[Path, bool]:
        folder = tmp_path_factory.mktemp(str(case[0]))
        return folder, kill_at_random(folder, case[0])

    return map_jobs(run, selected(request, "test_r1_a_kill_at_any_moment_loses_nothing_acknowledged"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [0, 3, 5, *map(beyond, (6, 7, 10))]
)  # each way to save and to be killed; `make soak` has 200
def test_r1_a_kill_at_any_moment_loses_nothing_acknowledged(killed_at_a_moment: dict[Any, Any], seed: int):
    folder, explicit = killed_at_a_moment[seed,]
    assert_survived(folder, explicit=explicit)

"""A save that fails on one rank (R12) or on a full disk (R13), or waits for the one before it (R5)."""

from __future__ import annotations

import math
import resource
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel_trainer import ProjectConfiguration
from accel_trainer.checkpoint import background, disk
from accel_trainer.checkpoint.publication import Publication
from accel_trainer.checkpoint.reader import open_checkpoint
from accel_trainer.errors import ConfigError, DiskFullError
from tests.checkpoint.crash_job import SavedRun, assert_survived
from tests.fault_injection import fault_env
from tests.publishing import ALONE, publish, publish_directory
from tests.ranks import run_ranks


def test_r13_what_will_not_fit_is_refused_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    publish(tmp_path / "s", "old")
    monkeypatch.setattr(disk, "_free_bytes", lambda directory: 3 * 2**20)
    message = (
        r"has 3\.0 MiB free, and the save needs 3\.[12] MiB; nothing was written\. .* total_limit=1 needs room for two"
    )
    with pytest.raises(DiskFullError, match=message), publish_directory(tmp_path / "s", ALONE, need_bytes=3 * 2**20):
        pass
    with pytest.raises(DiskFullError, match=message), publish_directory(tmp_path / "s", ALONE) as staged:
        staged.write_tensors("x.safetensors", {"x": torch.zeros(3 * 2**20, dtype=torch.uint8)})
    assert open_checkpoint(tmp_path / "s", ALONE).json("x.json") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def save_with_little_room(directory: Path, limited: bool, async_: bool) -> str:
    """Save twice; the second time, rank 1 may write no file longer than 100 bytes."""
    run = SavedRun(directory)
    run.fill(0)
    run.accelerator.save_state()
    if limited and run.accelerator.process_index == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    run.fill(1)
    try:
        run.accelerator.save_state(async_=async_)
        if async_:
            run.accelerator._checkpointer.background._thread.join()
            # R5: the next step raises it, on both ranks.
            run.accelerator.backward(run.model(torch.ones(1, 8)).sum())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("async_", [False, True], ids=["now", "background"])
def test_r13_a_limit_that_one_rank_meets_is_everyones_and_the_last_good_one_stays(tmp_path: Path, async_: bool):
    told = run_ranks(save_with_little_room, 2, tmp_path, True, async_)
    assert told[1].startswith("DiskFullError: ")
    assert "could not be written: it exceeds the limit on the size of a file (0.0 MiB; see `ulimit -f`)" in told[1]
    assert "MiB are free. Earlier checkpoints are untouched" in told[1]
    assert told[0].startswith("RemoteRankError: rank 1 failed in ")
    assert "DiskFullError" in told[0]
    assert not list(tmp_path.rglob("_tmp-*"))
    assert assert_survived(tmp_path) == 0


def test_r13_a_disk_that_is_full_on_one_rank_is_named(tmp_path: Path):
    env = fault_env("enospc@save.mid_shard:rank=1:step=1")
    told = run_ranks(save_with_little_room, 2, tmp_path, False, False, env=env)
    assert "DiskFullError: " in told[1]
    assert "could not be written: its disk is full." in told[1]
    assert " were needed, and " in told[1]
    assert "rank 1 failed in save of" in told[0]
    assert assert_survived(tmp_path) == 0


def test_r12_an_exception_on_one_rank_is_everyones_and_leaves_nothing(tmp_path: Path):
    for point in ("save.begin", "save.tmp_made", "save.mid_shard", "save.before_vote", "save.after_vote"):
        directory = tmp_path / point
        env = fault_env(f"raise@{point}:rank=1:step=1")
        told = run_ranks(save_with_little_room, 2, directory, False, False, env=env)
        assert told[1] == f"RuntimeError: fault injected at {point}"
        assert f"RuntimeError: fault injected at {point}" in told[0]
        assert not list(directory.rglob("_tmp-*"))


# --- what the run does then ------------------------------------------------------------------------------------------


def limit_files(num_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))


class FullDisk:
    """Rank 1 may write no file longer than 100 bytes, until the run has paused twice."""

    def __init__(self, run: SavedRun) -> None:
        self.slept: list[float] = []
        self.is_ours = run.accelerator.process_index == 1
        background.time = SimpleNamespace(sleep=self.sleep, perf_counter=time.perf_counter)

    def begin(self) -> None:
        self.slept.clear()
        if self.is_ours:
            limit_files(100)

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) == 2:
            self.end()

    def end(self) -> None:
        limit_files(resource.RLIM_INFINITY)


def save_onto_a_full_disk(directory: Path) -> dict[str, Any]:
    """Save by every policy; return what came of it."""
    run = SavedRun(directory)
    full_disk, configuration = FullDisk(run), run.accelerator.project_configuration
    outcomes: dict[str, Any] = {}

    def save(what: str, step: int, policy: str, async_: bool, **options: Any) -> None:
        for name, value in {"on_save_error": policy, "max_pause_s": 3600.0, **options}.items():
            setattr(configuration, name, value)
        run.fill(step)
        full_disk.begin()
        try:
            path = run.accelerator.save_state(async_=async_)
            run.fill(-5)
            run.accelerator.wait_for_checkpoint()
            outcome = path and path.name
        except Exception as error:
            outcome = type(error).__name__
        full_disk.end()
        # Rank 0 removes what is left over, and has done so; the other rank may still see it.
        kept = sorted(path.name for path in (directory / "checkpoints").glob("[.c]*")) if not full_disk.is_ours else []
        outcomes[what] = (outcome, list(full_disk.slept), kept)

    for number, async_ in enumerate((False, True)):
        how = "background" if async_ else "now"
        save(f"pause, {how}", number, "pause", async_)
        run.accelerator.load_state()
        outcomes[f"held, {how}"] = run.step_held()
        save(f"warn, {how}", 7, "warn", async_)
        save(f"short pause, {how}", 8, "pause", async_, max_pause_s=119.0)
        save(f"raise, {how}", 9, "raise", async_)
    configuration.on_save_error = "warn"
    try:
        run.accelerator.save_state(directory)
    except Exception as error:
        outcomes["not the disk's fault"] = type(error).__name__
    return outcomes


def test_r13_a_run_pauses_or_goes_on_without_a_save_as_it_was_told(tmp_path: Path):
    told = run_ranks(save_onto_a_full_disk, 2, tmp_path)
    for rank, outcomes in enumerate(told):
        error = "DiskFullError" if rank == 1 else "RemoteRankError"
        for number, how in enumerate(("now", "background")):
            kept = [f"checkpoint_{number}"] if rank == 0 else []
            assert outcomes[f"pause, {how}"] == (f"checkpoint_{number}", [60.0, 60.0], kept)
            assert outcomes[f"held, {how}"] == number
            # In the background, the name was given before the disk was met.
            assert outcomes[f"warn, {how}"] == (f"checkpoint_{number + 1}" if number else None, [], kept)
            assert outcomes[f"short pause, {how}"] == (error, [60.0], kept)
            assert outcomes[f"raise, {how}"] == (error, [], kept)
        assert outcomes["not the disk's fault"] == ("ConfigError" if rank == 0 else "RemoteRankError")
    assert assert_survived(tmp_path) == 1


def save_behind_a_slow_one(directory: Path) -> list[Any]:
    run = SavedRun(directory)
    run.fill(0)
    may_go_on, commit = threading.Event(), Publication.commit

    def late(publication: Publication, *arguments: Any, **options: Any) -> Path:
        if run.accelerator.process_index == 1:
            may_go_on.wait(60)
        return commit(publication, *arguments, **options)

    Publication.commit = late
    configuration = run.accelerator.project_configuration
    outcomes: list[Any] = [run.accelerator.save_state(async_=True).name]
    configuration.max_wait_s = 0.05
    for policy in ("warn", "raise"):
        configuration.on_save_error = policy
        try:
            outcomes.append(run.accelerator.save_state(async_=policy == "warn"))
        except Exception as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    may_go_on.set()
    run.accelerator.wait_for_checkpoint()
    outcomes.append(run.accelerator.save_state().name)
    return outcomes


def test_r5_a_save_waits_for_the_one_before_it_as_long_as_it_may(tmp_path: Path):
    for first, skipped, refused, second in run_ranks(save_behind_a_slow_one, 2, tmp_path):
        assert (first, skipped, second) == ("checkpoint_0", None, "checkpoint_1")
        assert refused.startswith("SaveTimeoutError: the background save of ")
        assert "checkpoint_0 has not ended after 0.05 s (max_wait_s=0.05); save less often, give it more" in refused


def test_policies_that_are_not_known_are_refused_at_once():
    with pytest.raises(
        ConfigError, match=r"on_save_error='warm'; expected one of raise, warn, pause; did you mean 'warn'"
    ):
        ProjectConfiguration(on_save_error="warm")
    for name, value in (("max_pause_s", None), ("max_pause_s", -1.0), ("max_wait_s", math.inf), ("max_wait_s", "1")):
        with pytest.raises(ConfigError, match=f"{name}={value!r}; expected a number of seconds from 0 to 1e9"):
            ProjectConfiguration(**{name: value})
    assert ProjectConfiguration(on_save_error="pause", max_wait_s=5, max_pause_s=60).save_policy.wait_s == 65
    assert ProjectConfiguration(on_save_error="warn", max_wait_s=5).save_policy.wait_s == 5
    assert ProjectConfiguration().save_policy.wait_s is None

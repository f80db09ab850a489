"""Ranks under DeepSpeed that fail, are killed or stand still are named by the others, as under other strategies."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from accel_trainer.runtime import rank_watch
from tests.fault_injection import fault_env
from tests.ranks import RankFailure, map_jobs, preload, run_ranks
from tests.runtime.test_rank_watch import POLL_SECONDS, as_script, native_loop, print_in
from tests.trainer_jobs import build_trainer

preload("accel_trainer.accelerator", "deepspeed")


def native(folder: str, stage: int) -> None:
    as_script(native_loop, "deepspeed", folder, {"deepspeed": {"zero_stage": stage}})


def hanging(folder: str, stage: int) -> None:
    rank_watch._POLL_SECONDS = POLL_SECONDS
    print_in(folder)
    native_loop("deepspeed", folder, {"deepspeed": {"zero_stage": stage}, "hang": {"step_seconds": 2.0}})


def with_trainer(folder: str, stage: int) -> None:
    engine = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": "auto"}
    build_trainer(folder, samples=16, eval_samples=4, eval_strategy="steps", eval_steps=1, deepspeed=engine).train()


JOBS: dict[str, Any] = {
    "step": (native, 3, "raise@train.opt:rank=1:step=1"),
    "backward": (hanging, 2, "sleep@train.backward:rank=1:step=1:seconds=60"),
    "killed": (native, 1, "kill9@train.backward:rank=1:step=2"),
    "evaluation": (with_trainer, 3, "raise@eval.batch:rank=1:step=0"),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """What each rank of each job says, on the error stream too where it ends without an answer."""

    def run(name: str) -> dict[int, str]:
        function, stage, text = JOBS[name]
        folder = tmp_path_factory.mktemp(name)
        with pytest.raises(RankFailure) as failed:
            run_ranks(function, 2, str(folder), stage, env=fault_env(text), timeout=90)
        printed = {rank: Path(folder, f"{rank}.txt") for rank in range(2)}
        return {
            rank: said + (printed[rank].read_text() if printed[rank].exists() else "")
            for rank, said in failed.value.failures.items()
        }

    return map_jobs(run, JOBS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "step",
            r"RemoteRankError: rank 1 failed in optimizer step \(update 2, happen \(fault_injection\.py:\d+\)\): "
            r"RuntimeError: fault injected at train\.opt\. Rank 0 stopped with it, in \w+ \(update 2, native_loop ",
        ),
        (
            "evaluation",
            r"RemoteRankError: rank 1 failed in evaluation > forward \(update 1, .*\): RuntimeError: fault injected at "
            r"eval\.batch\. Rank 0 stopped with it, in ",
        ),
        ("killed", r"RemoteRankError: rank 1 is gone without a word \(killed.* Rank 0 stopped with it, in all_reduce "),
    ],
)
def test_r12_the_other_rank_names_the_one_that_failed(failures: Any, name: str, message: str) -> None:
    assert re.search(message, failures[name][0]), failures[name][0]
    assert "RemoteRankError" not in failures[name].get(1, "")


def test_r10_a_rank_that_stands_in_the_engines_backward_has_the_time_of_a_step(failures: Any) -> None:
    said = "".join(failures["backward"].values())
    assert re.search(
        r"HangError: no progress for \d s, the limit there is 2 s\. rank 0 waits in all_reduce \(number \d+ of the "
        r"group\) for rank 1, which has not arrived there:\n  rank 1 is in backward, happen "
        r"\(fault_injection\.py:\d+\): update 1, (.*\n)*.*, in native_loop\n(.*\n)*"
        r"  rank 0 waits in all_reduce, in backward, native_loop ",
        said,
    ), said
    assert [f"Rank {rank} ends with exit code {75}" in said for rank in range(2)] == [True, True]

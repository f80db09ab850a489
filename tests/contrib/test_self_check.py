"""`accel-trainer test`: what it starts, that its checks hold on one and two ranks, and that they can fail."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accel_trainer import DataLoaderConfiguration
from accel_trainer.contrib import self_check
from accel_trainer.launch import job
from accel_trainer.launch.cli import main
from accel_trainer.launch.job import Job
from tests.launches import run_command
from tests.ranks import preload, run_ranks

preload("accel_trainer.contrib.self_check", "accel_trainer.accelerator")

NAMES = ["process group", "collectives", "data loaders", "metrics", "random numbers", "training"]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def passed(output: str) -> list[str]:
    return [line.split(":")[0].removeprefix("  passed  ") for line in output.splitlines() if line.startswith("  pas")]


def test_two_processes_are_tested_with_the_configuration_of_a_file(tmp_path: Path):
    file, output = tmp_path / "train.yaml", tmp_path / "output.txt"
    content = "use_cpu: true\nstrategy: fsdp2\nmixed_precision: bf16\naccumulation:\n  num_steps: 2\n"
    file.write_text(content + "fsdp:\n  wrap_classes: [BertLayer]\n")
    environ = {"HF_HOME": str(tmp_path), "TORCHELASTIC_USE_AGENT_STORE": None, "OMP_NUM_THREADS": None}
    [code] = run_ranks(run_command, 1, ["test", "--config_file", str(file)], str(output), env=environ)
    text = output.read_text()
    assert code == 0, text
    assert "2 process(es) on cpu, gloo, strategy fsdp2, mixed precision bf16\n" in text
    assert passed(text) == NAMES
    assert "all 6 checks passed on 2 process(es)\n" in text


def test_the_checks_hold_in_one_process(capsys: pytest.CaptureFixture[str]):
    assert self_check.main() == 0
    text = capsys.readouterr().out
    assert passed(text) == NAMES
    assert "losses of 3 updates differ from those of one process in fp32 by 0e+00 at most" in text
    assert text.endswith("all 6 checks passed on 1 process(es)\n")


def check_all() -> tuple[int, str, str]:
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()) as output:
        return self_check.main(), output.getvalue(), errors.getvalue()


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_ranks_that_share_rows_are_tested_as_readers_of_them(axis: str):
    environ = {"ACCEL_TRAINER_STRATEGY": "fsdp2", f"ACCEL_TRAINER_PARALLEL__{axis.upper()}_SIZE": "2"}
    results = run_ranks(check_all, 4, env={"ACCEL_TRAINER_USE_CPU": "true", **environ})
    assert [code for code, *_ in results] == [0] * 4, results[0][2]
    assert "  left out  training: ranks share rows" in results[0][1]
    assert passed(results[0][1]) == NAMES[:-1]


@pytest.mark.parametrize(
    ("options", "left_out"),
    [
        ({"COMPAT": "transformers", "LOCAL_STEPS": "2", "LOSS": "chunked"}, ["loss=chunked", "local_steps=2"]),
        ({"ON_NONFINITE": "rollback", "ACTIVATION_CHECKPOINTING": "full"}, ["on_nonfinite=rollback"]),
    ],
)
def test_options_that_only_a_trainer_can_follow_are_left_out(options: dict[str, str], left_out: list[str]):
    environ = {f"ACCEL_TRAINER_{name}": value for name, value in options.items()}
    results = run_ranks(check_all, 2, env={"ACCEL_TRAINER_USE_CPU": "true", **environ})
    assert [code for code, *_ in results] == [0, 0], results[0][2]
    text = results[0][1]
    assert passed(text) == NAMES
    assert [line.split()[2] for line in text.splitlines() if line.startswith("  left out")] == left_out


def run_here(broken: str) -> tuple[int, str]:
    """Make the checks on this rank; on rank 1 something is broken."""
    from accel_trainer.data_loader import ShardedBatchSampler

    rank = int(os.environ["RANK"])
    if broken == "shards" and rank == 1:
        inner = ShardedBatchSampler.__iter__
        ShardedBatchSampler.__iter__ = lambda self: ([0] * len(batch) for batch in inner(self))
    if broken == "sums" and rank == 1:
        send = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda tensor, *rest, **options: send(tensor.add_(1), *rest, **options)
    if broken == "code" and rank == 1:
        self_check.CHECKS["metrics"] = lambda accelerator: [][0]
    with contextlib.redirect_stderr(io.StringIO()) as errors, contextlib.redirect_stdout(io.StringIO()):
        code = self_check.main() if rank == 1 else _give_up(self_check.main)
    return code, errors.getvalue()


def _give_up(call: Any) -> int:
    """Make the checks of a rank that another one leaves alone: its launcher would end it."""
    from datetime import timedelta

    from accel_trainer import Accelerator, InitProcessGroupKwargs

    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=5))])
    return int(call())


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("sums", "rank 1 of 2: collectives failed: found the sum"),
        ("shards", "rank 1 of 2: data loaders failed: found samples [4, 5, 6, 7, 12, 13, 14, 15, 20"),
        ("code", "rank 1 of 2: metrics failed: list index out of range"),
    ],
)
def test_what_does_not_hold_is_said_by_the_rank_that_sees_it(broken: str, message: str):
    found = run_ranks(run_here, 2, broken)
    code, errors = found[1]
    assert code == 1
    assert f"accel-trainer test: {message}" in errors
    assert ("Traceback" in errors) == (broken == "code")


def test_it_starts_what_launch_would_and_two_processes_where_there_is_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    started: list[Job] = []
    monkeypatch.setattr(job, "run_job", lambda planned: started.append(planned) or 3)
    assert main(["test", "--cpu"]) == 3
    assert main(["test", "--cpu", "--num_processes", "1"]) == 3
    assert main(["test", "--cpu", "--strategy", "single"]) == 3
    assert [planned.num_local_processes for planned in started] == [2, 1, 1]
    assert all(planned.command[-2:] == ("-m", "accel_trainer.contrib.self_check") for planned in started)
    assert main(["test", "script.py"]) == 2
    assert "accel-trainer test has a script of its own and takes none" in capsys.readouterr().err
    assert main(["test", "--config_file", str(tmp_path / "none.yaml")]) == 2
    assert main(["test", "--help"]) == 0
    assert "usage: accel-trainer test [options as for launch]" in capsys.readouterr().out


def test_a_precision_that_the_device_does_not_have_fails_the_test(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ACCEL_TRAINER_USE_CPU", "true")
    monkeypatch.setenv("ACCEL_TRAINER_MIXED_PRECISION", "fp16")
    assert self_check.main() == 1
    assert (
        "rank 0 of 1: start failed: mixed_precision=fp16 (from ACCEL_TRAINER_MIXED_PRECISION): fp16"
        in capsys.readouterr().err
    )


def test_loaders_that_are_not_seedable_are_read_in_order_only(monkeypatch: pytest.MonkeyPatch):
    from accel_trainer import Accelerator

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=False))
    found = self_check.CHECKS["data loaders"](accelerator)
    assert found == "13 samples, in order, reach the ranks as 4 batches each"

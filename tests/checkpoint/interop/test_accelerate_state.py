"""load_state reads what Hugging Face accelerate and torch have written, and nothing of it runs (R15).

`fixtures/accelerate_1_15` was saved by save_state() of accelerate 1.15.0 in the run of `small_run.py`, after its first
epoch; the losses and random numbers below are those with which that run went on.
"""

from __future__ import annotations

import copy
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from accel_trainer import Accelerator, ProjectConfiguration
from accel_trainer.errors import CheckpointNotFoundError, IncompatibleCheckpointError
from tests.checkpoint.small_run import Counter, SmallRun
from tests.checkpoint.test_formats import FIXTURES, LOSSES_AFTER
from tests.ranks import preload, run_ranks

preload("accel_trainer.accelerator", "tests.checkpoint.small_run")

ACCELERATE = FIXTURES / "accelerate_1_15"
DRAWN_AFTER = [0.1852310299873352, 0.37341737747192383]


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A copy of the fixture, to be changed."""
    return shutil.copytree(ACCELERATE, tmp_path / "theirs")


def test_a_run_goes_on_as_it_would_have_with_accelerate(caplog: pytest.LogCaptureFixture):
    run = SmallRun(seed=1)
    with caplog.at_level(logging.INFO):
        run.accelerator.load_state(ACCELERATE)
    assert torch.rand(2).tolist() == DRAWN_AFTER
    assert run.counter.count == 2
    assert run.train() == pytest.approx(LOSSES_AFTER, abs=1e-6)
    assert "a state of Hugging Face accelerate; random streams restored; the position in the data" in caplog.text


def go_on(strategy: str, folder: str) -> list[float]:
    run = SmallRun(strategy, seed=1)
    run.accelerator.load_state(folder)
    return run.train()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_it_loads_on_several_ranks(strategy: str):
    for losses in run_ranks(go_on, 2, strategy, str(ACCELERATE)):
        assert losses == pytest.approx(LOSSES_AFTER, abs=1e-6)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "_orig_mod.module."])
def test_weights_under_the_names_of_wrappers_load(theirs: Path, wrapper: str):
    """accelerate's save_state unwraps no model: under DDP each name begins with `module.`."""
    file = theirs / "model.safetensors"
    save_file({f"{wrapper}{name}": value for name, value in load_file(file).items()}, file)
    assert go_on("single", str(theirs)) == pytest.approx(LOSSES_AFTER, abs=1e-6)


def test_a_module_of_that_name_is_no_wrapper(tmp_path: Path):
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(2, 2)

    saved, own, accelerator = Holder(), Holder(), Accelerator(cpu=True)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    shutil.copy(ACCELERATE / "random_states_0.pkl", tmp_path)
    accelerator.prepare(own)
    accelerator.load_state(tmp_path)
    torch.testing.assert_close(own.state_dict(), saved.state_dict())


def test_the_newest_of_a_project_may_be_theirs(tmp_path: Path):
    shutil.copytree(ACCELERATE, tmp_path / "checkpoints" / "checkpoint_0")
    configuration = ProjectConfiguration(project_dir=tmp_path, automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    model, *_ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.register_for_checkpointing(Counter())
    accelerator.load_state()
    state = torch.load(ACCELERATE / "optimizer.bin", weights_only=True)
    assert model[0].weight.std() > 0.1
    assert len(state["state"]) == 4
    assert accelerator.save_state().name == "checkpoint_1"


def save_shards(folder: str) -> list[float]:
    """Save as accelerate does under FSDP, with torch's own calls; and all in one directory, as torchtitan does."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    run = SmallRun("fsdp2")
    run.train()
    optimizer = get_optimizer_state_dict(run.model, run.optimizer.optimizer)
    root = Path(folder)
    dcp.save({"model": run.model.state_dict()}, checkpoint_id=root / "sharded" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer}, checkpoint_id=root / "sharded" / "optimizer_0")
    dcp.save({"model": run.model.state_dict(), "optimizer": optimizer}, checkpoint_id=root / "all")
    if run.accelerator.is_main_process:
        for name in ("random_states_0.pkl", "scheduler.bin", "custom_checkpoint_0.pkl"):
            shutil.copy(ACCELERATE / name, root / "sharded" / name)
    return run.train()


def test_shards_of_torch_load_on_one_process(tmp_path: Path):
    expected = run_ranks(save_shards, 2, str(tmp_path))[0]
    run = SmallRun(seed=1)
    run.accelerator.load_state(tmp_path / "sharded")
    assert run.train() == pytest.approx(expected, abs=1e-6)
    run = SmallRun(seed=1)
    run.accelerator.load_state(tmp_path / "all")
    assert run.counter.count == 0, "only models and optimizers are in it"
    assert run.train()[0] == pytest.approx(expected[0], abs=1e-6)


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("name", ["optimizer.bin", "scheduler.bin", "custom_checkpoint_0.pkl"])
def test_r15_a_file_that_runs_code_is_refused_before_it_runs(theirs: Path, tmp_path: Path, name: str):
    torch.save({"state": Evil(tmp_path / "marker")}, theirs / name)
    with pytest.raises(IncompatibleCheckpointError, match=rf"{name} holds more than tensors, numbers and strings"):
        SmallRun().accelerator.load_state(theirs)
    assert not (tmp_path / "marker").exists()


def test_r15_random_states_that_run_code_are_left_out_and_said(
    theirs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    torch.save({"random_state": Evil(tmp_path / "marker")}, theirs / "random_states_0.pkl")
    run = SmallRun(seed=1)
    with caplog.at_level(logging.WARNING):
        run.accelerator.load_state(theirs)
    assert "cannot be read, and this run's go on" in caplog.text
    assert not (tmp_path / "marker").exists()
    assert run.train() == pytest.approx(LOSSES_AFTER, abs=1e-6)


@pytest.mark.parametrize(
    ("gone", "error", "message"),
    [
        ("scheduler.bin", CheckpointNotFoundError, r"scheduler\.bin is missing: this run has something that"),
        ("optimizer.bin", CheckpointNotFoundError, r"optimizer\.bin is missing: this run has something that"),
        ("model.safetensors", CheckpointNotFoundError, "no weights in"),
        (
            "custom_checkpoint_0.pkl",
            IncompatibleCheckpointError,
            r"holds 0 registered object\(s\), and 1 are",
        ),
    ],
)
def test_what_is_missing_is_named(theirs: Path, gone: str, error: type, message: str):
    (theirs / gone).unlink()
    run = SmallRun()
    before = copy.deepcopy([thing.state_dict() for thing in (run.model, run.optimizer, run.schedule, run.counter)])
    with pytest.raises(error, match=message):
        run.accelerator.load_state(theirs)
    after = [thing.state_dict() for thing in (run.model, run.optimizer, run.schedule, run.counter)]
    torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_an_optimizer_of_other_groups_is_refused(theirs: Path):
    state = torch.load(theirs / "optimizer.bin", weights_only=True)
    state["param_groups"][0]["params"] = [0, 1]
    torch.save(state, theirs / "optimizer.bin")
    with pytest.raises(
        IncompatibleCheckpointError, match=r"was saved for parameter groups of \[2\] parameters, and this opt"
    ):
        SmallRun().accelerator.load_state(theirs)

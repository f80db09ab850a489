"""A Trainer goes on without a rank that was killed, in an update, an evaluation or a save."""

from __future__ import annotations

import itertools
import os
import signal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from accel_trainer.config.dialects.environment import RETURNS_VARIABLE
from accel_trainer.runtime.process import find_rank
from accel_trainer.strategies.ddp import DDPUnit
from tests.accelerator.test_lost_ranks import CONTINUE, REPLACE, wait_for_others, wait_for_return
from tests.cells import beyond, selected
from tests.fault_injection import fault_env
from tests.ranks import ask_jobs, preload, run_ranks

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")

pytestmark = pytest.mark.timeout(300)  # the first test waits for the runs that all look at


DDP: dict[str, Any] = {}
HSDP: dict[str, Any] = {
    "fsdp": "full_shard",
    "fsdp_config": {"transformer_layer_cls_to_wrap": ["Linear"]},
    "parallelism_config": {"dp_replicate_size": 2, "dp_shard_size": 2},
}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.register_buffer("moved", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.moved += 1
        output = self.body(x)
        return {"loss": (output - labels).square().mean(), "logits": output}


class Callbacks(TrainerCallback, ExportableState):
    """Counts updates, kills a rank at the end of one, and lets the others wait behind another for one that returns."""

    def __init__(self, killed: int, waits_at: int, kills_at: int) -> None:
        self.killed, self.waits_at, self.kills_at = killed, waits_at, kills_at
        self.num_updates = 0
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates += 1
        if state.global_step == self.kills_at and self.killed == find_rank() and RETURNS_VARIABLE not in os.environ:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self.waits_at:
            wait_for_return(self.trainer.accelerator, Path(args.output_dir), self.waits_at)

    def state(self) -> dict[str, Any]:
        return {"args": {"killed": self.killed}, "attributes": {"num_updates": self.num_updates}}


def train(
    folder: Path,
    killed: int = -1,
    num_steps: int = 1,
    resume: str | None = None,
    waits_at: int = 0,
    logs_at: int = 1,
    kills_at: int = 3,
    options: dict[str, Any] = DDP,
) -> Any:
    """Return the parameters, predictions of the evaluations, and the state's numbers."""
    from accel_trainer.trainer import Trainer, TrainingArguments

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(56, 4, generator=generator).double()
    rows = [{"x": each, "labels": each.sum().reshape(1)} for each in x]
    args = TrainingArguments(
        str(folder), use_cpu=True, report_to="none", disable_tqdm=True, num_train_epochs=2, learning_rate=0.01,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, gradient_accumulation_steps=num_steps,
        eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=4, logging_steps=logs_at,
        **options,
    )  # fmt: skip
    evaluations: list[list[float]] = []

    def compute_metrics(prediction: Any) -> dict[str, float]:
        evaluations.append(sorted(prediction.predictions.flatten().tolist()))
        return {}

    callbacks = Callbacks(killed, waits_at, kills_at)
    trainer = Trainer(
        Regression(), args, train_dataset=rows, eval_dataset=rows[:19], callbacks=[callbacks],
        compute_metrics=compute_metrics,
    )  # fmt: skip
    callbacks.trainer = trainer
    wait_for_others(folder)
    trainer.train(resume_from_checkpoint=resume)
    assert resume or callbacks.num_updates == trainer.state.global_step
    state = trainer.state
    losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
    values = {name: full(value.detach().clone()) for name, value in trainer.model.named_parameters()}
    facts = state.global_step, round(state.epoch, 6), trainer.lr_scheduler.last_epoch
    return values, evaluations, losses, facts, (trainer.args.world_size, state.is_world_process_zero)


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


PLACES = {
    "data": ("data.next", 5),
    "forward": ("train.forward", 3),
    "backward": ("train.backward", 3),
    "optimizer": ("train.opt", 3),
    "evaluation": ("eval.batch", 1),
    "gather": ("eval.gather", 1),
    "save": ("save.before_vote", None),
}


class Loss(NamedTuple):
    """A run on four ranks of which one is killed, at a place or behind an update."""

    rank: int
    place: str | None = None
    num_steps: int = 1
    options: dict[str, Any] = DDP
    failing: int = -1
    """A rank whose last exchange of update 3 fails when the others have had what it sent."""
    logs_at: int = 1
    waits_at: int = 0
    """The update behind which the others wait for one that returns."""
    kills_at: int = 3

    @property
    def gone(self) -> list[int]:
        """The rank, and with it the others of its replica."""
        return [0, 1] if self.options is HSDP else [self.rank]


SAMPLE = {
    "rank 2, data": Loss(2, "data"),
    "rank 2, evaluation": Loss(2, "evaluation"),
    "rank 0 behind a window": Loss(0, num_steps=2),
    "rank 1 behind the last update of an epoch": Loss(1, logs_at=100, kills_at=7),
    "a replica of shards, evaluation": Loss(1, "evaluation", options=HSDP),
    "a replica of shards, save": Loss(1, "save", options=HSDP),
    "a replica of shards, optimizer of a window": Loss(1, "optimizer", num_steps=2, options=HSDP),
    # A rank behind the others is given their update, while they log that, or train the next one.
    "rank 1 is behind while others log": Loss(2, failing=1),
    "rank 0 is behind while others train a window": Loss(2, num_steps=2, failing=0, logs_at=100),
    # In the middle of an epoch, and between two: one has 7 updates, or 4.
    "rank 0 returns within an epoch": Loss(0, waits_at=6),
    "rank 1 returns between two epochs": Loss(1, num_steps=2, waits_at=4),
    "a replica of shards returns": Loss(1, options=HSDP, waits_at=4),
}
# Among them the places at which tests/accelerator loses ranks, too.
LOSSES = SAMPLE | {
    **{f"rank 2, {place}": Loss(2, place) for place in PLACES},
    **{f"a replica of shards, {place}": Loss(1, place, options=HSDP) for place in PLACES},
    "rank 0 behind an update": Loss(0),
    "rank 0 is behind while others train": Loss(2, failing=0, logs_at=100),
    "rank 1 is behind while others train a window": Loss(2, num_steps=2, failing=1, logs_at=100),
    "rank 2 returns within an epoch": Loss(2, waits_at=4),
}
RESUMED = ("rank 0 behind a window", "a replica of shards, optimizer of a window")


def train_behind(folder: Path, failing: int, num_steps: int, **options: Any) -> Any:
    backward, calls = DDPUnit.backward, itertools.count(1)

    def fail_once(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if next(calls) == 3 * num_steps and find_rank() == failing:
            raise RuntimeError("gloo: Connection closed by peer")

    DDPUnit.backward = fail_once  # type: ignore[method-assign]
    return train(folder, num_steps=num_steps, **options)


def lose(loss: Loss, folder: Path) -> list[Any]:
    env, killed = REPLACE if loss.waits_at else CONTINUE, loss.rank
    if loss.place is not None:
        point, step = PLACES[loss.place]
        killed, fault = -1, f"kill9@{point}:rank={loss.rank}"
        env = env | fault_env(fault if step is None else f"{fault}:step={step}")
    return run_ranks(
        train_behind, 4, folder, loss.failing, loss.num_steps, killed=killed, options=loss.options, env=env,
        logs_at=loss.logs_at, waits_at=loss.waits_at, kills_at=loss.kills_at, outlives=True,
        replaces=int(loss.waits_at > 0), timeout=90,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Runs that lose a rank, by name: while ranks of one ask who is gone, those of another compute."""
    folder = tmp_path_factory.mktemp("lost")
    tests = (
        test_updates_and_evaluations_are_those_of_the_run_without_a_loss,
        test_a_checkpoint_of_those_left_goes_on_with_all,
    )
    names = {name: None for test in tests for (name,) in selected(request, test.__name__)}
    return folder, ask_jobs(lambda name: lose(LOSSES[name], folder / name), names, at_once=2)


@cache
def undisturbed(folder: Path, num_steps: int) -> Any:
    """The run without a loss, under DDP."""
    return run_ranks(train, 4, folder / f"undisturbed-{num_steps}", num_steps=num_steps)[0]


@pytest.mark.parametrize("name", [name if name in SAMPLE else beyond(name) for name in LOSSES])
def test_updates_and_evaluations_are_those_of_the_run_without_a_loss(name: str, runs: tuple[Path, Any]) -> None:
    loss, (folder, ask) = LOSSES[name], runs
    values, evaluations, losses, facts, _ = undisturbed(folder, loss.num_steps)
    left = [rank for rank in range(4) if rank not in loss.gone] + (loss.gone if loss.waits_at else [])
    results = ask(name)
    for number, rank in enumerate(left):
        found = results[rank]
        assert found[4] == (len(left), number == 0)
        assert found[3] == facts
        for parameter, value in values.items():
            assert (found[0][parameter] - value).abs().max() < 1e-6, parameter
        num_missed = len(evaluations) - len(found[1])
        assert bool(num_missed) == (rank in loss.gone)
        for own, expected in zip(found[1], evaluations[num_missed:], strict=True):
            assert own == pytest.approx(expected, abs=1e-6)
        assert not found[2] or found[2][-3:] == pytest.approx(losses[-3:], abs=1e-4)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_of_those_left_goes_on_with_all(name: str, runs: tuple[Path, Any]) -> None:
    """Also in an epoch whose updates have more micro-batches by then."""
    loss, (folder, ask) = LOSSES[name], runs
    ask(name)
    checkpoint = str(folder / name / "checkpoint-4")
    results = run_ranks(
        train, 4, folder / name, num_steps=loss.num_steps, resume=checkpoint, options=loss.options, timeout=80
    )
    values, _, _, facts, _ = undisturbed(folder, loss.num_steps)
    assert results[0][3] == facts
    for parameter, value in values.items():
        assert (results[0][0][parameter] - value).abs().max() < 1e-6, parameter

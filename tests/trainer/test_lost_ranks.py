"""A Trainer goes on without a rank that was killed, in an update, an evaluation or a save."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

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
from tests.cells import beyond
from tests.fault_injection import fault_env
from tests.ranks import preload, run_ranks

preload("accel_trainer.trainer", "accel_trainer.accelerator", "transformers")


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

    def __init__(self, killed: int, waits_at: int) -> None:
        self.killed, self.waits_at = killed, waits_at
        self.num_updates = 0
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_updates += 1
        if state.global_step == 3 and self.killed == find_rank() and RETURNS_VARIABLE not in os.environ:
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

    callbacks = Callbacks(killed, waits_at)
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


@cache
def undisturbed(folder: Path, num_steps: int) -> Any:
    return run_ranks(train, 4, folder / "undisturbed", num_steps=num_steps)[0]


def check(
    folder: Path, rank: int, results: list[Any], num_steps: int, *, num_returned: int = 0, left: Sequence[int] = ()
) -> None:
    values, evaluations, losses, facts, _ = undisturbed(folder.parent, num_steps)
    left = left or [each for each in range(4) if each != rank] + [rank] * num_returned
    for number, each in enumerate(left):
        found = results[each]
        assert found[4] == (len(left), number == 0)
        assert found[3] == facts
        for name, value in values.items():
            assert (found[0][name] - value).abs().max() < 1e-6, name
        num_missed = len(evaluations) - len(found[1])
        assert bool(num_missed) == (each in left[len(left) - num_returned :])
        for own, expected in zip(found[1], evaluations[num_missed:], strict=True):
            assert own == pytest.approx(expected, abs=1e-6)
        assert not found[2] or found[2][-3:] == pytest.approx(losses[-3:], abs=1e-4)


PLACES = {
    "data": ("data.next", 5),
    "forward": ("train.forward", 3),
    "backward": ("train.backward", 3),
    "optimizer": ("train.opt", 3),
    "evaluation": ("eval.batch", 1),
    "gather": ("eval.gather", 1),
    "save": ("save.before_vote", None),
}


# Beyond the samples what tests/accelerator loses ranks at, too.
@pytest.mark.parametrize("place", [name if name in ("data", "evaluation") else beyond(name) for name in PLACES])
def test_updates_and_evaluations_are_those_of_the_run_without_a_loss(place: str, tmp_path: Path) -> None:
    point, step = PLACES[place]
    faults = fault_env(f"kill9@{point}:rank=2" + (f":step={step}" if step is not None else ""))
    results = run_ranks(train, 4, tmp_path, env=CONTINUE | faults, outlives=True, timeout=80)
    check(tmp_path, 2, results, 1)


@pytest.mark.parametrize(
    "place", [name if name in ("optimizer", "evaluation", "save") else beyond(name) for name in PLACES]
)
def test_replicas_of_shards_go_on_without_the_one_that_has_lost_a_rank(place: str, tmp_path: Path) -> None:
    """The run without a loss is one of DDP."""
    point, step = PLACES[place]
    faults = fault_env(f"kill9@{point}:rank=1" + (f":step={step}" if step is not None else ""))
    results = run_ranks(train, 4, tmp_path, options=HSDP, env=CONTINUE | faults, outlives=True, timeout=80)
    check(tmp_path, 1, results, 1, left=[2, 3])


@pytest.mark.parametrize("num_steps", [beyond(1), 2])
def test_rank_0_is_lost_at_the_end_of_an_update(num_steps: int, tmp_path: Path) -> None:
    results = run_ranks(train, 4, tmp_path, 0, num_steps, env=CONTINUE, outlives=True, timeout=80)
    check(tmp_path, 0, results, num_steps)


@pytest.mark.parametrize("options", [DDP, HSDP], ids=["ranks", "replicas of shards"])
def test_a_checkpoint_of_those_left_goes_on_with_all(options: dict[str, Any], tmp_path: Path) -> None:
    """Also in an epoch whose updates have more micro-batches by then."""
    run_ranks(train, 4, tmp_path, 1, 2, options=options, env=CONTINUE, outlives=True, timeout=80)
    results = run_ranks(train, 4, tmp_path, -1, 2, str(tmp_path / "checkpoint-4"), options=options, timeout=80)
    values, _, _, facts, _ = undisturbed(tmp_path.parent, 2)
    assert results[0][3] == facts
    for name, value in values.items():
        assert (results[0][0][name] - value).abs().max() < 1e-6, name


def train_behind(folder: Path, failing: int, num_steps: int, logs_at: int) -> Any:
    """Train; on a rank the last exchange of update 3 fails when the others have had what it sent."""
    backward, calls = DDPUnit.backward, itertools.count(1)

    def fail_once(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if next(calls) == 3 * num_steps and find_rank() == failing:
            raise RuntimeError("gloo: Connection closed by peer")

    DDPUnit.backward = fail_once  # type: ignore[method-assign]
    return train(folder, 2, num_steps, logs_at=logs_at)


@pytest.mark.parametrize(
    ("failing", "num_steps", "logs_at"), [(1, 1, 1), (0, 2, 100), beyond((0, 1, 100)), beyond((1, 2, 100))]
)
def test_a_rank_behind_the_others_is_given_their_update(
    failing: int, num_steps: int, logs_at: int, tmp_path: Path
) -> None:
    """While the others log that update, or train the next one."""
    results = run_ranks(train_behind, 4, tmp_path, failing, num_steps, logs_at, env=CONTINUE, outlives=True, timeout=80)
    check(tmp_path, 2, results, num_steps)


@pytest.mark.parametrize(("rank", "num_steps", "waits_at"), [beyond((2, 1, 4)), (0, 1, 6), (1, 2, 4)])
def test_a_rank_returns_between_two_updates(rank: int, num_steps: int, waits_at: int, tmp_path: Path) -> None:
    """In the middle of an epoch, and between two: one has 7 updates, or 4."""
    results = run_ranks(train, 4, tmp_path, rank, num_steps, env=REPLACE, replaces=1, timeout=90, waits_at=waits_at)
    check(tmp_path, rank, results, num_steps, num_returned=1)


def test_a_replica_of_shards_returns_between_two_updates(tmp_path: Path) -> None:
    results = run_ranks(train, 4, tmp_path, 1, options=HSDP, env=REPLACE, replaces=1, timeout=90, waits_at=4)
    check(tmp_path, 1, results, 1, num_returned=2, left=[2, 3, 0, 1])

"""A subclass of transformers.Trainer from elsewhere, put on accel_trainer by naming ours after it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from accel_trainer import Accelerator, Trainer, TrainingArguments
from accel_trainer.errors import ConfigError
from tests.cells import beyond
from tests.trainer_jobs import TokenDataset, arguments, build_model, on_ranks, strategy_arguments, summary, train

pytestmark = pytest.mark.beside_accelerate


@dataclass
class ScaledConfig(transformers.TrainingArguments):
    """Arguments of another library, with a field of its own."""

    loss_factor: float = 1.0
    adam_beta1: float = 0.7

    def __post_init__(self) -> None:
        self.loss_factor *= 2
        super().__post_init__()


class ScaledTrainer(transformers.Trainer):
    """A Trainer of another library: arguments before `args`, a step, a loss and a log line of its own."""

    def __init__(
        self, model: Any, teacher: Any = None, args: ScaledConfig | None = None, *, tag: str = "scaled", **kwargs: Any
    ) -> None:
        super().__init__(model=model, args=args, **kwargs)
        self.teacher = teacher
        self.tag = tag
        self.num_steps = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.num_steps += 1
        return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return self.args.loss_factor * super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, f"{self.tag}_processes": float(self.accelerator.num_processes)}, *args, **kwargs)


@dataclass
class ScaledArguments(ScaledConfig, TrainingArguments):
    """The arguments of that library on accel_trainer."""


class ScaledOnOurs(ScaledTrainer, Trainer):
    """The Trainer of that library on accel_trainer."""


OPTIONS: dict[str, Any] = {
    "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "max_steps": 4,
    "per_device_train_batch_size": 4, "optim": "sgd", "max_grad_norm": 0.0,
}  # fmt: skip


def run_scaled(output_dir: str, strategy: str) -> dict[str, Any]:
    args = ScaledArguments(
        output_dir=output_dir, loss_factor=1.0, learning_rate=0.05, save_strategy="steps", save_steps=2,
        **OPTIONS, **strategy_arguments(strategy),
    )  # fmt: skip
    trainer = ScaledOnOurs(build_model(), "teacher", args, tag="ours", train_dataset=TokenDataset(32))
    trainer.train()
    return {
        **summary(trainer),
        "is_ours": isinstance(trainer.accelerator, Accelerator),
        "own": (trainer.teacher, trainer.num_steps, args.adam_beta1),
        "tags": [entry["ours_processes"] for entry in trainer.state.log_history if "loss" in entry],
    }


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["single", beyond("ddp"), "fsdp"])
def test_a_trainer_of_another_library_runs_on_ours_with_its_own_overrides(tmp_path, strategy):
    scaled = on_ranks(strategy, run_scaled, str(tmp_path / "scaled"))
    plain = on_ranks(strategy, train, str(tmp_path / "plain"), learning_rate=0.1, **OPTIONS)

    for ours, reference in zip(scaled, plain, strict=True):
        assert ours["is_ours"]
        assert ours["own"] == ("teacher", 4, 0.7)
        assert ours["tags"] == [float(len(scaled))] * 4
        assert ours["losses"] == pytest.approx([2 * loss for loss in reference["losses"]], rel=1e-4)
        for name, value in reference["weights"].items():
            np.testing.assert_allclose(ours["weights"][name], value, rtol=1e-4, atol=1e-6)
    assert (tmp_path / "scaled" / "checkpoint-4" / "manifest.json").is_file()


class ModularTrainer(transformers.Trainer):
    """A Trainer of another library that saves its model's parts one by one, and loads them into another model."""

    def _save(self, output_dir: str, state_dict: Any = None) -> None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        for name, part in self.model.named_children():
            torch.save(part.state_dict(), Path(output_dir, f"{name}.bin"))

    def _load_from_checkpoint(self, checkpoint_path: str) -> None:
        other = self.model.__class__(self.model.config)
        for name, part in other.named_children():
            part.load_state_dict(torch.load(Path(checkpoint_path, f"{name}.bin")))
        self.model.load_state_dict(other.state_dict())

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class ModularOnOurs(ModularTrainer, Trainer):
    """The Trainer of that library on accel_trainer."""


def run_modular(output_dir: str, strategy: str) -> list[dict[str, Any]]:
    """Train four updates, and once more from the second; load the best model, which is an earlier one, at the end."""
    runs = []
    for checkpoint in (None, str(Path(output_dir, "checkpoint-2"))):
        args = arguments(
            output_dir, max_steps=4, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2,
            load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True,
            **strategy_arguments(strategy),
        )  # fmt: skip
        data = TokenDataset(32)
        trainer = ModularOnOurs(build_model(), args, train_dataset=data, eval_dataset=data)
        trainer.train(resume_from_checkpoint=checkpoint)
        runs.append(summary(trainer))
    return runs


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_trainer_that_saves_and_loads_by_itself_resumes(tmp_path, strategy):
    for whole, resumed in on_ranks(strategy, run_modular, str(tmp_path)):
        assert resumed["losses"] == whole["losses"]
        assert resumed["eval_losses"] == whole["eval_losses"]
        assert whole["eval_losses"][0] > whole["eval_losses"][1]
        assert whole["best"].endswith("checkpoint-2")
        if whole["weights"]:  # on rank 0; those of the best model, in which it was saved
            best = torch.load(tmp_path / "checkpoint-2" / "lm_head.bin")["weight"]
            np.testing.assert_array_equal(whole["weights"]["lm_head.weight"], best.numpy())
            np.testing.assert_array_equal(resumed["weights"]["lm_head.weight"], best.numpy())


def test_arguments_of_the_library_alone_are_refused_with_the_class_to_build():
    stock = ScaledConfig.__new__(ScaledConfig)  # __init__ would need accelerate
    with pytest.raises(ConfigError, match=r"class Arguments\(ScaledConfig, accel_trainer.TrainingArguments\)"):
        ScaledOnOurs(build_model(), args=stock)


def test_a_class_of_ours_named_before_that_of_the_library_is_refused():
    with pytest.raises(ConfigError, match=r"log, training_step would be called in the place of its own; name it first"):
        type("Wrong", (Trainer, ScaledTrainer), {})
    with pytest.raises(ConfigError, match=r"adam_beta1, __post_init__ would come before its own; name it first"):
        type("Wrong", (TrainingArguments, ScaledConfig), {})


OWN_FIELDS = """
@dataclass
class Config(transformers.TrainingArguments):
    adam_beta1: float = 0.7

@dataclass
class Own(TrainingArguments, Config):
    adam_beta1: float = 0.6
    later: {} = None
"""


def test_a_field_that_the_class_sets_itself_is_not_lost():
    """As in a script without `from __future__ import annotations`: from Python 3.14 on these are computed later."""
    source = OWN_FIELDS.format("Later" if sys.version_info >= (3, 14) else "'Later'")
    names = {**globals()}
    exec(compile(source, "own.py", "exec", dont_inherit=True), names)
    assert {item.name: item.default for item in fields(names["Own"])}["adam_beta1"] == 0.6

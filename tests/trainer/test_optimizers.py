"""Optimizers and schedules of one's own, by every way that transformers has for them, alike under every strategy."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from accel_trainer.errors import ConfigError, IncompatibleCheckpointError
from accel_trainer.trainer import Trainer
from tests.cells import crossed, selected
from tests.ranks import preload, run_ranks
from tests.strategy_configs import HAS_DEEPSPEED, needs_deepspeed
from tests.trainer_jobs import TokenDataset, arguments, build_model, strategy_arguments, weights_of

STRATEGIES = ["ddp", "fsdp", *(("zero3",) if HAS_DEEPSPEED else ())]
if HAS_DEEPSPEED:
    preload("deepspeed")


def layer_rates(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Groups with a learning rate for each layer, the deepest one's the largest."""
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        depth = int(name.split(".layers.")[1].split(".")[0]) + 1 if ".layers." in name else 3 * ("head" in name)
        groups.setdefault(2e-2 * 0.5 ** (3 - depth), []).append(parameter)
    return [{"params": parameters, "lr": rate} for rate, parameters in sorted(groups.items())]


def fading(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.7**step)


class WithoutArguments(Trainer):
    def create_optimizer(self) -> Any:
        if self.optimizer is None:
            self.optimizer = AdamW(layer_rates(self.model))
        return self.optimizer


class WithModel(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            self.optimizer = AdamW(layer_rates(self.model if model is None else model))
        return self.optimizer


class Rescheduled(Trainer):
    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if self.lr_scheduler is None:
            assert num_training_steps == self.state.max_steps
            self.lr_scheduler = fading(optimizer or self.optimizer)
            self._created_lr_scheduler = True
        return self.lr_scheduler


class Both(Trainer):
    """As upstream's documentation and its errors say; its own releases from 5.0 on never call this method."""

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        assert num_training_steps == self.state.max_steps
        if self.optimizer is None:
            self.optimizer = AdamW(layer_rates(self.model))
        self.lr_scheduler = fading(self.optimizer)


class OtherClass(Trainer):
    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> Any:
        assert model is not None
        return AdamW, {"lr": 2e-2, "betas": (0.8, 0.9)}

    def get_decay_parameter_names(self, model: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if "mlp" in name]


WAYS: dict[str, Any] = {
    "create_optimizer(self)": WithoutArguments,
    "create_optimizer(self, model)": WithModel,
    "create_scheduler": Rescheduled,
    "create_optimizer_and_scheduler": Both,
    "get_optimizer_cls_and_kwargs": OtherClass,
    "optimizer_cls_and_kwargs": lambda: {"optimizer_cls_and_kwargs": (AdamW, {"lr": 2e-2, "betas": (0.8, 0.9)})},
    "optimizers": lambda model: {"optimizers": (AdamW(layer_rates(model)), None)},
    "optimizers and schedule": lambda model: {"optimizers": given_both(model)},
}


def given_both(model: torch.nn.Module) -> Any:
    optimizer = AdamW(layer_rates(model))
    return optimizer, fading(optimizer)


def build(output_dir: str, way: str, strategy: str, **changes: Any) -> Trainer:
    changes |= strategy_arguments(strategy)
    ranks = 1 if strategy == "single" else 2
    args = arguments(output_dir, per_device_train_batch_size=4 // ranks, weight_decay=0.1, **changes)
    model = build_model()
    make = WAYS[way]
    kind = make if isinstance(make, type) else Trainer
    options = {} if isinstance(make, type) else make(model) if make.__code__.co_argcount else make()
    return kind(model, args, train_dataset=TokenDataset(16, uneven=True), **options)


def run(output_dir: str, way: str, strategy: str) -> dict[str, Any]:
    """Train twice; the second time with the optimizer's state of the first."""
    trainer = build(output_dir, way, strategy)
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        trainer.train()
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        found |= {f"{name} {key}": [entry[key] for entry in history] for key in ("loss", "learning_rate")}
    return {**found, "weights": weights_of(trainer)}


def run_all(output_dir: str, cells: list[tuple[str, str]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(strategy, way): run(output_dir, way, strategy) for strategy, way in cells}


@pytest.fixture(scope="module")
def on_two(request, tmp_path_factory) -> dict[tuple[str, str], dict[str, Any]]:
    cells = selected(request, "test_every_strategy_trains_with_the_optimizer_and_the_schedule_of_ones_own")
    return run_ranks(run_all, 2, str(tmp_path_factory.mktemp("two")), cells, timeout=200)[0]


@pytest.fixture(scope="module")
def on_one(tmp_path_factory) -> dict[str, dict[str, Any]]:
    return {way: run(str(tmp_path_factory.mktemp("one")), way, "single") for way in WAYS}


@pytest.mark.multirank
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("strategy", "way"), crossed(STRATEGIES, WAYS))
def test_every_strategy_trains_with_the_optimizer_and_the_schedule_of_ones_own(on_one, on_two, strategy, way):
    one, two = on_one[way], on_two[strategy, way]

    for name in ("first loss", "second loss"):
        np.testing.assert_allclose(two[name], one[name], rtol=2e-5)
    for name in ("first learning_rate", "second learning_rate"):
        assert two[name] == pytest.approx(one[name])
    for name, weights in one["weights"].items():
        np.testing.assert_allclose(two["weights"][name], weights, atol=2e-5, err_msg=name)


def test_a_schedule_made_together_with_the_optimizer_is_the_one_that_steps(on_one):
    fading_rates = [2e-2 * 0.5**3 * 0.7**step for step in range(4)]
    for name in ("first learning_rate", "second learning_rate"):
        assert on_one["create_optimizer_and_scheduler"][name] == pytest.approx(fading_rates)
    assert on_one["create_scheduler"]["second learning_rate"] == pytest.approx([1e-2 * 0.7**step for step in range(4)])


class Forgetful(Trainer):
    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        AdamW(self.model.parameters())


class Returning(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        return AdamW(self.model.parameters())


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Forgetful, r"create_optimizer_and_scheduler\(\) of Forgetful left self.optimizer at None; set it to"),
        (Returning, r"create_optimizer\(\) of Returning left self.optimizer at None; set it to the optimizer to"),
    ],
)
def test_a_method_that_makes_no_optimizer_is_named(tmp_path, monkeypatch, made, message):
    monkeypatch.setitem(WAYS, "none", made)
    with pytest.raises(ConfigError, match=message):
        build(str(tmp_path), "none", "single").train()


def refused(output_dir: str) -> None:
    model = build_model()
    optimizer = AdamW(model.parameters())
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    args = arguments(output_dir, **strategy_arguments("fsdp"))
    trainer = Trainer(model, args, train_dataset=TokenDataset(16), optimizers=(optimizer, None))
    with pytest.raises(ConfigError, match=r"AdamW already holds state for 2\d parameter.*build the optimizer after"):
        trainer.train()


@pytest.mark.multirank
def test_an_optimizer_of_unsharded_parameters_that_has_stepped_is_refused(tmp_path):
    run_ranks(refused, 2, str(tmp_path))


def replaced(output_dir: str) -> list[str]:
    seen: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logging.getLogger("accel_trainer").addHandler(handler)
    described = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
    }
    args = arguments(output_dir, deepspeed=described, max_steps=1)
    WithoutArguments(build_model(), args, train_dataset=TokenDataset(16)).train()
    return [message for message in seen if "is not called" in message]


@pytest.mark.multirank
@needs_deepspeed
def test_a_method_that_the_engines_configuration_replaces_is_named(tmp_path):
    [seen, _] = run_ranks(replaced, 2, str(tmp_path))
    [message] = seen
    assert message.startswith("create_optimizer() of WithoutArguments is not called: the engine's configuration")


class Grouped(Trainer):
    """Has the parameters at some rates: the last two alone, if there are two rates; and groups without any."""

    rates: tuple[float, ...] = (1e-2,)
    num_empty = 0

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            held = list(self.model.parameters())
            parts = [held] if len(self.rates) == 1 else [held[:-2], held[-2:]]
            groups = [{"params": part, "lr": rate} for part, rate in zip(parts, self.rates, strict=True)]
            self.optimizer = AdamW(groups + [{"params": [], "lr": 1e-2} for _ in range(self.num_empty)])
        return self.optimizer


def grouped(output_dir: Any, rates: tuple[float, ...], num_empty: int, **changes: Any) -> list[tuple[float, float]]:
    """Train on one process or shards on two, and return losses and learning rates."""
    made = type("Grouped", (Grouped,), {"rates": rates, "num_empty": num_empty})
    resume = changes.pop("resume", None)
    args = arguments(output_dir, max_steps=8, save_strategy="steps", save_steps=4, **changes)
    trainer = made(build_model(), args, train_dataset=TokenDataset(32))
    trainer.train(resume_from_checkpoint=resume)
    return [(entry["loss"], entry["learning_rate"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.multirank
@pytest.mark.parametrize("rates", [(1e-2,), (1e-2, 3e-3)])
def test_groups_without_parameters_may_differ_from_those_of_a_checkpoint_of_shards(tmp_path, rates):
    sharded = {**strategy_arguments("fsdp"), "per_device_train_batch_size": 2}
    whole, _ = run_ranks(grouped, 2, str(tmp_path / "whole"), rates, 0, **sharded)
    found = grouped(tmp_path / "resumed", rates, 2, resume=str(tmp_path / "whole" / "checkpoint-4"))
    np.testing.assert_allclose(found, whole, rtol=2e-6)


@pytest.mark.multirank
def test_a_schedule_of_groups_that_are_not_known_from_each_other_is_refused(tmp_path):
    sharded = {**strategy_arguments("fsdp"), "per_device_train_batch_size": 2}
    run_ranks(grouped, 2, str(tmp_path / "whole"), (3e-3,), 1, **sharded)
    message = r"saved for 2 parameter groups with rates \[0.003, 0.01\], and this optimizer has 1, 1 of them with param"
    with pytest.raises(IncompatibleCheckpointError, match=message):
        grouped(tmp_path / "other", (3e-3,), 0, resume=str(tmp_path / "whole" / "checkpoint-4"))


def test_a_plain_state_of_other_groups_is_refused_with_its_path(tmp_path):
    grouped(tmp_path / "whole", (1e-2, 3e-3), 0)
    message = (
        r"checkpoint-4 does not fit this run's, whose parameter groups have \[\d+\] parameters: .*pass the directory"
    )
    with pytest.raises(IncompatibleCheckpointError, match=message):
        grouped(tmp_path / "resumed", (1e-2,), 0, resume=str(tmp_path / "whole" / "checkpoint-4"))

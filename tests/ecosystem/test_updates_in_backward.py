"""Optimizers that update in the backward train as with transformers' own Trainer, on one process."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from accel_trainer.errors import ConfigError, NonFiniteError
from tests.trainer.test_optimizer_names import MODULES, TABLE, options
from tests.trainer_jobs import TokenDataset, arguments, build_model, build_trainer, summary, weights_of

HERE = [
    row.name
    for row in TABLE.values()
    if row.one == "one process" and importlib.util.find_spec(MODULES[row.package]) is not None
]
pytestmark = [
    pytest.mark.skipif(not HERE, reason="no package of such optimizers is installed"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
RUN: dict[str, Any] = {"per_device_train_batch_size": 4, "lr_scheduler_type": "linear", "warmup_steps": 2}


def run_stock(folder: Path, name: str, **changes: Any) -> dict[str, Any]:
    args = arguments(folder, **{**options(name), **RUN, **changes})
    names = {field.name for field in dataclasses.fields(transformers.TrainingArguments)} - {"fsdp_config"}
    stock = transformers.TrainingArguments(**{key: value for key, value in args.to_dict().items() if key in names})
    trainer = transformers.Trainer(build_model(), stock, train_dataset=TokenDataset(32))
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    return {**summary_of(trainer), "rates": rates, "weights": weights(trainer.model)}


def summary_of(trainer: Any) -> dict[str, Any]:
    return {"losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]}


def weights(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.detach().clone().numpy() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", HERE)
def test_losses_rates_and_weights_are_those_of_the_stock_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # accelerate sets it and leaves it
    stock = run_stock(tmp_path, name, max_steps=6)
    with caplog.at_level(logging.WARNING):
        trainer = build_trainer(tmp_path, **{**options(name), **RUN, "max_steps": 6})
    assert "gradients are not clipped to max_grad_norm=1, the default, and no grad_norm is logged" in caplog.text
    trainer.train()
    found = summary(trainer)
    assert found["losses"] == pytest.approx(stock["losses"], rel=1e-6)
    assert found["grad_norms"] == []
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx(stock["rates"])
    own, begun = weights_of(trainer), weights(build_model())
    assert any(np.abs(own[name] - begun[name]).max() > 1e-3 for name in own)
    for parameter, expected in stock["weights"].items():
        np.testing.assert_allclose(own[parameter], expected, rtol=1e-5, atol=1e-6, err_msg=parameter)


@pytest.mark.parametrize("name", HERE)
def test_another_optimizer_for_the_same_model_is_refused(tmp_path: Path, name: str) -> None:
    trainer = build_trainer(tmp_path, **{**options(name), "max_grad_norm": 0.0})
    trainer.train()
    losses = summary(trainer)["losses"]
    trainer.train()  # goes on with the same one
    assert summary(trainer)["losses"][-1] < losses[-1]
    trainer.args.learning_rate = 0.5
    with pytest.raises(ConfigError, match="updates the parameters of this LlamaForCausalLM in the backward, by hooks"):
        trainer.train()
    other = type(trainer)(trainer.model, arguments(tmp_path, max_steps=1), train_dataset=TokenDataset(8))
    with pytest.raises(ConfigError, match="leave another one no gradients; build the model anew"):
        other.train()


@pytest.mark.parametrize("name", HERE)
def test_a_loss_that_is_nan_ends_the_run(tmp_path: Path, name: str) -> None:
    def spoil(module: torch.nn.Module, args: Any, output: Any) -> Any:
        output.loss = output.loss * torch.nan
        return output

    trainer = build_trainer(tmp_path, **{**options(name), "max_grad_norm": 0.0})
    trainer.model.register_forward_hook(spoil)
    # GaLore's projection ends before the look at the loss.
    ends, words = (
        (torch.linalg.LinAlgError, "non-finite") if "galore" in name else (NonFiniteError, "update 1: the norm")
    )
    with pytest.raises(ends, match=words):
        trainer.train()


@pytest.mark.skipif("lomo" not in HERE, reason="lomo-optim is not installed")
def test_lomo_resumes_exactly(tmp_path: Path) -> None:
    changes = {
        **options("lomo"),
        **RUN,
        "max_steps": 6,
        "max_grad_norm": 0.0,
        "save_strategy": "steps",
        "save_steps": 3,
    }
    whole = build_trainer(tmp_path / "a", **changes)
    whole.train()
    again = build_trainer(tmp_path / "b", **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert summary(again)["losses"] == summary(whole)["losses"]
    for name, value in weights_of(whole).items():
        np.testing.assert_array_equal(weights_of(again)[name], value)

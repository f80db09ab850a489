"""A user's code under `mypy --strict`: the installed package brings its types, and they are these."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch

import accel_trainer
from accel_trainer import Accelerator, PartialState, Trainer, TrainingArguments, notebook_launcher, set_seed
from accel_trainer.errors import AccelTrainerError, ConfigError
from accel_trainer.utils import ProjectConfiguration

assert_type(accel_trainer.__version__, str)


def train(folder: Path, model: torch.nn.Module) -> None:
    set_seed(1)
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=str(folder)))
    assert_type(accelerator.num_processes, int)
    assert_type(accelerator.device, torch.device)
    assert_type(accelerator.is_main_process, bool)
    prepared = accelerator.prepare_model(model)
    assert_type(prepared, torch.nn.Module)
    accelerator.backward(torch.zeros((), requires_grad=True))
    assert_type(PartialState().process_index, int)


def fit(model: torch.nn.Module) -> Trainer:
    return Trainer(model=model, args=TrainingArguments(output_dir="run"))


def refuse() -> None:
    try:
        notebook_launcher(fit, num_processes=1)
    except ConfigError as error:
        found: AccelTrainerError = error
        raise SystemExit(str(found)) from error

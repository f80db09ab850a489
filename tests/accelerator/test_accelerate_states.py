"""A script in which the name of Hugging Face accelerate stands for this package trains as any other."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

import accel_trainer
from tests.trainer_jobs import arguments, build_trainer


def test_a_run_is_the_same_where_the_name_of_accelerate_stands_for_this_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    ours = importlib.import_module("accel_trainer.state")
    monkeypatch.setitem(sys.modules, "accelerate", accel_trainer)
    monkeypatch.setitem(sys.modules, "accelerate.state", ours)
    arguments(str(tmp_path))
    state = ours.PartialState()
    trainer = build_trainer(str(tmp_path), bf16=True)

    assert (state.process, state.num_processes, state.device.type) == (trainer.accelerator.process, 1, "cpu")
    assert (ours.PartialState().process, ours.AcceleratorState().mixed_precision) == (state.process, "bf16")
    trainer.train()
    assert trainer.state.global_step == trainer.state.max_steps > 0

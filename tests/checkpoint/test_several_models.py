"""A state that does not fit one of several models changes none of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accel_trainer import Accelerator
from accel_trainer.errors import IncompatibleCheckpointError


def prepared(widths: Sequence[int], optimizers: Sequence[type[torch.optim.Optimizer]]) -> tuple[Accelerator, list[Any]]:
    """Return models with a trained optimizer each."""
    accelerator = Accelerator(cpu=True)
    models = [nn.Linear(width, width) for width in widths]
    made = [kind(m.parameters(), lr=0.1) for kind, m in zip(optimizers, models, strict=True)]
    things: list[Any] = list(accelerator.prepare(*models, *made))
    for model, optimizer, width in zip(things[: len(widths)], things[len(widths) :], widths, strict=True):
        accelerator.backward(model(torch.ones(1, width)).sum())
        optimizer.step()
    return accelerator, things


def test_what_does_not_fit_the_second_model_leaves_the_first_as_it_was(tmp_path: Path):
    accelerator, _ = prepared([2, 3], [torch.optim.AdamW] * 2)
    accelerator.save_state(tmp_path / "s")
    accelerator, things = prepared([2, 4], [torch.optim.AdamW] * 2)
    before = [copy.deepcopy(thing.state_dict()) for thing in things]
    with pytest.raises(IncompatibleCheckpointError, match=r"weight is \(3, 3\) in the checkpoint and \(4, 4\)"):
        accelerator.load_state(tmp_path / "s")
    torch.testing.assert_close([thing.state_dict() for thing in things], before, rtol=0, atol=0)


def test_a_state_that_fits_all_models_reaches_all_of_them(tmp_path: Path):
    accelerator, things = prepared([2, 3], [torch.optim.AdamW, torch.optim.Adagrad])
    saved = [copy.deepcopy(thing.state_dict()) for thing in things]
    accelerator.save_state(tmp_path / "s")
    accelerator, things = prepared([2, 3], [torch.optim.AdamW, torch.optim.Adagrad])
    accelerator.load_state(tmp_path / "s")
    torch.testing.assert_close([thing.state_dict() for thing in things], saved, rtol=0, atol=0)

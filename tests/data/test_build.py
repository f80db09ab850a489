"""Options that a loader cannot honour are refused when it is prepared."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from accel_trainer import Accelerator, DataLoaderConfiguration
from accel_trainer.errors import ConfigError


def test_a_stateful_loader_is_refused_and_the_way_to_resume_is_named():
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    with pytest.raises(
        ConfigError, match=r"use_stateful_dataloader=True is not offered.*skip_first_batches\(loader, n\)"
    ):
        accelerator.prepare(DataLoader(torch.zeros(4, 1)))

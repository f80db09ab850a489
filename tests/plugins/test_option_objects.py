"""What is passed to Accelerator(...) in several ways agrees, or is an error; what is not passed is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from accel_trainer import (
    Accelerator,
    DataLoaderConfiguration,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
)
from accel_trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"split_batches": True, "dataloader_config": DataLoaderConfiguration(split_batches=False)},
            r"dataloader_config sets split_batches=False, and Accelerator\(split_batches=True\) was given beside it",
        ),
        (
            {"strategy": "single", "fsdp_plugin": FullyShardedDataParallelPlugin()},
            r"fsdp_plugin sets strategy='fsdp2', and Accelerator\(strategy='single'\) was given beside it; pass one",
        ),
    ],
)
def test_an_argument_and_an_object_that_disagree_are_an_error(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        Accelerator(cpu=True, **arguments)


def test_an_object_may_repeat_an_argument():
    configuration = DataLoaderConfiguration(split_batches=True, even_batches=False)
    accelerator = Accelerator(cpu=True, split_batches=True, dataloader_config=configuration)
    assert (accelerator.split_batches, accelerator.even_batches) == (True, False)


def test_a_plugin_leaves_what_it_does_not_set_to_the_file():
    file = {"accumulation": {"num_steps": 8, "sync_with_dataloader": False}}
    plugin = GradientAccumulationPlugin(sync_each_batch=True)
    accelerator = Accelerator(cpu=True, config=file, gradient_accumulation_plugin=plugin)
    accumulation = accelerator.config.accumulation
    assert (accumulation.num_steps, accumulation.sync_with_dataloader, accumulation.sync_each_batch) == (8, False, True)
    assert accelerator.gradient_state.plugin_kwargs == {"sync_each_batch": True}
    assert accelerator.gradient_state.num_steps == 8


def test_no_handlers_may_be_written_as_none():
    assert Accelerator(cpu=True, kwargs_handlers=None).scaler is None

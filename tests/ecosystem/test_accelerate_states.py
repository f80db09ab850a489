"""Functions of Hugging Face accelerate that other libraries call in our Trainer find its rank, device and engine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import preload, run_ranks
from tests.trainer_jobs import arguments, build_trainer

accelerate = pytest.importorskip("accelerate")
pytest.importorskip("accelerate.logging")

preload("accelerate")


def look(output_dir: str, **options: Any) -> dict[str, Any]:
    """Return what accelerate's functions say before there is a Trainer, and once there is one."""
    AcceleratorState, PartialState = accelerate.state.AcceleratorState, accelerate.state.PartialState
    PartialState()  # as a script's own call before the arguments; without a GPU it finds one process
    arguments(output_dir)
    early = PartialState()
    rank = early.process_index
    first = {
        "process": (rank, early.num_processes, str(early.device), str(early.distributed_type)),
        "gathered": accelerate.utils.gather_object([rank]),
        "broadcast": accelerate.utils.broadcast_object_list([rank], from_process=early.num_processes - 1),
    }
    trainer = build_trainer(output_dir, **options)
    accelerate.logging.get_logger("trl").warning("an error without a state")
    accelerate.utils.set_seed(7, device_specific=True)
    state = AcceleratorState()
    again = arguments(output_dir, accelerator_config={"use_configured_state": True})
    return first | {
        "drawn": random.random(),
        "kind": state.distributed_type == trainer.accelerator.distributed_type,
        "precision": state.mixed_precision,
        "fsdp": state.fsdp_plugin is trainer.accelerator.state.fsdp_plugin,
        "deepspeed": getattr(state.deepspeed_plugin, "zero_stage", None),
        "kept": again.process_index == rank and AcceleratorState().initialized,
    }


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_functions_of_accelerate_see_the_ranks_of_our_trainer(tmp_path: Path, strategy: str):
    for rank, seen in enumerate(run_ranks(look, 2, str(tmp_path), strategy=strategy)):
        assert seen == {
            "process": (rank, 2, "cpu", "DistributedType.MULTI_CPU"),
            "gathered": [0, 1],
            "broadcast": [1],
            "drawn": random.Random(7 + rank).random(),
            "kind": True,
            "precision": "no",
            "fsdp": True,
            "deepspeed": None,
            "kept": True,
        }


def test_functions_of_accelerate_see_one_process_and_its_precision(tmp_path: Path):
    seen = look(str(tmp_path), bf16=True)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)

    assert seen["process"] == (0, 1, "cpu", "DistributedType.NO")
    assert (seen["gathered"], seen["precision"], seen["kind"], seen["kept"]) == ([0], "bf16", True, True)


@pytest.mark.multirank
def test_functions_of_accelerate_see_the_engine_of_our_trainer(tmp_path: Path):
    pytest.importorskip("deepspeed")
    config = {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    for seen in run_ranks(look, 2, str(tmp_path), deepspeed=config, timeout=200):
        assert seen["kind"]
        assert seen["deepspeed"] == 3

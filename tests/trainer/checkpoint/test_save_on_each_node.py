"""save_on_each_node: every node has on its own disk what it needs to go on, and the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import TrainerCallback

from tests.cells import beyond
from tests.ranks import preload, run_ranks
from tests.strategy_configs import HAS_DEEPSPEED
from tests.trainer_jobs import build_trainer, summary

if HAS_DEEPSPEED:
    preload("deepspeed")

ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
RUN: dict[str, Any] = {
    "samples": 40, "per_device_train_batch_size": 2, "num_train_epochs": 2, "dropout": 0.1, "save_strategy": "steps",
    "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3, "eval_samples": 8,
}  # fmt: skip
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp_sharded": {"strategy": "fsdp_sharded"},
    "zero3": {"deepspeed": ZERO_3},
}


def on_nodes(num_ranks: int) -> Any:
    """Return the environment of two nodes."""
    per_node = num_ranks // 2

    def environment(rank: int) -> dict[str, str]:
        return {
            "LOCAL_RANK": str(rank % per_node), "LOCAL_WORLD_SIZE": str(per_node), "GROUP_RANK": str(rank // per_node),
        }  # fmt: skip

    return environment


class StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def run(folder: Path, resume: Any = None, stop_at: int = 0, **options: Any) -> dict[str, Any]:
    """Train in a directory of this node: the same relative path leads to another disk on each."""
    node = folder / f"node{os.environ['GROUP_RANK']}"
    node.mkdir(parents=True, exist_ok=True)
    os.chdir(node)
    trainer = build_trainer("out", save_on_each_node=True, **{**RUN, **options})
    trainer.add_callback(StopAt(stop_at))
    trainer.train(resume_from_checkpoint=resume)
    trainer.save_model("model")
    return summary(trainer)


def straight(folder: str, **options: Any) -> dict[str, Any]:
    trainer = build_trainer(folder, **{**RUN, **options})
    trainer.train()
    return summary(trainer)


def straight_and_stopped(folder: Path, run_first: Callable[..., Any], first: dict[str, Any], **options: Any) -> Any:
    """Train to the end, and return the summary; then train on nodes with disks of their own, and stop at update 6.

    Args:
        first: changes of that run alone.
    """
    summary_of_straight = straight(str(folder / "straight"), **options)
    run_first(folder / "first", **{"stop_at": 6, **options, **first})
    return summary_of_straight


def files_of(checkpoint: Path) -> set[str]:
    return {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("engine", "num_ranks"), [beyond(("fsdp", 2)), ("fsdp_sharded", 4), ("ddp", 2), beyond(("zero3", 2))]
)
def test_each_node_goes_on_from_its_own_disk(tmp_path, engine: str, num_ranks: int):
    if engine == "zero3" and not HAS_DEEPSPEED:
        pytest.skip("DeepSpeed is not installed")
    # Two epochs of three updates; the run stops in the second.
    options: dict[str, Any] = {**ENGINES[engine], "samples": 6 * num_ranks, "save_steps": 2, "eval_steps": 2}
    options |= {"env": on_nodes(num_ranks), "timeout": 100}
    first = {"load_best_model_at_end": True, "stop_at": 4}
    reference = run_ranks(straight_and_stopped, num_ranks, tmp_path, run, first, **options)

    (tmp_path / "first").rename(tmp_path / "second")  # nothing knows where it was
    checkpoints = [tmp_path / "second" / f"node{node}" / "out" / "checkpoint-4" for node in (0, 1)]
    held = [files_of(checkpoint) for checkpoint in checkpoints]
    streams = [{f"rng_state_{rank}.pth" for rank in range(num_ranks)} & names for names in held]
    assert sorted(map(len, streams)) == [num_ranks // 2] * 2
    assert streams[0].isdisjoint(streams[1])
    for name in ("model.safetensors", "config.json", "trainer_state.json", "scheduler.pt", "COMMITTED"):
        assert all(name in names for names in held)
    np.testing.assert_equal(*(load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints))

    found = run_ranks(run, num_ranks, tmp_path / "second", True, **options)
    for own, expected in zip(found, reference, strict=True):
        assert own["step"] == expected["step"]
        assert own["losses"] == expected["losses"]
        np.testing.assert_equal(own["weights"], expected["weights"])
    for node in (0, 1):
        weights = load_file(tmp_path / "second" / f"node{node}" / "model" / "model.safetensors")
        for name, value in reference[0]["weights"].items():
            if name in weights:
                np.testing.assert_array_equal(weights[name], value)


def resume_on_one_node(folder: Path) -> str:
    os.chdir(folder / "node0")
    with pytest.raises(Exception) as caught:  # noqa: PT011
        build_trainer("out", save_on_each_node=True, **{**RUN, **ENGINES["fsdp_sharded"]}).train(True)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_the_disk_of_one_node_is_not_enough_for_all_and_that_is_said(tmp_path):
    run_ranks(run, 2, tmp_path, stop_at=3, env=on_nodes(2), **ENGINES["fsdp_sharded"])
    told = run_ranks(resume_on_one_node, 2, tmp_path)
    assert any("Were nodes saved to disks of their own? Then load with as many of them" in line for line in told), told

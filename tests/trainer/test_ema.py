"""Averages of the weights in the Trainer: the recursion over its checkpoints, evaluation, resume, and its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cells import beyond, crossed
from tests.strategy_configs import HAS_DEEPSPEED
from tests.trainer_jobs import TokenDataset, build_model, build_trainer, on_ranks, preload, weights_of

DECAY, UPDATES = 0.8, 3
STRATEGIES = ["single", "ddp", "fsdp", "fsdp_sharded", *(["zero2"] if HAS_DEEPSPEED else [])]
if HAS_DEEPSPEED:
    preload("deepspeed")
State = dict[str, torch.Tensor]


def run(folder: str, *, strategy: str, resume: str | None = None, **changes: Any) -> dict[str, Any]:
    if strategy == "zero2":
        stage = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
        strategy, changes = "single", {"deepspeed": stage, **changes}
    options = {"ema_decay": DECAY, "max_steps": UPDATES, "save_strategy": "steps", "save_steps": 1}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, **changes}
    trainer = build_trainer(folder, strategy=strategy, samples=64, **options)
    trainer.train(resume_from_checkpoint=resume)
    history = trainer.state.log_history
    trainer.save_model(f"{folder}/final")
    return {
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "eval_losses": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "after": trainer.evaluate()["eval_loss"],
        "weights": {name: torch.from_numpy(value) for name, value in weights_of(trainer).items()},
        "best": trainer.state.best_model_checkpoint,
    }


def averages_of(checkpoint: Path) -> State:
    """Put together the averages in a checkpoint's files, of any number of ranks; every rank has rows from a box on."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    found: State = {}
    for file in sorted(checkpoint.glob("averages.*.safetensors")):
        for name, tensor in load_file(file).items():
            entry = manifest["tensors"][file.name][name]
            full = found.setdefault(name, torch.zeros(entry.get("shape", list(tensor.shape))))
            offsets = entry.get("offsets", [0] * tensor.ndim)
            full[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return found


def evaluated(state: State) -> float:
    model = build_model()
    model.load_state_dict(state, strict=False)
    rows = torch.utils.data.default_collate(list(TokenDataset(11, seed=1)))
    with torch.no_grad():
        return model.eval()(**rows).loss.item()


def same(found: State, expected: State, bound: float) -> None:
    assert found.keys() <= expected.keys()
    assert found
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


def run_thrice(folder: str, *, strategy: str) -> list[dict[str, Any]]:
    """Return a run, one without averages, and one that goes on from the second checkpoint of the first."""
    return [
        run(f"{folder}/run", strategy=strategy),
        run(f"{folder}/alone", strategy=strategy, ema_decay=None, save_strategy="no", eval_strategy="no"),
        run(f"{folder}/again", strategy=strategy, resume=f"{folder}/run/checkpoint-2"),
    ]


@pytest.mark.multirank
@pytest.mark.parametrize("strategy", [beyond(name) if name in ("ddp", "fsdp") else name for name in STRATEGIES])
def test_a_run_evaluates_saves_and_ends_with_the_averages_of_its_weights(strategy, tmp_path):
    found, alone, resumed = on_ranks(strategy, run_thrice, str(tmp_path))[0]
    expected: State = {}
    for update in range(1, UPDATES + 1):
        checkpoint = tmp_path / "run" / f"checkpoint-{update}"
        weights = load_file(checkpoint / "model.safetensors")
        expected = {
            name: torch.lerp(expected[name], value, 1 - DECAY) if expected else value for name, value in weights.items()
        }
        same(averages_of(checkpoint), expected, 1e-6)
        assert found["eval_losses"][update - 1] == pytest.approx(evaluated(expected), abs=1e-5)
    same(found["weights"], expected, 1e-6)
    same(load_file(tmp_path / "run" / "final" / "model.safetensors"), found["weights"], 0)
    assert found["after"] == pytest.approx(found["eval_losses"][-1], abs=1e-6)
    # Training itself is that of a run without.
    assert alone["losses"] == found["losses"]
    assert (resumed["losses"], resumed["eval_losses"]) == (found["losses"], found["eval_losses"])
    same(resumed["weights"], found["weights"], 0)


@pytest.mark.multirank
@pytest.mark.parametrize(("strategy", "save_only_model"), crossed(["fsdp", "single"], [False, True]))
def test_the_best_model_is_that_of_its_averages(strategy, save_only_model, tmp_path):
    options = {
        "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.5, "ema_decay": 0.3,
        "save_only_model": save_only_model,
    }  # fmt: skip
    found = on_ranks(strategy, run, str(tmp_path), **options)[0]
    best = 1 + found["eval_losses"].index(min(found["eval_losses"]))
    assert found["best"] == str(tmp_path / f"checkpoint-{best}")
    same(averages_of(tmp_path / f"checkpoint-{best}"), found["weights"], 0)
    assert found["after"] == pytest.approx(min(found["eval_losses"]), abs=1e-6)

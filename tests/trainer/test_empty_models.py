"""A model given by its path is laid out without values where memory is spared, and trains as it would otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model, summary


def train_from_path(folder: str, kind: str, spare: bool, first: str) -> dict[str, Any]:
    from accel_trainer.trainer import Trainer

    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": spare}}
    data = {"kind": "class" if kind == "bert" else "lm"}
    trainer = Trainer(
        f"{folder}/model",
        arguments(f"{folder}/out", **options),
        train_dataset=TokenDataset(16, **data),
        eval_dataset=TokenDataset(6, seed=1, **data),
    )
    found: dict[str, Any] = {"is_empty": all(p.is_meta for p in trainer.model.parameters())}
    found["metrics"] = trainer.evaluate()["eval_loss"] if first == "evaluate" else None
    trainer.train()
    return {**found, **summary(trainer)}


@pytest.mark.parametrize(("kind", "first"), [("llama", "train"), ("gpt2", "evaluate"), ("bert", "train")])
def test_an_empty_model_trains_as_a_loaded_one(tmp_path: Path, kind: str, first: str):
    build_model(kind, seed=3).save_pretrained(tmp_path / "model")
    spared = run_ranks(train_from_path, 2, str(tmp_path), kind, True, first, timeout=100)[0]
    loaded = run_ranks(train_from_path, 2, str(tmp_path), kind, False, first, timeout=100)[0]
    assert (spared["is_empty"], loaded["is_empty"]) == (True, False)
    assert spared["metrics"] == pytest.approx(loaded["metrics"]) if first == "evaluate" else spared["metrics"] is None
    assert spared["losses"] == pytest.approx(loaded["losses"], abs=1e-6)
    for name, weight in loaded["weights"].items():
        assert torch.allclose(torch.from_numpy(spared["weights"][name]), torch.from_numpy(weight), atol=1e-6), name


def build_from(folder: str) -> bool:
    from accel_trainer.trainer import Trainer

    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": True}}
    trainer = Trainer(folder, arguments(f"{folder}/out", **options), train_dataset=TokenDataset(4))
    return any(p.is_meta for p in trainer.model.parameters())


def test_files_that_from_pretrained_has_to_rename_are_loaded_by_it(tmp_path: Path):
    model = build_model("llama")
    model.model.save_pretrained(tmp_path)  # without the prefix that the whole model's names have
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path)
    assert run_ranks(build_from, 2, str(tmp_path), timeout=100) == [False, False]

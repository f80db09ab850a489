"""A model given by its path is laid out without values where memory is spared, and trains as it would otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from accel_trainer.trainer import Trainer
from tests.ranks import run_ranks
from tests.trainer_jobs import TokenDataset, arguments, build_model, summary


def train_from_path(folder: str, kind: str, spare: bool, first: str) -> dict[str, Any]:
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


KINDS = [("llama", "train"), ("gpt2", "evaluate"), ("bert", "train")]


def run_on_two(folder: str) -> dict[Any, Any]:
    """Each kind of model, without values at first and with; and one that `from_pretrained` has to load."""
    found: dict[Any, Any] = {
        (kind, spare): train_from_path(f"{folder}/{kind}", kind, spare, first)
        for kind, first in KINDS
        for spare in (True, False)
    }
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"cpu_ram_efficient_loading": True}}
    trainer = Trainer(f"{folder}/renamed", arguments(f"{folder}/out", **options), train_dataset=TokenDataset(4))
    found["renamed"] = any(p.is_meta for p in trainer.model.parameters())
    return found


@pytest.fixture(scope="module")
def on_two(tmp_path_factory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("models")
    for kind, _ in KINDS:
        build_model(kind, seed=3).save_pretrained(folder / kind / "model")
    model = build_model("llama")
    model.model.save_pretrained(folder / "renamed")  # without the prefix that the whole model's names have
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder / "renamed")
    return run_ranks(run_on_two, 2, str(folder), timeout=100)


@pytest.mark.multirank
@pytest.mark.parametrize(("kind", "first"), KINDS)
def test_an_empty_model_trains_as_a_loaded_one(on_two, kind: str, first: str):
    spared, loaded = on_two[0][kind, True], on_two[0][kind, False]
    assert (spared["is_empty"], loaded["is_empty"]) == (True, False)
    assert spared["metrics"] == pytest.approx(loaded["metrics"]) if first == "evaluate" else spared["metrics"] is None
    assert spared["losses"] == pytest.approx(loaded["losses"], abs=1e-6)
    for name, weight in loaded["weights"].items():
        assert torch.allclose(torch.from_numpy(spared["weights"][name]), torch.from_numpy(weight), atol=1e-6), name


@pytest.mark.multirank
def test_files_that_from_pretrained_has_to_rename_are_loaded_by_it(on_two):
    assert [found["renamed"] for found in on_two] == [False, False]

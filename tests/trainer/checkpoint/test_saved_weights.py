"""Weights in a Trainer's files: gathered into no rank's memory, and read back under whatever names they are stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import MixtralForCausalLM

from tests.ranks import run_ranks
from tests.trainer_jobs import build_model, build_trainer, summary, weights_of


def is_in_a_file(tensor: Tensor) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return line.endswith("(deleted)")  # it has no name
    return False


def save(folder: str) -> tuple[list[str], int]:
    trainer = build_trainer(folder, strategy="fsdp", model="gpt2")
    trainer.evaluate()  # lays the model out
    handed: dict[str, Tensor] = {}
    write = trainer._save

    def look(output_dir: str, state_dict: dict[str, Any]) -> None:
        handed.update(state_dict)
        write(output_dir, state_dict=state_dict)

    trainer._save = look
    trainer.save_model(f"{folder}/new/model")
    return [name for name, tensor in handed.items() if not is_in_a_file(tensor)], len(handed)


@pytest.mark.multirank
def test_whole_weights_are_in_no_ranks_memory(tmp_path: Path):
    (in_memory, num_handed), others = run_ranks(save, 2, str(tmp_path))
    assert num_handed > 10
    assert in_memory == []
    assert others == ([], 0)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["model"]
    stored, expected = load_file(tmp_path / "new/model/model.safetensors"), build_model("gpt2").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in stored.items())
    assert set(expected) - set(stored) == {"lm_head.weight"}  # tied


def resume(folder: str, strategy: str) -> dict[str, Any]:
    """Train a mixture of experts, resume it in the middle, and load the weights of the middle as the best ones."""
    options = {"strategy": strategy, "model": "mixtral", "save_strategy": "steps", "save_steps": 4}
    whole = build_trainer(folder, **options)
    whole.train()
    checkpoint = f"{folder}/checkpoint-4"
    again = build_trainer(f"{folder}/again", **options)
    again.train(resume_from_checkpoint=checkpoint)
    found = {"whole": summary(whole), "again": summary(again)}
    again.state.best_model_checkpoint = checkpoint
    again._load_best_model()
    return {**found, "best": weights_of(again)}


def check_resumed(found: dict[str, Any], checkpoint: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    expected = MixtralForCausalLM.from_pretrained(checkpoint).state_dict()
    assert not set(stored) <= set(expected)  # each expert has a name there
    assert found["again"]["losses"] == pytest.approx(found["whole"]["losses"], rel=1e-6)
    for name, value in found["whole"]["weights"].items():
        np.testing.assert_allclose(found["again"]["weights"][name], value, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(found["best"][name], expected[name].numpy(), err_msg=name)


def test_experts_that_are_stored_one_by_one_are_resumed(tmp_path: Path):
    check_resumed(resume(str(tmp_path), "single"), tmp_path / "checkpoint-4")


def resume_on_two(folder: str) -> dict[str, Any]:
    return {strategy: resume(f"{folder}/{strategy}", strategy) for strategy in ("ddp", "fsdp")}


@pytest.mark.multirank
def test_experts_that_are_stored_one_by_one_are_resumed_on_ranks(tmp_path: Path):
    for strategy, found in run_ranks(resume_on_two, 2, str(tmp_path))[0].items():
        check_resumed(found, tmp_path / strategy / "checkpoint-4")

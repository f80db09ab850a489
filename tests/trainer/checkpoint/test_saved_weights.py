"""What a sharded Trainer hands to the writer of weights lies in a file, and in no rank's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks import run_ranks
from tests.trainer_jobs import build_model, build_trainer


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

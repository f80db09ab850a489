"""TRL's command line, unchanged, as a program that finds this package in the place of accelerate.

`make test-ecosystem PYTEST_ARGS="-m 'cell or not cell'"` runs all of its commands.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cells import beyond
from tests.ecosystem.text_jobs import build_tokenizer, preferences, run_unmodified, save_llama, texts

pytest.importorskip("trl")


@pytest.mark.multirank
@pytest.mark.timeout(400)  # whole processes, each of which imports these libraries
@pytest.mark.parametrize(("command", "num_processes"), [("dpo", 2), beyond(("sft", 1))])
def test_trls_command_trains(command: str, num_processes: int, tmp_path: Path):
    save_llama(str(tmp_path / "model"))
    build_tokenizer().save_pretrained(tmp_path / "model")
    for split in ("train", "test"):
        rows = preferences(8) if command == "dpo" else texts(8)
        rows.to_json(tmp_path / "data" / f"{split}.jsonl")
    options: dict[str, Any] = {
        "model_name_or_path": tmp_path / "model", "dataset_name": tmp_path / "data", "output_dir": tmp_path / "out",
        "max_steps": 2, "per_device_train_batch_size": 4 // num_processes, "eval_strategy": "steps", "eval_steps": 2,
        "save_steps": 2, "report_to": "none", "logging_steps": 1, "num_processes": num_processes,
    }  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]

    run_unmodified("-m", "accel_trainer.as_accelerate", "-m", "trl.cli.main", command, "--cpu", "--use_cpu", *words)

    assert (tmp_path / "out" / "model.safetensors").is_file()
    history = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert history[-1]["epoch"] == 1.0  # four rows in each of two updates, and eight in all
    assert history[-1]["eval_loss"] > 0
    if command == "dpo":
        assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the model is its own reference
        assert "eval_rewards/margins" in history[-1]

"""Programs for upstream's Trainer and TRL's command line, unchanged, with `--as_accelerate`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ecosystem.text_jobs import build_tokenizer, preferences, save_llama, texts

pytest.importorskip("accelerate")  # the reference
pytest.importorskip("peft")
pytest.importorskip("trl")

UPSTREAM = """
import json
import sys

import accelerate
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
folder, batch_size = sys.argv[1], int(sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(f"{folder}/model")
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
rows = [{"input_ids": row, "labels": row} for row in torch.randint(2, 258, (24, 8))]
args = TrainingArguments(
    f"{folder}/{sys.argv[3]}", per_device_train_batch_size=batch_size, per_device_eval_batch_size=batch_size,
    max_steps=4, save_steps=2, logging_steps=1, eval_strategy="steps", eval_steps=2, report_to="none", use_cpu=True,
    learning_rate=0.1,
)
trainer = Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows[:8])
trainer.train()
trainer.train(resume_from_checkpoint=f"{folder}/{sys.argv[3]}/checkpoint-2")
if trainer.is_world_process_zero():
    keys = ("loss", "grad_norm", "eval_loss")
    history = [[entry[key] for key in keys if key in entry] for entry in trainer.state.log_history]
    owner = type(trainer.accelerator).__module__.partition(".")[0]
    print(json.dumps([owner, type(trainer).__module__, accelerate.__version__, history]))
"""


def run(*words: str) -> str:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run([sys.executable, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.multirank
@pytest.mark.timeout(400)  # whole processes, each of which imports these libraries
def test_upstreams_trainer_gives_its_own_numbers_on_one_process_and_on_two(tmp_path: Path):
    save_llama(str(tmp_path / "model"))
    (tmp_path / "script.py").write_text(UPSTREAM)
    script, folder = str(tmp_path / "script.py"), str(tmp_path)
    launch = ("-m", "accel_trainer", "launch", "--cpu", "--as_accelerate", "--num_processes")

    reference = json.loads(run(script, folder, "4", "reference").splitlines()[-1])
    one = json.loads(run(*launch, "1", script, folder, "4", "one").splitlines()[-1])
    two = json.loads(run(*launch, "2", script, folder, "2", "two").splitlines()[-1])

    assert reference[0] == "accelerate"
    for found in (one, two):
        assert found[:3] == ["accel_trainer", "transformers.trainer", "1.15.0"]
        assert len(found[3]) == len(reference[3])
        for ours, theirs in zip(found[3], reference[3], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.multirank
@pytest.mark.timeout(400)  # whole processes, each of which imports these libraries
@pytest.mark.parametrize(("command", "num_processes"), [("dpo", 2), pytest.param("sft", 1, marks=pytest.mark.slow)])
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

    run("-m", "accel_trainer.as_accelerate", "-m", "trl.cli.main", command, "--cpu", "--use_cpu", *words)

    assert (tmp_path / "out" / "model.safetensors").is_file()
    history = json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert history[-1]["epoch"] == 1.0  # four rows in each of two updates, and eight in all
    assert history[-1]["eval_loss"] > 0
    if command == "dpo":
        assert history[0]["loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the model is its own reference
        assert "eval_rewards/margins" in history[-1]

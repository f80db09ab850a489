"""A program for upstream's Trainer, unchanged, with `--as_accelerate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ecosystem.text_jobs import run_unmodified, save_llama

pytest.importorskip("accelerate")  # the reference
pytest.importorskip("peft")

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


@pytest.mark.multirank
@pytest.mark.timeout(400)  # whole processes, each of which imports these libraries
def test_upstreams_trainer_gives_its_own_numbers_on_one_process_and_on_two(tmp_path: Path):
    save_llama(str(tmp_path / "model"))
    (tmp_path / "script.py").write_text(UPSTREAM)
    script, folder = str(tmp_path / "script.py"), str(tmp_path)
    launch = ("-m", "accel_trainer", "launch", "--cpu", "--as_accelerate", "--num_processes")

    reference = json.loads(run_unmodified(script, folder, "4", "reference").splitlines()[-1])
    one = json.loads(run_unmodified(*launch, "1", script, folder, "4", "one").splitlines()[-1])
    two = json.loads(run_unmodified(*launch, "2", script, folder, "2", "two").splitlines()[-1])

    assert reference[0] == "accelerate"
    for found in (one, two):
        assert found[:3] == ["accel_trainer", "transformers.trainer", "1.15.0"]
        assert len(found[3]) == len(reference[3])
        for ours, theirs in zip(found[3], reference[3], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5)
